"""Objectives of single papers. An objective is imported only if a run selects it by name."""
