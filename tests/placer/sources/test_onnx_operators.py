"""Every operator, tested on the cases that ONNX publishes for it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from placer.sources.names import TargetError

onnx = pytest.importorskip("onnx")

TYPES = frozenset(
    ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]
)
TOLERANCE = {"float16": 2e-3}
PARTLY = frozenset(
    [
        *("ArgMax", "ArgMin", "AveragePool", "BatchNormalization", "ConvTranspose", "Dropout"),
        *("GRU", "GatherND", "LSTM", "MaxPool", "RNN", "ReduceMax"),
        *("ReduceMin", "Resize", "ScatterND", "Selu", "Shrink", "SpaceToDepth"),
    ]
)
"""Operators with refused cases: training outputs, modes that torch lacks."""
NO_CASES = frozenset(["GRU", "Scatter", "Upsample"])
"""Operators that later versions of ONNX lack, and the one whose cases are all refused."""
SHAPED = ("ConstantOfShape", "NonZero", "Range")
"""Operators whose first input determines sizes."""


def cases() -> list[Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases overflow on purpose
        found: list[Any] = collect_testcases(None)
    return [case for case in found if not case.model.functions]


def known_and_data(graph: Any, inputs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the graph with all inputs constant but the first and boolean ones, and the data."""
    data: dict[str, torch.Tensor] = {}
    for i, (one, value) in enumerate(zip(list(graph.input), inputs, strict=True)):
        if (i == 0 or value.dtype == bool) and graph.node[0].op_type not in SHAPED:
            data[one.name] = torch.from_numpy(np.array(value))
        else:
            graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), one.name))
    return graph, data


@pytest.mark.slow
def test_every_operator_gives_what_onnx_says_it_gives() -> None:
    from placer.sources.onnx_model import build
    from placer.sources.onnx_ops import RULES

    wrong: list[str] = []
    right: dict[str, int] = defaultdict(int)
    refused: dict[str, str] = {}
    for case in cases():
        ops = {node.op_type for node in case.model.graph.node}
        arrays = [value for both in case.data_sets[0] for value in both]
        numbers = (np.ndarray, np.generic)
        plain = all(isinstance(one, numbers) and one.dtype.name in TYPES for one in arrays)
        if not plain or not ops <= {*RULES, "Constant"} or case.name.endswith("expanded"):
            continue
        inputs, expected = case.data_sets[0]
        opset = next(one.version for one in case.model.opset_import if not one.domain)
        graph, data = known_and_data(case.model.graph, inputs)
        try:
            found = build(graph, opset, data)(*data.values())
        except TargetError as error:
            refused[case.name] = str(error)
            if not ops & PARTLY:
                wrong.append(f"{case.name}: {error}")
            continue
        results = found if isinstance(found, tuple) else (found,)
        for result, value in zip(results, expected, strict=True):
            tolerance = TOLERANCE.get(value.dtype.name, 1e-5)
            same = (
                result.numpy().dtype == value.dtype
                and tuple(result.shape) == value.shape
                and np.allclose(result, value, rtol=1e-3, atol=tolerance, equal_nan=True)
            )
            if not same:
                wrong.append(case.name)
        for op in ops:
            right[op] += 1
    assert not wrong
    assert set(RULES) - set(right) <= NO_CASES
    assert sum(right.values()) > 5 * len(refused)
