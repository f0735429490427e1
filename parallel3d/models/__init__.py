"""Models as rows of layers: the built-in ones, the user's own, and how they get memory and first values."""
