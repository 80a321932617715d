"""Test claims of papers with our own training runs."""
