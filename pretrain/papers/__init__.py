"""Objectives that only one paper uses. Each is imported only if a run selects it by name."""
