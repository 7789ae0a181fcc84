"""Predicted scaling beside published figures; what stands for what is in benchmarks/scaling.py."""

from __future__ import annotations

import pytest

from benchmarks.scaling import (
    baidu_s,
    even_step,
    halving_gain,
    predicted,
    resnet,
    resnet_step,
    scalings,
)


def test_the_example_of_baidu_comes_out_exactly() -> None:
    for name, published_s, computed_s in baidu_s():
        assert computed_s == pytest.approx(published_s, rel=1e-5), name


def test_every_published_efficiency_lies_between_no_and_full_overlap() -> None:
    found = {one.name: (one.published, predicted(one)) for one in scalings()}
    assert len(found) == 8
    for name, (published, by_model) in found.items():
        assert by_model.holds(published), name
        assert by_model.no_overlap <= by_model.in_buckets <= by_model.full_overlap <= 1, name
    tpu, vgg = found["TPU v2, ResNet-50, 1 -> 32"], found["Horovod, VGG-16, 512 GPUs"]
    assert tpu[1].in_buckets >= 0.95
    others = [by_model for name, (_, by_model) in found.items() if "Horovod" in name]
    assert vgg[1].in_buckets == min(one.in_buckets for one in others)  # as was published
    for name in ("BMUF, LSTM, 16 workers", "BMUF, DNN, 64 workers"):
        published, by_model = found[name]
        assert by_model.in_buckets == pytest.approx(published, abs=0.01)
        assert by_model.no_overlap == pytest.approx(by_model.in_buckets)  # nothing to overlap with


def test_halving_doubling_gains_where_messages_are_small() -> None:
    assert halving_gain(0.62e6) > 3 > halving_gain(25 << 20) > 1
    assert min(halving_gain(4.0 * elements) for elements in (1e4, 1e5, 1e6)) > 2


def test_resnet_50_has_all_its_gradients_and_the_published_times() -> None:
    step, forward_ns = resnet()
    assert step.size_bytes.sum() == 4 * 25_557_032
    assert 0.2 < forward_ns / step.step_ns < 0.5
    stretched = resnet_step(0.2, backward_s=0.12)
    assert stretched.step_ns == stretched.ready_ns.max() == 0.2e9
    assert 0.08e9 < stretched.ready_ns.min() < 0.1e9  # the last layer, soon after the forward pass


def test_an_even_step_spreads_its_gradients_over_two_thirds() -> None:
    step = even_step(0.3, 1e9)
    assert step.size_bytes.sum() == pytest.approx(1e9)
    assert step.ready_ns[-1] == step.step_ns == 0.3e9
    assert step.ready_ns[0] == pytest.approx(0.1e9 + 0.2e9 / len(step.slot))
