"""What a rank records: events, collectives, loop lag, and the trace that shows them."""
