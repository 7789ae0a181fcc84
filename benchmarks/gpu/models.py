"""Models for benchmarks on torch devices, and a fake GPU for machines without one."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from envs.hardware.cluster import Cluster
from envs.hardware.discover import discover
from envs.hardware.torch_devices import cuda_devices
from graphs.extract import Workload
from graphs.models import Dlrm, DlrmConfig, Moe, MoeConfig, Nmt, NmtConfig
from placer.sources import huggingface

FAKE_BYTES = 8 << 30


@contextlib.contextmanager
def two_devices(*, fake: bool = False) -> Iterator[Cluster]:
    """Yield the first CUDA device and the host; with ``fake``, or if there is none, a fake GPU.

    That is the one of the tests: it computes on the CPU, in streams with an order of their own,
    under limits of memory.
    The host is ``cpu``, not a pinned core: these benchmarks run placements on torch devices.
    """
    if cuda_devices() and not fake:
        yield discover("cuda:0,cpu")
        return
    sys.path.append(str(Path(__file__).parents[2]))
    machines = importlib.import_module("tests.fake_cuda")
    sharing = importlib.import_module("tests.fake_cuda.sharing")
    with machines.fake_cuda(memory_bytes=FAKE_BYTES), sharing.shared_by_processes(FAKE_BYTES):
        yield discover("cuda:0,cpu")


def models(*, small: bool) -> dict[str, Callable[[], Workload]]:
    """Return functions that make steps of models with large tables, experts or vocabularies."""
    return {
        "mixture of experts": lambda: experts(small=small),
        "language model": lambda: language(small=small),
        "recommendation": lambda: recommendation(small=small),
        "translation": lambda: translation(small=small),
    }


def next_token_loss(logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Return the cross-entropy of all next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())


def recommendation(*, small: bool) -> Workload:
    """Return a step of DLRM, whose bytes are nearly all in tables."""
    torch.manual_seed(0)
    most, batch = (1000, 16) if small else (2_000_000, 2048)
    features = 8 if small else 64
    config = DlrmConfig(
        rows=tuple(min(rows, most) for rows in DlrmConfig().rows[:: 5 if small else 1]),
        features=features,
    )
    dense = torch.randn(batch, config.dense)
    indices = torch.stack([torch.randint(rows, (batch, 4)) for rows in config.rows], 1)
    clicks = torch.randint(2, (batch,)).float()
    loss = F.binary_cross_entropy_with_logits
    return Workload.of(Dlrm(config), (dense, indices, clicks), loss)


def experts(*, small: bool) -> Workload:
    """Return a step of a decoder whose experts are separate modules."""
    torch.manual_seed(0)
    config = MoeConfig(
        vocabulary=64 if small else 16_000,
        hidden=32 if small else 1024,
        intermediate=48 if small else 2816,
        layers=1 if small else 6,
        heads=2 if small else 16,
        key_value_heads=1 if small else 4,
        experts=3 if small else 8,
    )
    text = torch.randint(config.vocabulary, (2, 9 if small else 129))
    inputs = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return Workload.of(Moe(config), inputs, next_token_loss)


def language(*, small: bool) -> Workload:
    """Return a step of GPT-2 with random weights and a small batch."""
    sizes = "n_embd=32&n_layer=1&n_head=2&vocab_size=64&batch=1&sequence=8"
    if not small:
        sizes = "n_embd=1024&n_layer=16&n_head=16&batch=2&sequence=256"
    target = f"hf:gpt2?{sizes}&resid_pdrop=0.0&embd_pdrop=0.0&attn_pdrop=0.0"
    return huggingface.load(huggingface.Request.parse(target), training=True)


def translation(*, small: bool) -> Workload:
    """Return a step of LSTMs with attention and a large vocabulary."""
    torch.manual_seed(0)
    config = NmtConfig(vocabulary=64, hidden=16, layers=1)
    batch, tokens = 2, 3
    if not small:
        config, batch, tokens = NmtConfig(vocabulary=80_000, hidden=1024, layers=2), 32, 12
    source = torch.randint(config.vocabulary, (batch, tokens))
    target = torch.randint(config.vocabulary, (batch, tokens + 1))
    inputs = (source, target[:, :-1].contiguous(), target[:, 1:].contiguous())
    return Workload.of(Nmt(config), inputs, next_token_loss)
