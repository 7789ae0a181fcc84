"""Measured backends: placements run in turn on real devices, pinned cores or torch devices."""
