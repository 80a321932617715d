"""Turn records into tables over blocks, epochs, severities or encoders, and compare encoders."""
