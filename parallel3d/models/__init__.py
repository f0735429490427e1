"""Models as rows of layers: built-in, Hugging Face and users' own, and how they are initialized."""
