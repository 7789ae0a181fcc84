"""Placers that learned: policies that say which decoder weights suit a problem.

``load("generalist")`` reads a shipped policy; importing this package loads nothing heavy.
"""

from placer.policies.network import Policy, load, names

__all__ = ["Policy", "load", "names"]
