"""Exported calls as text that does not depend on the device they were traced on.

Kernels of another device may lay their results out differently, so a traced view may be impossible
there: ``view`` becomes ``reshape``, except where the storage is written.

The traced device is fixed in factories and conversions, by keyword (``arange(8, device=cpu)``) or
by position (``to(x, cpu, float32)``), and in the nested graphs of higher-order operators.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any, Final

import torch
from torch import fx

from graphs.extract.export.forward import ForwardCall
from graphs.extract.fx_nodes import IGNORED, operator_name
from graphs.extract.program import Ref

DEVICE: Final = "device"


class _Placeholder(Enum):
    """The device of a call, or its type, in the arguments of the call."""

    DEVICE = "{device}"
    DEVICE_TYPE = "{device}.type"


class CallText:
    """A call as the text of a Python expression; non-literals are names in ``names``.

    ``template`` has a field ``{v3}`` for value 3, ``{device}`` for the device. Nested graphs are
    made for a device when :meth:`on` first asks for them.
    """

    def __init__(self, number: int, call: ForwardCall) -> None:
        of_layout = call.target is torch.ops.aten.view.default and not call.touches
        target = torch.ops.aten.reshape.default if of_layout else call.target
        self.names: dict[str, Any] = {f"f{number}": target}
        self._number = number
        self._bodies: dict[str, fx.GraphModule] = {}
        args, kwargs = list(call.args), dict(call.kwargs)
        if isinstance(call.target, torch._ops.OpOverload):
            _put_device(call.target, args, kwargs, _Placeholder.DEVICE, is_factory=not call.reads)
        elif operator_name(call.target) == "wrap_with_autocast":
            args[0] = _Placeholder.DEVICE_TYPE
        texts = [self._text(argument) for argument in args]
        texts += [f"{name}={self._text(argument)}" for name, argument in kwargs.items()]
        self.template = f"f{number}({', '.join(texts)})"

    def on(self, device: torch.device, device_name: str) -> dict[str, Any]:
        """Return further names that the text needs on a device: its nested graphs."""
        made: dict[str, Any] = {}
        for name, body in self._bodies.items():
            key = f"{name}_{device_name}"
            if key not in self.names:
                self.names[key] = on_device(body, device)
            made[key] = self.names[key]
        return made

    def _text(self, argument: Any) -> str:
        match argument:
            case Ref(value):
                return f"{{v{value}}}"
            case _Placeholder():
                return argument.value
            case fx.GraphModule():
                name = f"g{self._number}_{len(self._bodies)}"
                self._bodies[name] = argument
                return f"{name}_{{device}}"
            case list():
                return f"[{', '.join(self._text(item) for item in argument)}]"
            case tuple():
                return f"({''.join(f'{self._text(item)}, ' for item in argument)})"
            case None | bool() | int():
                return repr(argument)
            case torch.device():  # of a function of the model, which has no schema
                return _Placeholder.DEVICE.value
            case _:
                name = f"c{self._number}_{len(self.names)}"
                self.names[name] = argument
                return name


def on_device(body: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a copy of a nested graph for a device, with its tensors there."""
    copied = copy.deepcopy(body)
    for name, inner in list(copied.named_children()):
        if isinstance(inner, fx.GraphModule):
            setattr(copied, name, on_device(inner, device))
    for node in list(copied.graph.nodes):
        held = getattr(copied, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor):
            setattr(copied, str(node.target), held.to(device))
        if isinstance(node.target, torch._ops.OpOverload):
            if operator_name(node.target) in IGNORED:
                copied.graph.erase_node(node)
                continue
            args, kwargs = list(node.args), dict(node.kwargs)
            _put_device(node.target, args, kwargs, device, is_factory=not node.all_input_nodes)
            node.args, node.kwargs = tuple(args), kwargs
    copied.recompile()
    return copied


def _put_device(
    target: torch._ops.OpOverload,
    args: list[Any],
    kwargs: dict[str, Any],
    device: object,
    *,
    is_factory: bool,
) -> None:
    """Set a device where arguments name one; a factory that names none would use the CPU."""
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == DEVICE:
            if i < len(args):
                args[i] = device if args[i] is not None else None
            elif is_factory or kwargs.get(DEVICE) is not None:
                kwargs[DEVICE] = device
