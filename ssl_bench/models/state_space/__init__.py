"""Mamba 1 and 2 in plain torch, and the initialisation that lets them copy."""
