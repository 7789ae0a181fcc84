"""Running and exporting a placement: a wrong one is refused before the model is extracted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placer
from envs.hardware.discover import physical_cores

CORE = f"core:{physical_cores()[0]}"


class Never(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model ran")


def content(**changes: object) -> str:
    return json.dumps({"format": "placer-placement/1", "devices": {"a": "cpu"}} | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "placement.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("junk", "placement.json: not JSON: .*line 1"),
        (content(format="placer-graph/1"), "this file has to be 'placer-placement/1'"),
        (content(micro_batches=2), "2 micro-batches, which cannot be run"),
        (content(devices={"a": "core:4000"}), "there is no device core:4000"),
    ],
)
def test_a_placement_that_cannot_be_run_is_refused_at_once(
    text: str, message: str, path: Path
) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        placer.apply(Never(), path, torch.ones(2), training=False)


@pytest.mark.slow
def test_a_placement_knows_whether_it_is_of_inference(path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    search = placer.SearchConfig(budget="10e", policy=None, measure=False)
    result = placer.optimize(model, x, training=False, devices="cpu", search=search, progress=False)
    result.save(path)
    for placement in (result, path):
        torch.testing.assert_close(placer.apply(model, placement, x).step(x), model(x))
        with pytest.raises(ValueError, match="of inference: leave training=True out"):
            placer.apply(model, placement, x, training=True)
        assert placer.export(placement, "device-map", model, x).content == {"": "cpu"}
        with pytest.raises(ValueError, match="of inference: leave training=True out"):
            placer.export(placement, "device-map", model, x, training=True)
        with pytest.raises(ValueError, match="of inference, which has no loss"):
            placer.apply(model, placement, (x, x), loss=nn.functional.mse_loss)


@pytest.mark.slow
def test_a_workload_is_applied_and_exported_as_it_was_placed(path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    step = placer.Workload.of(model, (x, x), nn.functional.mse_loss, optimizer="sgd")
    search = placer.SearchConfig(budget="10e", policy=None, measure=False)
    result = placer.optimize(step, "cpu", search=search, progress=False)
    result.save(path)
    for placement in (result, path):
        placed = placer.apply(step, placement)
        assert placed.step(x, x) > placed.step(x, x), "the step updates the parameters"
        assert placer.export(placement, "device-map", step).content == {"": "cpu"}
        with pytest.raises(ValueError, match="a workload has its own example_inputs: leave"):
            placer.apply(step, placement, (x, x))
        with pytest.raises(ValueError, match="a workload has its own loss and dtype: leave"):
            placer.export(placement, "device-map", step, loss=nn.functional.mse_loss, dtype="bf16")
    other = placer.Workload.of(model, (x, x), nn.functional.mse_loss, optimizer="sgd", dtype="bf16")
    with pytest.raises(ValueError, match="of a step in fp32, the workload is in bf16: search"):
        placer.apply(other, result)
    inference = placer.Workload.of(model, x, training=False)
    with pytest.raises(ValueError, match="of a training step: give a workload with training=True"):
        placer.apply(inference, path)


@pytest.mark.slow
def test_what_a_result_was_not_made_for_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    loss = nn.functional.mse_loss
    search = placer.SearchConfig(budget="10e", policy=None, measure=False)
    result = placer.optimize(model, (x, x), loss=loss, devices="cpu", search=search, progress=False)
    placed = placer.apply(model, result, (x + 1, x), loss=loss)
    torch.testing.assert_close(placed.step(x, x).detach(), loss(model(x), x).detach())
    assert placer.export(result, "device-map", model, x, target=x).content == {"": "cpu"}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("has its own loss: leave loss out, or search", {"loss": nn.functional.l1_loss}),
        ("has its own target: leave", {"target": x}),
        ("own dtype and extractor: leave", {"dtype": "bf16", "extractor": "modules"}),
        (r"input \[0\] of the batch is .*\(1, 4\), the placement", {"example_inputs": (x[:1], x)}),
        ("the batch lacks the target", {"example_inputs": x}),
    ]
    for message, given in refused:
        with pytest.raises(ValueError, match=message):
            placer.apply(model, result, **given)
        with pytest.raises(ValueError, match=message):
            placer.export(result, "device-map", model, **given)
    assert placer.apply(placer.Workload.of(model, (x, x), loss), result).step(x, x) is not None
    other = placer.Workload.of(model, (x, x), nn.functional.l1_loss)
    with pytest.raises(ValueError, match="has its own loss"):
        placer.apply(other, result)
    with pytest.raises(ValueError, match="made for graph"):
        placer.export(result, "device-map", nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def test_a_loss_that_is_made_again_is_the_same() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    search = placer.SearchConfig(budget="1e", placer="heft", policy=None, measure=False)

    def scaled(factor: float) -> Any:
        return lambda output, target: factor * nn.functional.mse_loss(output, target)

    losses: list[tuple[Any, Any, Any]] = [
        (nn.MSELoss(), nn.MSELoss(), nn.MSELoss(reduction="sum")),
        (nn.NLLLoss(torch.ones(4)), nn.NLLLoss(torch.ones(4)), nn.NLLLoss(torch.zeros(4))),
        (scaled(2.0), scaled(2.0), scaled(3.0)),
    ]
    for loss, again, other in losses:
        y = torch.zeros(2, dtype=torch.int64) if isinstance(loss, nn.NLLLoss) else x
        result = placer.optimize(model, (x, y), loss=loss, devices="cpu", search=search)
        placer.apply(model, result, loss=again)
        with pytest.raises(ValueError, match="has its own loss"):
            placer.apply(model, result, loss=other)


def test_an_input_of_another_dtype_is_refused_with_both_dtypes() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    search = placer.SearchConfig(budget="10e", policy=None, measure=False)
    result = placer.optimize(model, x, training=False, devices="cpu", search=search, progress=False)
    placed = placer.apply(model, result)
    with pytest.raises(
        ValueError, match=r"is torch\.float64, .* made for torch\.float32: "
    ) as refused:
        placed.step(x.double())
    assert "size" not in str(refused.value)


def test_a_placement_of_training_is_not_applied_for_inference(path: Path) -> None:
    path.write_text(content(devices={"a:linear": "cpu", "a:backward/linear": "cpu"}))
    with pytest.raises(ValueError, match="of a training step: leave training=False out"):
        placer.apply(Never(), path, torch.ones(2), training=False)


def test_a_file_to_export_is_read_before_the_model(path: Path) -> None:
    path.write_text("junk")
    with pytest.raises(ValueError, match="not JSON"):
        placer.export(path, "device-map", Never(), torch.ones(2), training=False)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (content(), "has no device 'cpu': it has core:"),
        ('{"0": 3}', r"has '0' on cuda:3 \(a number N means cuda:N\)"),
    ],
)
def test_a_warm_start_on_other_devices_is_refused_at_once(
    start: str, message: str, path: Path
) -> None:
    path.write_text(start)
    search = placer.SearchConfig(start_from=path, policy=None)
    with pytest.raises(ValueError, match=message):
        placer.optimize(
            Never(), torch.ones(2), training=False, devices=CORE, search=search, progress=False
        )
