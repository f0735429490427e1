"""A worker of the gradient server: its protocol, its connection, its retries."""
