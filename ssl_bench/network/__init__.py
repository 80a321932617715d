"""Files from the network, whole and as they were published."""
