"""Registry of placers by name, search algorithms behind :class:`placer.search.request.Placer`.

:func:`register_placer` adds one in this process, a distribution adds its own by entry points of the
group ``placer.placers``; :mod:`placer.search.contract` tests them. Importing this module loads
nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, cast

from graphs.text import suggestion

if TYPE_CHECKING:
    from placer.search.request import Placer
    from placer.search.sampling import Proposer

GROUP: Final = "placer.placers"
"""Entry point group of placers: classes constructed without arguments."""
DEFAULT: Final = "portfolio"
BENCH: Final = "pip install 'device-placer[bench]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Entry of the registry; reading it imports nothing."""

    name: str
    summary: str
    home: str  # "module:class"
    module: str = ""  # name of an extra module that must be installed
    takes_policy: bool = False
    distribution: str = ""  # distribution of a plug-in
    make: Any = None  # class that was registered in this process

    @property
    def needs(self) -> str:
        """Return a description of special requirements, "" for none."""
        if self.make is not None:
            return "registered in this process"
        if self.distribution:
            return f"from {self.distribution}"
        if self.takes_policy:
            return "a policy: --policy"
        if not self.module:
            return ""
        return self.module if self.is_installed else f"{self.module}, not installed: {BENCH}"

    @property
    def is_installed(self) -> bool:
        """Return whether the extra module is installed."""
        return not self.module or find_spec(self.module) is not None


def _built_in(name: str, home: str, summary: str, **options: Any) -> Listing:
    return Listing(name=name, summary=summary, home=f"placer.search.{home}", **options)


BUILT_IN: Final = (
    _built_in(
        "portfolio",
        "portfolio:Portfolio",
        "heuristics, policy, evolution, beam searches and annealing in turn: the default",
        takes_policy=True,
    ),
    _built_in("single-device", "heuristics:SingleDevice", "all on one device, the best of them"),
    _built_in("round-robin", "heuristics:RoundRobin", "one op after the other on each device"),
    _built_in("layer-split", "heuristics:LayerSplit", "layers, balanced over the devices"),
    _built_in("heft", "heuristics:Heft", "highest bottom level first, earliest finish"),
    _built_in("etf", "heuristics:Etf", "the op and device that can start first"),
    _built_in("m-etf", "heuristics:MemoryEtf", "ETF that keeps room for every output"),
    _built_in("annealing", "portfolio:AnnealingPlacer", "annealing of single ops and their order"),
    _built_in("evolution", "evolution:EvolutionPlacer", "CMA-ES on the list scheduler's weights"),
    _built_in(
        "policy", "sampling:PolicyPlacer", "the trained policy, and samples", takes_policy=True
    ),
    _built_in("exact", "exact:ExactPlacer", "CP-SAT, for graphs of up to 80 ops", module="ortools"),
)
_REGISTERED: Final[dict[str, Listing]] = {}


def register_placer(name: str, make: Callable[[], Placer], summary: str = "") -> None:
    """Register a placer class, called without arguments, by name in this process.

    Registering a name again replaces the class, as a notebook does that runs a cell twice.

    Raises:
        ValueError: a built-in placer has this name, or the class does not say its objectives.
    """
    if any(listing.name == name for listing in BUILT_IN):
        raise ValueError(f"there is a placer {name!r} already: choose another name")
    listing = Listing(name=name, summary=summary, home=f"{make.__module__}:{name}", make=make)
    _class_of(listing)
    _REGISTERED[name] = listing


def listings() -> tuple[Listing, ...]:
    """Return all placers: built-in and registered ones, then plug-ins by name, each name once."""
    taken = {listing.name for listing in BUILT_IN} | _REGISTERED.keys()
    plugins: dict[str, Listing] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if point.name not in taken:
            plugins.setdefault(point.name, _plugin(point))
    return (*BUILT_IN, *_REGISTERED.values(), *plugins.values())


def placer_named(
    name: str, policy: Proposer | None = None, *, objective: str = "latency"
) -> Placer:
    """Return the placer with this name; ``policy`` is for those that take one.

    A ValueError says why there is none: an unknown name, a missing policy or module, a plug-in that
    cannot be loaded, or another objective.
    """
    listing = _listing(name)
    make = _class_of(listing)
    if objective not in make.objectives:
        raise ValueError(
            f"placer {name!r} serves the objective {' and '.join(make.objectives)}, not "
            f"{objective}; {DEFAULT!r} serves all"
        )
    if listing.takes_policy:
        return cast("Placer", make(policy))
    try:
        placer = make()
    except Exception as error:  # whatever the code of a plug-in raises
        raise _broken(listing, f"{type(error).__name__}: {error}") from error
    if not callable(getattr(placer, "place", None)):
        raise _broken(listing, f"{listing.home} has no method place")
    return cast("Placer", placer)


def uses_policy(name: str, *, objective: str = "latency") -> bool:
    """Return whether the placer with this name uses a policy; never for max-load."""
    return _listing(name).takes_policy and objective != "max-load"


def _listing(name: str) -> Listing:
    known = {listing.name: listing for listing in listings()}
    if name not in known:
        hint = suggestion(name, known, cutoff=0.4)
        raise ValueError(f"there is no placer {name!r}: there are {', '.join(known)}{hint}")
    return known[name]


def _class_of(listing: Listing) -> Any:
    """Import and return the class, or another callable with an attribute ``objectives``."""
    module, _, factory = listing.home.partition(":")
    try:
        make = listing.make or getattr(import_module(module), factory)
    except ModuleNotFoundError as error:
        if listing.module and error.name and error.name.partition(".")[0] == listing.module:
            raise ValueError(f"placer {listing.name!r} needs {listing.module}: {BENCH}") from error
        raise _broken(listing, str(error)) from error
    except Exception as error:  # whatever the code of a plug-in raises
        raise _broken(listing, f"{type(error).__name__}: {error}") from error
    if not callable(make) or not isinstance(getattr(make, "objectives", None), tuple | list):
        raise _broken(listing, f"{listing.home} is no class of placers, which has objectives")
    return make


def _broken(listing: Listing, reason: str) -> ValueError:
    origin = f" of {listing.distribution}" if listing.distribution else ""
    return ValueError(f"placer {listing.name!r}{origin} cannot be loaded: {reason}")


def _plugin(point: EntryPoint) -> Listing:
    distribution = point.dist
    return Listing(
        name=point.name,
        summary=(distribution.metadata["Summary"] or "") if distribution else "",
        home=point.value,
        distribution=distribution.name if distribution else "a plug-in",
    )
