"""Measured backends: placements run on real devices, in turn."""
