"""What two CPU cores can show of the papers' tables: a queue of runs, and what came of each."""
