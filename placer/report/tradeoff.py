"""Output of a device comparison: a terminal table and JSON data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from placer.milliseconds import milliseconds, ratio_of
from placer.report.table import human_bytes

if TYPE_CHECKING:
    from placer.tradeoff import Offer, Tradeoff

LEGEND = (
    "Price in the currency of the cluster file; largest simulated peak memory of a "
    "device; Pareto: none is as fast and as cheap by the hour, and better in one."
)


def print_tradeoff(found: Tradeoff, console: Console) -> None:
    """Print all sub-clusters with step time, prices and memory, and a recommendation."""
    graph = found.problem.graph
    searched = f"{found.searched} sub-clusters of {', '.join(found.problem.cluster.names)}"
    console.print(f"{graph.name}: {len(graph)} ops on {searched}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("devices", overflow="fold")
    for column in ("step\nms", "per hour", "per 10^6 steps", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("best", no_wrap=True)
    for offer in found.offers:
        picked = offer in (found.fastest, found.cheapest)
        marks = ", ".join(_marks(found, offer))
        table.add_row(*_cells(offer), marks, style="bold green" if picked else "")
    console.print(table)
    unable = [offer for offer in found.offers if offer.found is None]
    if unable:
        more = f" (and {len(unable) - 1} more sub-clusters)" if len(unable) > 1 else ""
        console.print(f"{_names(unable[0])}{more}: {unable[0].why}")
    console.print(" ".join([LEGEND, *found.remarks]))
    console.print(rent_line(found))


def tradeoff_to_dict(found: Tradeoff) -> dict[str, Any]:
    """Return the offers as plain data for JSON; units are in the names, None if infeasible."""
    return {
        "rows": [_row(found, offer) for offer in found.offers],
        "searched": found.searched,
        "left_out": found.left_out,
        "search_s": found.search_s,
        "cost_source": dict(found.cost_source),
        "remarks": found.remarks,
    }


def _row(found: Tradeoff, offer: Offer) -> dict[str, Any]:
    plan = offer.found
    return {
        "devices": list(offer.cluster.names),
        "feasible": plan is not None,
        "why": offer.why,
        "step_s": None if plan is None else offer.step_s,
        "price_per_hour": offer.price_per_hour,
        "price_per_million_steps": None if plan is None else offer.price_per_million_steps,
        "peak_memory_bytes": None if plan is None else _peaks(offer),
        "plan": None if plan is None else plan.best.name,
        "pareto": offer in found.front,
        "fastest": offer is found.fastest,
        "cheapest": offer is found.cheapest,
    }


def _cells(offer: Offer) -> list[str]:
    if offer.found is None:
        return [_names(offer), "-", _money(offer.price_per_hour), "-", "cannot run"]
    return [
        _names(offer),
        milliseconds(offer.step_s),
        _money(offer.price_per_hour),
        _money(offer.price_per_million_steps),
        human_bytes(max(_peaks(offer).values())),
    ]


def _peaks(offer: Offer) -> dict[str, int]:
    peaks = {} if offer.found is None else offer.found.best.peak_memory_bytes
    return {name: peaks[name] for name in offer.cluster.names}


def _marks(found: Tradeoff, offer: Offer) -> list[str]:
    is_best = {
        "Pareto": offer in found.front,
        "fastest": offer is found.fastest,
        "cheapest per step": offer is found.cheapest,
    }
    return [mark for mark, holds in is_best.items() if holds]


def rent_line(found: Tradeoff) -> str:
    """Return a sentence that recommends devices."""
    fastest, cheapest = found.fastest, found.cheapest
    if fastest is cheapest:
        return f"Rent {_names(fastest)}: it is the fastest, and the cheapest per step."
    slower = ratio_of(cheapest.step_s, fastest.step_s)
    text = (
        f"Fastest: {_names(fastest)}. Cheapest per step: {_names(cheapest)}, {slower:.2f}x slower"
    )
    if cheapest.price_per_million_steps > 0:
        dearer = fastest.price_per_million_steps / cheapest.price_per_million_steps
        text += f"; the fastest costs {dearer:.2f}x as much per step"
    return text + "."


def _names(offer: Offer) -> str:
    return ", ".join(offer.cluster.names)


def _money(price: float) -> str:
    return f"{price:,.0f}" if price >= 1e4 else f"{price:.4g}"
