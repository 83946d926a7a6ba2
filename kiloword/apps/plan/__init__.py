"""Plan a run before it starts, and measure this machine. `simulation` counts a step, `planner` what follows."""
