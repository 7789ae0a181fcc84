"""Names that torch.export reserves among submodules: ``meta``, ``graph``, ``code`` and others.

Its result is an ``fx.GraphModule`` with the submodules of the model as attributes: one that is
named like an attribute of that class is lost.
"""

from __future__ import annotations

import functools

from torch import fx, nn

OF_PROGRAMS = frozenset(
    {"_guards_fn", "_in_spec", "_out_spec", "range_constraints", "shape_env", "validate_inputs"}
)
"""Attributes that exported programs add to those of GraphModule, as of torch 2.13."""


@functools.cache
def reserved_names() -> frozenset[str]:
    """Return the names that no submodule, parameter or buffer of an exported model can have."""
    own = dir(fx.GraphModule(nn.Module(), fx.Graph()))
    return frozenset(own) - frozenset(dir(nn.Module())) | OF_PROGRAMS


def reserved_at_the_top(model: nn.Module) -> list[str]:
    """Return the reserved names of the model's own submodules, parameters and buffers."""
    own = [
        *(name for name, _ in model.named_children()),
        *(name for name, _ in model.named_parameters(recurse=False)),
        *(name for name, _ in model.named_buffers(recurse=False)),
    ]
    return [name for name in own if name in reserved_names()]


def reserved_modules(model: nn.Module) -> list[str]:
    """Return the paths of modules, at any depth, that have a reserved name."""
    return [
        path for path, _ in model.named_modules() if path.rpartition(".")[2] in reserved_names()
    ]
