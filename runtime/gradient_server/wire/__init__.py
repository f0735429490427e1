"""The gradient server's protocol: frames, messages of versions 1 and 2, and who may join."""
