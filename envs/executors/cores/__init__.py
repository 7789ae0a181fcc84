"""Pinned worker processes, one for each core device."""
