"""Learned policies, which propose decoder weights for a problem.

``load("generalist")`` reads a shipped policy; importing this package loads nothing heavy.
"""

from placer.policies.network import GENERALIST, Policy, load, names

__all__ = ["GENERALIST", "Policy", "load", "names"]
