"""Functions of many small matrices, of which those for a GPU never make the host wait."""
