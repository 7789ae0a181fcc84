"""What torch.export cannot take or return: objects whose parts are tensors and other things."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from graphs.extract.errors import unreturnable
from graphs.inputs import flatten_objects, holds_tensors
from graphs.workload import Workload

EXPORTABLE: Final = (torch.Tensor, bool, int, float, str, type(None))


class Parts:
    """Inputs and output of a forward pass that torch.export sees as tensors and numbers alone.

    Objects such as the caches of transformers are taken apart (:mod:`graphs.inputs`) and made again
    from what the placed step computes; what else they hold is that of the traced step.
    """

    def __init__(self, step: Workload) -> None:
        """Take apart the inputs of the model, in training with the target."""
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]]
        self.arguments = step.step_inputs, dict(step.keywords)
        self._inputs: tuple[list[Any], TreeSpec] | None = None
        self._output: tuple[list[Any], TreeSpec] | None = None
        leaves, tree = tree_flatten(self.arguments)
        if not all(isinstance(leaf, EXPORTABLE) for leaf in leaves):
            self._inputs = leaves, tree
            self.arguments = tuple(_exportable(leaves)), {}  # as many, so that numbers stay

    @contextlib.contextmanager
    def taken_apart(self, root: nn.Module) -> Iterator[None]:
        """Let the forward pass take and return tensors where torch.export takes nothing else."""
        original = root.forward

        def forward(*inputs: Any, **keywords: Any) -> Any:
            if self._inputs is not None:
                leaves, tree = self._inputs
                pairs = zip(inputs, leaves, _exportable(leaves), strict=True)
                known = [leaf if shown is None else new for new, leaf, shown in pairs]
                inputs, keywords = tree_unflatten(known, tree)
            output = original(*inputs, **keywords)
            refusal = flatten_objects(output, "the output")
            leaves, tree = tree_flatten(output)
            if refusal:
                raise unreturnable(next(leaf for leaf in leaves if _hides_tensors(leaf)))
            if all(isinstance(leaf, EXPORTABLE) for leaf in leaves):
                return output
            self._output = leaves, tree
            return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

        own = vars(root).get("forward")
        root.forward = forward if self._inputs is not None else functools.wraps(original)(forward)
        try:
            yield
        finally:
            if own is None:
                del root.forward
            else:
                root.forward = own

    def whole(self, returned: Any) -> Any:
        """Return the output as the model makes it, with what was returned for its tensors."""
        return returned if self._output is None else _filled(self._output, returned)


def _hides_tensors(leaf: object) -> bool:
    return not isinstance(leaf, torch.Tensor) and holds_tensors(leaf)


def _exportable(leaves: Iterable[Any]) -> list[Any]:
    return [leaf if isinstance(leaf, EXPORTABLE) else None for leaf in leaves]


def _filled(parts: tuple[list[Any], TreeSpec], tensors: Iterable[Any]) -> Any:
    leaves, tree = parts
    new = iter(tensors)
    return tree_unflatten([next(new) if isinstance(x, torch.Tensor) else x for x in leaves], tree)
