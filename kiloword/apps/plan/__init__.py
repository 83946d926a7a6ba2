"""Plan a run before it starts: which layouts fit a GPU, and how long they take; and measure this machine.

`simulation` counts a step on tensors without content, `planner` says what memory and time follow.
"""
