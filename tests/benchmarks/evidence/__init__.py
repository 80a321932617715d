"""Compare claims of papers with our training runs on two CPU cores.

Generate the pages that describe the claims and the runs.
"""
