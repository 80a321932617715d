"""Copying strings: the task on which state space models are trained and tested."""
