from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphs.extract import Workload, extract
from tests.helpers.tiny_models import Plain


def moved(forward: Any, *inputs: Tensor) -> dict[str, int]:
    """Return {op: moved bytes} of an inference step."""
    extraction = extract(Workload.of(Plain(forward), inputs, training=False))
    return {node["op"]: node["moved_bytes"] for _, node in extraction.graph.nodes(data=True)}


def test_what_goes_in_and_what_comes_out_is_moved_and_a_tensor_read_twice_only_once() -> None:
    found = moved(lambda _, x: (x + x) @ x, torch.zeros(10, 10))
    assert found == {"add": 4 * (100 + 100), "matmul": 4 * (100 + 100 + 100)}


def test_a_lookup_reads_the_rows_that_it_gives_out_not_the_table() -> None:
    def lookups(_: Any, table: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        looked_up = torch.nn.functional.embedding(rows, table)
        return looked_up, table.index_select(0, rows), table[rows]

    found = moved(lookups, torch.zeros(1000, 8), torch.zeros(3, dtype=torch.int64))
    by_hand = 8 * 3 + 4 * (3 * 8) + 4 * (3 * 8)
    assert found == {"embedding": by_hand, "index_select": by_hand, "index": by_hand}


def test_of_a_view_only_what_it_shows_is_read() -> None:
    found = moved(lambda _, x: (x[:2].exp(), x[:1].expand(50, 4).sin()), torch.zeros(10, 4))
    assert found == {"exp": 4 * (8 + 8), "sin": 4 * (4 + 200)}


def test_showing_a_part_of_what_was_computed_moves_nothing() -> None:
    found = moved(lambda _, x: x.exp()[:2].sin(), torch.zeros(10, 4))
    assert found == {"exp": 4 * (40 + 40), "slice": 0, "sin": 4 * (8 + 8)}
