"""Many checkpoints on many datasets: which cells are missing, and where they are computed."""
