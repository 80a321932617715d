"""Tables of a report: checkpoints against tasks, against measurements, and blocks."""
