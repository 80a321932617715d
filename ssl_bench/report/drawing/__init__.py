"""Curves as lengths in a drawing, and what they are called there."""
