"""Pinned worker processes, one for each core device, that run a step op by op."""
