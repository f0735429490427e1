"""Pure analysis of events: time attribution, stragglers, bottlenecks."""
