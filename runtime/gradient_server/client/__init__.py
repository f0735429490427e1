"""A worker of the gradient server: its connection, its turn, its retries."""
