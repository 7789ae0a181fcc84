"""Placers by name: all search algorithms behind one protocol.

``placer_named("heft").place(SearchRequest(problem, budget))`` returns candidates, best first. A
distribution adds its own placers by entry points of the group ``placer.placers``, and tests them
with :mod:`placer.placers.contract`. Importing this package loads nothing heavy.
"""

from placer.placers.registry import DEFAULT, Listing, asks_policy, listings, placer_named

__all__ = ["DEFAULT", "Listing", "asks_policy", "listings", "placer_named"]
