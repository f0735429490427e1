"""Recording in ranks: events, collectives, event-loop lag, and their export as a trace."""
