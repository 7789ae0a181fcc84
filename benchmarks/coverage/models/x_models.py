"""Models of x-transformers."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.coverage.case import (
    BATCH,
    CLASSES,
    Case,
    Cases,
    classes,
    images,
    numbers,
    word_loss,
)

WORDS: Final = 50
TOKENS: Final = 12


def _x() -> Any:
    return import_module("x_transformers")


def _language(layers: str = "Decoder", *, wrapper: Any = None, **options: Any) -> nn.Module:
    stack = getattr(_x(), layers)(dim=32, depth=2, heads=2, **options)
    model: nn.Module = _x().TransformerWrapper(
        num_tokens=WORDS, max_seq_len=TOKENS, attn_layers=stack, **(wrapper or {})
    )
    return model


def _translation() -> nn.Module:
    sizes = {"num_tokens": WORDS, "depth": 1, "heads": 2, "max_seq_len": TOKENS}
    both = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    model: nn.Module = _x().XTransformer(dim=32, tie_token_emb=True, **both)
    return model


def _generation() -> nn.Module:
    model: nn.Module = _x().AutoregressiveWrapper(_language())
    return model


def _vision() -> nn.Module:
    model: nn.Module = _x().ViTransformerWrapper(
        image_size=32,
        patch_size=8,
        num_classes=CLASSES,
        attn_layers=_x().Encoder(dim=32, depth=2, heads=2),
    )
    return model


def _continuous() -> nn.Module:
    model: nn.Module = _x().ContinuousTransformerWrapper(
        dim_in=8, dim_out=4, max_seq_len=TOKENS, attn_layers=_x().Encoder(dim=32, depth=2, heads=2)
    )
    return model


def _tokens(training: bool) -> tuple[Tensor]:
    return (_words(),)


def _words() -> Tensor:
    return torch.randint(WORDS, (BATCH, TOKENS))


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "decoder": {},
    "encoder": {"layers": "Encoder"},
    "rotary": {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "alibi": {"alibi_pos_bias": True},
    "relative positions": {"rel_pos_bias": True},
    "dynamic positions": {"dynamic_pos_bias": True},
    "flash": {"attn_flash": True},
    "grouped queries": {"attn_kv_heads": 1},
    "sparse attention": {"attn_sparse_topk": 4},
    "memories": {"attn_num_mem_kv": 4, "wrapper": {"num_memory_tokens": 3}},
    "macaron": {"macaron": True},
    "residual attention": {"residual_attn": True},
}

CASES: Final[Cases] = {
    **{
        name: Case(partial(_language, **options), _tokens, word_loss, _words)
        for name, options in OPTIONS.items()
    },
    "translation": Case(_translation, lambda training: (_words(), _words()), loss=None),
    "generation": Case(_generation, _tokens, loss=None),
    "vision": Case(_vision, images(32), F.cross_entropy, classes),
    "continuous": Case(_continuous, numbers((BATCH, TOKENS, 8))),
}
