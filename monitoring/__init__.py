"""What happened: events in, metrics out."""
