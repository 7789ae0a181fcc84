"""Placers by name: all search algorithms behind one protocol.

``placer_named("heft").place(SearchRequest(problem, budget))`` returns candidates, best first.
:func:`register_placer` adds one in this process, a distribution adds its own by entry points of the
group ``placer.placers``; :mod:`placer.placers.contract` tests them. Importing this package loads
nothing heavy.
"""

from placer.placers.registry import (
    DEFAULT,
    Listing,
    asks_policy,
    listings,
    placer_named,
    register_placer,
)

__all__ = ["DEFAULT", "Listing", "asks_policy", "listings", "placer_named", "register_placer"]
