"""Names of submodules that torch.export keeps for itself: ``meta``, ``graph``, ``code`` and others.

What it exports is a module of class ``fx.GraphModule``, with the submodules of the model as
attributes: one that is called like an attribute of that class is lost.
"""

from __future__ import annotations

import functools

from torch import fx, nn

OF_PROGRAMS = frozenset(
    {"_guards_fn", "_in_spec", "_out_spec", "range_constraints", "shape_env", "validate_inputs"}
)
"""What exported programs add to a GraphModule's own, as of torch 2.13."""


@functools.cache
def reserved_names() -> frozenset[str]:
    """What no submodule, parameter or buffer can be called where a model itself is exported."""
    own = dir(fx.GraphModule(nn.Module(), fx.Graph()))
    return frozenset(own) - frozenset(dir(nn.Module())) | OF_PROGRAMS


def reserved_at_the_top(model: nn.Module) -> list[str]:
    """The model's own submodules, parameters and buffers that have such a name."""
    own = [
        *(name for name, _ in model.named_children()),
        *(name for name, _ in model.named_parameters(recurse=False)),
        *(name for name, _ in model.named_buffers(recurse=False)),
    ]
    return [name for name in own if name in reserved_names()]


def reserved_modules(model: nn.Module) -> list[str]:
    """Paths of the modules, however deep inside, that have such a name."""
    return [
        path for path, _ in model.named_modules() if path.rpartition(".")[2] in reserved_names()
    ]
