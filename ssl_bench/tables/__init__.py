"""Build tables of scores over blocks, epochs, severities or encoders, and compare encoders."""
