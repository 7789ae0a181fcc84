"""A cluster file of two devices, as a template with ``memory`` to fill in."""

from __future__ import annotations

CLUSTER = """
format = "placer-cluster/1"
name = "pair"
[[device]]
name = "a"
kind = "x"
memory_bytes = {memory}
[[device]]
name = "b"
kind = "x"
memory_bytes = {memory}
[[link]]
between = ["a", "b"]
latency_s = 1e-6
bandwidth_bytes_per_s = 1e10
"""
