"""Predicted scaling against published figures; see benchmarks/replicas/scaling.py."""

from __future__ import annotations

import pytest

from benchmarks.replicas.scaling import (
    baidu_s,
    predicted,
    scalings,
)


def test_the_example_of_baidu_comes_out_exactly() -> None:
    for name, published_s, computed_s in baidu_s():
        assert computed_s == pytest.approx(published_s, rel=1e-5), name


@pytest.mark.slow
def test_every_published_efficiency_lies_between_no_and_full_overlap() -> None:
    found = {one.name: (one.published, predicted(one)) for one in scalings()}
    assert len(found) == 8
    for name, (published, by_model) in found.items():
        assert by_model.holds(published), name
        assert by_model.no_overlap <= by_model.in_buckets <= by_model.full_overlap <= 1, name
    tpu, vgg = found["TPU v2, ResNet-50, 1 -> 32"], found["Horovod, VGG-16, 512 GPUs"]
    assert tpu[1].in_buckets >= 0.95
    others = [by_model for name, (_, by_model) in found.items() if "Horovod" in name]
    assert vgg[1].in_buckets == min(one.in_buckets for one in others)  # as published
    for name in ("BMUF, LSTM, 16 workers", "BMUF, DNN, 64 workers"):
        published, by_model = found[name]
        assert by_model.in_buckets == pytest.approx(published, abs=0.01)
        assert by_model.no_overlap == pytest.approx(by_model.in_buckets)  # nothing to overlap with
