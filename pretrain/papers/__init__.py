"""Training objectives of single papers, each imported only if a run selects it by name."""
