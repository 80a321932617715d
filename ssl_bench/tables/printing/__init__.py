"""Tables as text, and where they are written."""
