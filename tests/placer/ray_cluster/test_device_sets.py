"""Sets of devices of nodes: which of theirs stand for ours."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from placer.ray_cluster.connection import Node
from placer.ray_cluster.device_sets import Machine, device_sets, sets_of_all

NODE = Node(key="a", name="10.0.0.5:9", cpus=8, gpus=4)
OTHER = Node(key="b", name="10.0.0.6:9", cpus=1, gpus=0)
MACHINE = Machine("boot", (0, 2, 4, 6, 8))


def test_cores_of_a_node_stand_for_as_many_of_ours() -> None:
    sets = device_sets(NODE, MACHINE, ("core:0", "core:1"))
    assert [each.names for each in sets] == [("core:0", "core:2"), ("core:4", "core:6")]
    assert not sets[0].resources & sets[1].resources
    [unequal] = device_sets(NODE, MACHINE, ("core:0-2", "core:7"))
    assert unequal.names == ("core:0+2+4", "core:6")
    assert unequal.cpus == 4
    of_another_node = device_sets(NODE._replace(key="c"), MACHINE, ("core:0", "core:1"))
    assert sets[0].resources == of_another_node[0].resources  # of the same machine


def test_ray_numbers_the_gpus_of_each_process() -> None:
    sets = device_sets(NODE, MACHINE, ("cuda:2", "cuda:3"))
    assert [each.names for each in sets] == [("cuda:0", "cuda:1")] * 2
    assert [each.gpus for each in sets] == [2, 2]
    assert not sets[0].resources & sets[1].resources
    [alone] = device_sets(NODE, MACHINE, ("cpu", "cuda:1"))
    assert alone.names == ("cpu", "cuda:0")
    assert alone.cpus == 8


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("core:0", "core:1"), r"node 10\.0\.0\.6:9 .* has 5 cores and offers 1, .* needs 2"),
        (("cuda:0",), r"node 10\.0\.0\.6:9 .* offers 0 GPUs, .* needs 1"),
        (("xpu:0",), "CUDA devices run, not xpu:0"),
    ],
)
def test_a_node_without_the_devices_is_named(names: Sequence[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sets_of_all({OTHER: MACHINE}, names)


def test_nodes_take_turns_and_the_others_are_listed() -> None:
    third = NODE._replace(key="c")
    machines = {NODE: MACHINE, OTHER: MACHINE, third: Machine("boot 2", (0, 1))}
    sets, reasons = sets_of_all(machines, ("core:0", "core:1"))
    assert [each.node.key for each in sets] == ["a", "c", "a"]
    assert len(reasons) == 1
    assert OTHER.name in reasons[0]
