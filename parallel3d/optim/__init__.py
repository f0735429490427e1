"""The optimizer step over the mesh: norm, clip, update, learning rate."""
