"""Who talks to whom and how bytes move: topology, groups, transports."""
