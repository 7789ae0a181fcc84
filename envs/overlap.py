"""Where copies between devices can be made while these compute."""

from __future__ import annotations

from collections.abc import Sequence

from envs.host_names import is_core
from graphs.extract.call_graph import CallGraph
from graphs.extract.module_map import ModuleMap


def check_overlap(device_names: Sequence[str], calls: CallGraph | ModuleMap | None) -> None:
    """Refuse to overlap copies where nothing can.

    Args:
        device_names: where it runs.
        calls: what is placed there; None on pinned cores.

    Raises:
        ValueError: by pinned cores, or by hooks on modules; says what to do.
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
