"""The family "reference": extracted training steps of the models of :mod:`graphs.models`.

Models are on the meta device, in realistic sizes, so that only their graphs take memory; costs are
the roofline of a data sheet's device, at half its rates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from envs.costs.roofline import SOURCE, roofline_costs
from envs.hardware.cluster import Device
from graphs.coarsen.groups import coarsen
from graphs.costs import with_costs
from graphs.extract import Workload, extract
from graphs.graph import ANY_KIND
from graphs.models import (
    Dlrm,
    DlrmConfig,
    InceptionConfig,
    InceptionV3,
    Moe,
    MoeConfig,
    NasNet,
    NasNetConfig,
    Nmt,
    NmtConfig,
    ResNet,
    ResNetConfig,
    Rnnlm,
    RnnlmConfig,
)

REACHED: Final = 0.5
"""Reached share of a data sheet's rates."""
LAUNCH_S: Final = 5e-6
DEVICES: Final = (
    # FLOP/s, bytes/s: fp16 or bf16 on tensor cores, data sheets of NVIDIA
    (125e12, 0.9e12),  # V100 SXM2
    (312e12, 2.039e12),  # A100 SXM 80 GB
    (989e12, 3.35e12),  # H100 SXM
)


def draw_reference(rng: np.random.Generator, *, max_ops: int) -> nx.DiGraph[str]:
    """Return the graph of a training step of a random model on a random device, coarsened.

    Costs are of any kind of device. Each model is extracted once per process, in seconds.
    """
    names = sorted(MODELS)
    graph = extracted(names[int(rng.integers(len(names)))])
    flop_per_s, bytes_per_s = DEVICES[int(rng.integers(len(DEVICES)))]
    device = Device(
        name="device",
        kind=ANY_KIND,
        memory_bytes=0,
        peak_flop_per_s=REACHED * flop_per_s,
        bandwidth_bytes_per_s=REACHED * bytes_per_s,
    )
    seconds = LAUNCH_S + roofline_costs(graph, [device])[ANY_KIND]
    costed = with_costs(graph, {ANY_KIND: seconds}, {ANY_KIND: SOURCE})
    return coarsen(costed, most_groups=max_ops).graph if len(costed) > max_ops else costed


@cache
def extracted(name: str) -> nx.DiGraph[str]:
    """Return the graph of a training step of a model, without costs."""
    with torch.device("meta"):
        return extract(MODELS[name]()).graph


def _images(model: nn.Module, pixels: int) -> Workload:
    return Workload.of(model, (torch.empty(32, 3, pixels, pixels), _tokens(32)), _classes)


def _text(model: nn.Module, batch: int, tokens: int, sentences: int = 1) -> Workload:
    inputs = tuple(_tokens(batch, tokens) for _ in range(sentences))
    return Workload.of(model, (*inputs, _tokens(batch, tokens)), _next_tokens)


def _clicks(config: DlrmConfig) -> Workload:
    inputs = (torch.empty(2048, config.dense), _tokens(2048, len(config.rows), 4))
    loss = F.binary_cross_entropy_with_logits
    return Workload.of(Dlrm(config), (*inputs, torch.empty(2048)), loss)


def _tokens(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def _classes(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the sum of the losses of all classifier heads."""
    heads = output if isinstance(output, tuple) else (output,)
    losses = [F.cross_entropy(logits, labels) for logits in heads]
    return torch.stack(losses).sum()


def _next_tokens(logits: Tensor, next_tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())


_MOE: Final = MoeConfig(hidden=1024, intermediate=2816, layers=4, heads=16, experts=8)

MODELS: Final[Mapping[str, Callable[[], Workload]]] = {
    "dlrm": lambda: _clicks(DlrmConfig(features=64, bottom=(512, 256))),
    "inception": lambda: _images(InceptionV3(InceptionConfig(dropout=0.0)), 299),
    "moe": lambda: _text(Moe(_MOE), 4, 256),
    "nasnet": lambda: _images(NasNet(NasNetConfig(dropout=0.0, repeats=2)), 224),
    "nmt": lambda: _text(Nmt(NmtConfig(hidden=1024)), 64, 8, sentences=2),
    "resnet": lambda: _images(ResNet(ResNetConfig()), 224),
    "rnnlm": lambda: _text(Rnnlm(RnnlmConfig(dropout=0.0)), 64, 12),
}
