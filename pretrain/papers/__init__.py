"""Objectives that only one paper uses. They are imported only if a run selects them by name."""
