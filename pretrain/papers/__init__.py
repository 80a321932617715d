"""Objectives that reproduce single papers. They are imported only if a run selects them by name."""
