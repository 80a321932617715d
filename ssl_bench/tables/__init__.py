"""What records say, as tables: over blocks, over encoders, in pairs, beside published ones."""
