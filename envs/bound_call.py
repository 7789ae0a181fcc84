"""A call of an exported forward pass, bound to its arguments on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from envs.executor.neutral import CallText
from graphs.extract.forward import ForwardCall


def bound(
    call: ForwardCall, values: Mapping[int, torch.Tensor], device: torch.device
) -> Callable[[], Any]:
    """Return the call as a function without arguments; ``values`` are on ``device``."""
    text = CallText(0, call)
    places = {f"v{value}": f"v{value}" for value in call.reads}
    names = {
        **text.names,
        **text.on(device, "device"),
        "device": device,
        **{f"v{value}": values[value] for value in call.reads},
    }
    expression = text.template.format(device="device", **places)
    return cast("Callable[[], Any]", eval(f"lambda: {expression}", names))
