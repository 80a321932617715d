"""Attention that rotates the tokens, and the matrix functions that it needs."""
