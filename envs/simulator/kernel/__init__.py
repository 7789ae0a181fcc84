"""The compiled core of the simulator: its arrays, its queues and the two paths of a step."""
