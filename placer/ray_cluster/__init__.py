"""Searching, measuring and training on the nodes of a Ray cluster (extra: cluster)."""
