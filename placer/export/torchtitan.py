"""Names of a model's parts for torchtitan's pipeline parallelism.

torchtitan keeps children of its model by name, and single layers of lists. It exposes a Hugging
Face model as ``tok_embeddings``, ``layers``, ``norm``, ``lm_head`` and ``rotary_emb``, wherever
they are; every stage computes the last one itself (torchtitan 0.3).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from torch import nn

from placer.export.layers import Stack
from placer.export.stages import Stage

NAMES: Final = {"embed_tokens": "tok_embeddings"}
EVERYWHERE: Final = "rotary_emb"
KNOWN: Final = re.compile(rf"tok_embeddings|layers\.\d+|norm|lm_head|{EVERYWHERE}")


def titan_parts(model: nn.Module, stack: Stack, found: Sequence[Stage]) -> list[list[str]] | None:
    """Return ``module_fqns_per_model_part``, names by stage; None if torchtitan has none."""
    inside = stack.path.rpartition(".")[0]
    if not inside:
        parts = [list(stage.modules) for stage in found]
        is_list = isinstance(model.get_submodule(stack.path), nn.ModuleList)
        layers = set(stack.layers) if is_list else set()
        known = all("." not in name or name in layers for part in parts for name in part)
        return parts if known else None
    parts = [[_named(module.removeprefix(f"{inside}.")) for module in s.modules] for s in found]
    if not all(KNOWN.fullmatch(name) for part in parts for name in part):
        return None
    if not any(EVERYWHERE in part for part in parts):
        return parts
    return [[*(name for name in part if name != EVERYWHERE), EVERYWHERE] for part in parts]


def _named(module: str) -> str:
    return NAMES.get(module, module)
