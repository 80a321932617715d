"""Check claims made in papers against our own training runs on two CPU cores.

The modules judge the claims and generate the pages that report them.
"""
