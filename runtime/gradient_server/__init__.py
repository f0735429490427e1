"""The gradient server: workers join over TCP, and their gradients are averaged."""
