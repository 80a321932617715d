"""Objectives of single papers. The trainer imports one only if a run selects it by name."""
