"""Features of a problem: the input of a policy."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from placer.search.candidate import Candidate, Kind
from placer.search.evaluator import Evaluator

FEATURES: Final = (
    "log_ops",
    "log2_devices",
    "mean_send",
    "median_send",
    "width_share",
    "parallelism",
    "cost_deviation",
    "send_variation",
    "edges_per_op",
    "largest_in_degree",
    "largest_out_degree",
    "one_input_share",
    "one_output_share",
    "many_inputs_share",
    "mean_slack",
    "latency",
    "many_queues",
    "costly_send_share",
    "cost_send_correlation",
    "heft_over_best",
    "etf_over_best",
    "single_over_best_by_device",
)
"""Names of the features; "send" is the mean transfer time of an output, in mean op costs."""
LARGEST_RATIO: Final = 10.0


def summarise(evaluator: Evaluator, known: list[Candidate]) -> NDArray[np.float64]:
    """Return the features (F,) of a problem with the heuristics ``known``, not normalised."""
    o = evaluator.scheduling
    count, devices = len(o.cost), o.device_count
    cost = np.where(o.allowed, o.device_cost, np.inf).min(axis=1) / o.scale
    send = np.zeros(count)
    np.maximum.at(send, o.predecessors, o.edge_ns / o.scale)
    slack = o.op_features[3]
    in_degree = np.diff(o.predecessor_start)
    out_degree = np.diff(o.successor_start)
    work = float(cost.sum()) * o.scale / o.critical_path
    pairs = o.connected & ~np.eye(devices, dtype=np.bool_)
    latency = float(o.latency[:, :devices][pairs].mean()) if pairs.any() else 0.0
    spread = float(cost.std()) * float(send.std())
    together = float(((cost - cost.mean()) * (send - send.mean())).mean())
    heft, etf = _best(known, Kind.HEFT), _best(known, Kind.ETF)
    single = _best(known, Kind.SINGLE_DEVICE)
    best = max(min(heft, etf, single), 1.0)
    values = (
        math.log(count),
        math.log2(devices),
        math.log1p(float(send.mean())),
        math.log1p(float(np.median(send))),
        work / devices,
        math.log1p(work),
        float(cost.std()),
        float(send.std() / max(send.mean(), 1e-9)),
        len(o.predecessors) / count,
        math.sqrt(float(in_degree.max())),
        math.sqrt(float(out_degree.max())),
        float((in_degree == 1).mean()),
        float((out_degree == 1).mean()),
        float((in_degree > 3).mean()),
        float(slack.mean()),
        latency / o.scale,
        float(o.queue_count > devices),
        float((send > 1.0).mean()),
        together / spread if spread > 0.0 else 0.0,
        min(heft / best, LARGEST_RATIO),
        min(etf / best, LARGEST_RATIO),
        min(single / best, LARGEST_RATIO) / devices,
    )
    return np.array(values)


def _best(known: list[Candidate], kind: Kind) -> float:
    return float(min((c.step_ns for c in known if c.kind is kind), default=1))
