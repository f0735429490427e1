"""How processes live: event loop, launch, supervision, control channel, deadlines."""
