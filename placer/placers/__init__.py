"""Placers by name: everything that proposes plans, behind one protocol.

``placer_named("heft").place(problem, Budget.parse("100e"), seed=0)`` gives its plans, best first.
A distribution adds its own by an entry point of the group ``placer.placers``, and shows with
:mod:`placer.placers.contract` that they keep the rules. Importing this package loads nothing heavy.
"""

from placer.placers.registry import DEFAULT, Listing, asks_policy, listings, placer_named

__all__ = ["DEFAULT", "Listing", "asks_policy", "listings", "placer_named"]
