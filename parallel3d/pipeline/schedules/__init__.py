"""Pipeline schedules. Each is an action table that the executor, the simulator and the printed output share."""
