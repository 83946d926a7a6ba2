"""Plan a run before it starts, and measure this machine. `simulation` counts operations, `planner` a run's."""
