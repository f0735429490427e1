"""A whole run: started and supervised here or by torchrun, its folder, its monitoring."""
