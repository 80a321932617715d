"""Where the features of a training set are, and how they come there."""
