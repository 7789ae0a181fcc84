"""Layers in model order, as many on each device as its memory holds.

This is how models are placed by hand on devices that are too small for them.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from envs.problem import Problem
from envs.simulator import Simulator


def first_layers(problem: Problem, priority: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return devices (N,) that fill up one after the other; the last takes the rest.

    Memory is the simulated peak with ops ordered by ``priority`` (N,). A co-location group goes
    with its first layer. An op that is not allowed on its device goes, with its group, to the last
    allowed one.
    """
    simulator = Simulator(problem)
    number = layer_numbers(problem)
    last = problem.device_count - 1
    devices = np.full(problem.op_count, last, np.int32)
    begin, count = 0, int(number.max()) + 1
    for d in range(last):
        low, high = begin, count  # the layers from begin to low fit
        while low < high:
            middle = (low + high + 1) // 2
            trial = np.where((number >= begin) & (number < middle), np.int32(d), devices)
            peak = simulator.run(trial, priority).peak_bytes[d]
            low, high = (middle, high) if peak <= problem.memory_bytes[d] else (low, middle - 1)
        devices[(number >= begin) & (number < low)] = d
        begin = low
    ops = np.arange(problem.op_count)
    fallback = last - problem.allowed[:, ::-1].argmax(axis=1)
    return np.where(problem.allowed[ops, devices], devices, fallback).astype(np.int32)


def layer_numbers(problem: Problem) -> NDArray[np.int64]:
    """Return the layer of every op (N,), in model order; a group is in its first layer."""
    graph = problem.graph
    layers: dict[str, int] = {}
    for op in graph.topological.tolist():
        layers.setdefault(layer_of(graph.modules[op]), len(layers))
    number = np.array([layers[layer_of(module)] for module in graph.modules], np.int64)
    grouped = graph.group >= 0
    first = np.full(int(graph.group.max(initial=-1)) + 1, len(layers), np.int64)
    np.minimum.at(first, graph.group[grouped], number[grouped])
    number[grouped] = first[graph.group[grouped]]
    return number


def layer_of(module: str) -> str:
    """Return a module path up to the first number in it.

    >>> layer_of("decoder.layers.3.mlp.0"), layer_of("head"), layer_of("2.conv")
    ('decoder.layers.3', 'head', '2')
    """
    found = re.match(r"(.*?\.)?\d+(?=\.|$)", module)
    return found[0] if found else module
