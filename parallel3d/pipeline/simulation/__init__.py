"""A schedule's table carried out on paper: how long it takes, who waits for whom, what it holds. No torch."""

from parallel3d.pipeline.simulation.costs import Costs
from parallel3d.pipeline.simulation.deadlock import Deadlock, ScheduleDeadlock, find_deadlock
from parallel3d.pipeline.simulation.outcome import CriticalStep, Peak, Reason, Simulation
from parallel3d.pipeline.simulation.simulator import makespan, simulate

__all__ = [
    "Costs",
    "CriticalStep",
    "Deadlock",
    "Peak",
    "Reason",
    "ScheduleDeadlock",
    "Simulation",
    "find_deadlock",
    "makespan",
    "simulate",
]
