"""The compiled core of the simulator."""
