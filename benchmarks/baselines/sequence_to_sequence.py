"""Sequence-to-sequence network that learns to place one graph by REINFORCE.

Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning" (ICML 2017, arXiv
1706.04972). An LSTM reads the groups of a graph in topological order, as embeddings of their op
types, their sizes and their neighbours; a second one attends to the first one's outputs, gets its
last choice as input, and gives each group a device. The reward is minus the square root of the step
time, the baseline its moving average, the optimizer Adam.

It is a baseline. One core samples and learns from about 375 placements a second for 30 groups, 230
for 64 and 90 for 128: each takes a pass over all groups, and one number rewards all devices.
"""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.baselines.groups import affordable, at_most, costs_of
from envs.hardware.torch_devices import one_thread
from envs.problem import toy_problem
from envs.simulator import OVERFULL_NS
from graphs.coarsen.merging import edge_sources
from placer.search.candidate import Candidate, Kind
from placer.search.grouping import Grouping
from placer.search.request import Budget, SearchRequest
from placer.search.sampling import BudgetedEvaluator, Sampling

MOST_GROUPS: Final = 128
HIDDEN: Final = 64
TYPE_SIZE: Final = 16
SAMPLES: Final = 10
"""Placements per update."""
LEARNING_RATE: Final = 3e-3
KEPT: Final = 0.9
"""Decay of the moving average per update."""
CLIP: Final = 1.0
FAILURE: Final = 10.0
"""Step time of an infeasible placement, in units of all ops on the slowest device."""


class SequenceToSequence(Sampling):
    """Learns one problem from scratch."""

    name: ClassVar[str] = "sequence-to-sequence"

    def place(self, request: SearchRequest) -> list[Candidate]:
        """Return the best candidate; load what training imports before the budget starts."""
        load_libraries()
        return super().place(request)

    def sample(self, budgeted: BudgetedEvaluator, seed: int) -> None:
        learn(budgeted, seed)


class SequenceNetwork(nn.Module):
    """Encoder, decoder and attention for G groups of T op types on D devices."""

    def __init__(self, types: int, features: int, devices: int) -> None:
        super().__init__()
        self.of_type = nn.Embedding(types, TYPE_SIZE)
        self.of_device = nn.Embedding(devices + 1, HIDDEN)  # the last one: nothing is placed yet
        self.encoder = nn.LSTM(TYPE_SIZE + features, HIDDEN, batch_first=True)
        self.decoder = nn.LSTMCell(2 * HIDDEN, HIDDEN)
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.weight = nn.Linear(HIDDEN, 1, bias=False)
        self.device = nn.Linear(2 * HIDDEN, devices)

    def forward(
        self,
        shares: torch.Tensor,
        features: torch.Tensor,
        allowed: torch.Tensor,
        chances: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample placements.

        Args:
            shares: (G, T), the share of each op type in a group.
            features: (G, F).
            allowed: (G, D), bool.
            chances: (B, G), random numbers from 0 to 1 that decide the samples.

        Returns:
            Devices (B, G), and the logarithms of their probabilities (B,).
        """
        batch = len(chances)
        read = torch.cat([shares @ self.of_type.weight, features], dim=1)
        memory, (state, cell) = self.encoder(read[None])
        keys = self.key(memory[0])  # (G, H)
        hidden, inner = (x[0].expand(batch, -1) for x in (state, cell))
        last = torch.full((batch,), self.of_device.num_embeddings - 1)
        devices, total = [], torch.zeros(batch)
        for g in range(len(read)):
            own = memory[0, g].expand(batch, -1)
            hidden, inner = self.decoder(
                torch.cat([self.of_device(last), own], dim=1), (hidden, inner)
            )
            fit = self.weight(torch.tanh(self.query(hidden)[:, None] + keys[None]))
            context = (torch.softmax(fit, dim=1) * memory).sum(dim=1)
            logits = self.device(torch.cat([hidden, context], dim=1))
            logs = torch.log_softmax(logits.masked_fill(~allowed[g], -math.inf), dim=1)
            last = _drawn(logs.detach(), chances[:, g])
            total = total + logs.gather(1, last[:, None])[:, 0]
            devices.append(last)
        return torch.stack(devices, dim=1), total


@one_thread()
def learn(budgeted: BudgetedEvaluator, seed: int) -> None:
    """Sample placements and learn from their step times until the budget is spent."""
    evaluator = budgeted.evaluator
    groups = at_most(evaluator.problem, MOST_GROUPS)
    shares, features = described(groups)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = SequenceNetwork(
            shares.shape[1], features.shape[1], evaluator.problem.device_count
        )
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    allowed = torch.from_numpy(groups.allowed)
    unit_ns = max(float(evaluator.problem.cost_ns.sum(axis=0).max()), 1.0)
    baseline: float | None = None
    while not budgeted.over():
        chances = torch.rand((affordable(budgeted, SAMPLES), len(groups)), generator=generator)
        drawn, logs = network(shares, features, allowed, chances)
        costs = costs_of(budgeted, groups.expand(drawn.numpy()))
        if len(costs) < len(drawn):
            break
        rewards = reward(costs, unit_ns)
        mean = float(rewards.mean())
        baseline = mean if baseline is None else KEPT * baseline + (1.0 - KEPT) * mean
        advantage = torch.from_numpy(rewards - baseline).to(torch.float32)
        optimizer.zero_grad()
        (-(advantage * logs).mean()).backward()
        nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()


@cache
def load_libraries() -> None:
    """Train once on a toy problem: Adam imports torch's compiler, which takes seconds."""
    learn(
        BudgetedEvaluator(SearchRequest(toy_problem(), Budget(evaluations=SAMPLES)), Kind.OTHER), 0
    )


def reward(costs: NDArray[np.int64], unit_ns: float) -> NDArray[np.float64]:
    """Return minus the square root of each step in units of ``unit_ns``; FAILURE if infeasible.

    >>> reward(np.array([400, 100]), 100.0).tolist()
    [-2.0, -1.0]
    """
    steps = np.where(costs < OVERFULL_NS, costs / unit_ns, FAILURE)
    return np.asarray(-np.sqrt(steps))


def described(groups: Grouping) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shares of op types (G, T), and features (G, 3 + 2 G): sizes, inputs and outputs.

    Sizes are logarithms of output bytes, parameter bytes and number of ops; inputs and outputs mark
    the other groups that edges come from and lead to.
    """
    graph, count = groups.problem.graph, len(groups)
    _, of_type = np.unique(graph.ops, return_inverse=True)
    shares = np.zeros((count, int(of_type.max()) + 1))
    np.add.at(shares, (groups.group_of, of_type), 1.0)
    ops = shares.sum(axis=1)
    sizes = [
        np.log1p(np.bincount(groups.group_of, size, minlength=count)) / 10.0
        for size in (graph.output_bytes, graph.parameter_bytes)
    ]
    reads = np.zeros((count, count))
    source, target = groups.group_of[edge_sources(graph)], groups.group_of[graph.successors]
    between = source != target
    reads[target[between], source[between]] = 1.0
    features = np.column_stack([*sizes, np.log1p(ops), reads, reads.T])
    return (
        torch.from_numpy((shares / ops[:, None]).astype(np.float32)),
        torch.from_numpy(features.astype(np.float32)),
    )


def _drawn(logs: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Return devices (B,) drawn with log-probabilities (B, D), never one of probability 0."""
    borders = logs.exp().cumsum(dim=1)
    return (chance[:, None] * borders[:, -1:] >= borders).sum(dim=1).clamp(max=logs.shape[1] - 1)
