"""Objectives that only single papers need. The trainer finds them by name and imports none."""
