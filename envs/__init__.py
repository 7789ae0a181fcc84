"""Clusters, placements, and the backends that evaluate placements by step time."""
