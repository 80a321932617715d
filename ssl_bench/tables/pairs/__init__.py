"""What two encoders, or two blocks, do on the same images."""
