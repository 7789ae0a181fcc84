"""Check whether copies between devices can overlap with compute."""

from __future__ import annotations

from collections.abc import Sequence

from envs.host_names import is_core
from graphs.extract.call_graph import CallGraph
from graphs.extract.module_map import ModuleMap


def check_overlap(device_names: Sequence[str], calls: CallGraph | ModuleMap | None) -> None:
    """Check that copies can overlap with compute.

    Args:
        device_names: devices of the placement.
        calls: graph to place; None on pinned cores.

    Raises:
        ValueError: not possible on pinned cores or with hooks on modules; says what to do.
    """
    if is_core(device_names[0]):
        raise ValueError(
            "pinned cores have no copies to overlap, since a worker takes what it reads itself: "
            "leave overlap out, it is for cuda:* and cpu"
        )
    if isinstance(calls, ModuleMap):
        raise ValueError(
            "a placed graph of modules runs the model's own code, which waits for each tensor that "
            "its hooks send: leave overlap out, it is for models that can be exported"
        )
