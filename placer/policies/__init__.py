"""Placers that learned: policies that say which decoder weights suit a problem.

``load("generalist")`` reads a shipped policy; importing this package loads nothing heavy.
"""

from placer.policies.network import GENERALIST, Policy, load, names

__all__ = ["GENERALIST", "Policy", "load", "names"]
