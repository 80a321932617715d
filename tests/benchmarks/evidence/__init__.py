"""What two CPU cores could show of the papers' tables: the pages of a finished queue of runs."""
