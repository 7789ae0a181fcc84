"""Files of a run: its checkpoints, and the saved model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from placer.cli.main import main
from placer.parallel.data import Batch, FromFunction
from placer.parallel.methods.block_averager import flat_of
from placer.parallel.methods.sync import make_sync
from placer.parallel.training import STATE_FORMAT, Checkpoint, Replica, train, write_model
from placer.sources.target import load_function, load_step
from placer.state_file import read_state
from tests.helpers.ranks import on_ranks
from tests.helpers.replicas import own_batch
from tests.helpers.runs import all_ran, prepared, ran


@pytest.mark.slow
def test_the_next_loss_of_a_model_that_was_saved_is_that_of_the_run(tmp_path: Path) -> None:
    words = prepared(tmp_path)
    saved = tmp_path / "model.safetensors"
    _, whole = all_ran(2, words(4, "batch", save=saved), words(5, "batch"))
    expected = whole["losses"][4]
    target = tmp_path / "target.py"
    step = load_step(f"{target}:build", training=True)
    load_model(step.model, saved)
    assert step.model.get_buffer("1.num_batches_tracked") == 4
    (x, y), _ = FromFunction(load_function(f"{target}:batch"), step)(4 * 2)
    assert nn.functional.mse_loss(step.model(x), y).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_of_block_updates_the_result_is_saved_not_the_start_of_the_next_block(
    tmp_path: Path,
) -> None:
    checkpoint, saved = tmp_path / "run.json", tmp_path / "model.safetensors"
    words = prepared(tmp_path)
    ran(2, *words(4, "batch", sync="bmuf", period=2, checkpoint=checkpoint, save=saved))
    state = read_state(tmp_path / "run.json.4.0", STATE_FORMAT)
    [start] = state["sync"]["averager"]["base"]
    model = load_step(f"{tmp_path / 'target.py'}:build", training=True).model
    names = dict(model.named_parameters())
    result = load_file(saved)
    torch.testing.assert_close(flat_of(state["module"][name] for name in names), start)
    assert not torch.equal(flat_of(result[name] for name in names), start)


class Tied(nn.Module):
    """Two names of one weight, a persistent buffer and a non-persistent one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(2, 3).t())
        self.register_buffer("cache", torch.rand(2), persistent=False)


def test_tied_weights_are_written_once_and_stay_tied_when_they_are_loaded(tmp_path: Path) -> None:
    one, other = Tied(), Tied()
    write_model(tmp_path / "model.safetensors", one)
    assert set(load_file(tmp_path / "model.safetensors")) == {"embed.weight", "scale"}
    load_model(other, tmp_path / "model.safetensors")  # strict
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, one.head.weight)
    assert torch.equal(other.get_buffer("scale"), one.get_buffer("scale"))


@pytest.mark.slow
def test_a_model_of_pinned_cores_is_saved_too(tmp_path: Path) -> None:
    saved = tmp_path / "model.safetensors"
    core = f"core:{min(os.sched_getaffinity(0))}"
    words = prepared(tmp_path, core)(2, checkpoint=tmp_path / "run.json", save=saved)
    ran(1, *words)
    expected = read_state(tmp_path / "run.json.2.0", STATE_FORMAT)["module"]
    torch.testing.assert_close(load_file(saved), expected, rtol=0, atol=0)
    first = saved.read_bytes()
    saved.unlink()
    ran(1, *words, "--resume")
    assert saved.read_bytes() == first  # all steps were done; only the file is written


@pytest.mark.slow
def test_losses_that_are_no_numbers_are_null_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = prepared(tmp_path)(4, lr=1e30)
    assert main(["run", *words, "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    assert losses[0] is not None
    assert losses[-1] is None


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/model", "there is no folder"),
        ("placement.json", "--save and --placement are the same file"),
        ("target.py", "--save and target are the same file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *prepared(tmp_path)(2, save=tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def written_in_turn(folder: Path, *writes: tuple[str, int]) -> list[str]:
    """Let runs of these names write these steps and return the files in the folder."""
    for name, step in writes:
        Checkpoint(folder / name, {"run": name}).write(step, {"step": step})
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("writes", "names"),
    [
        (
            (("exp.big", 6), ("exp", 3), ("exp", 4)),
            ["exp", "exp.4.0", "exp.big", "exp.big.6.0"],
        ),
        ((("exp[1]*", 3), ("exp[1]*", 4)), ["exp[1]*", "exp[1]*.4.0"]),
    ],
)
def test_a_checkpoint_replaces_only_files_of_its_own_name(
    writes: tuple[tuple[str, int], ...], names: list[str], tmp_path: Path
) -> None:
    assert on_ranks(1, written_in_turn, tmp_path, *writes) == [names]


def test_losses_are_read_when_all_passes_are_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    item = torch.Tensor.item

    def read(tensor: torch.Tensor) -> object:
        done.append("read")
        return item(tensor)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            done.append("pass")
            return (self.weight * x).sum()

    monkeypatch.setattr(torch.Tensor, "item", read)
    passes: list[Batch] = [((torch.full((2,), float(k)),), {}) for k in (1, 2, 6)]
    assert Replica(Model()).backward(passes) == pytest.approx(6.0)
    assert done == ["pass"] * 3 + ["read"] * 3


class WithOwnState(nn.Module):
    """A buffer that is not saved, and state that is no tensor, change the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        self.steps = 0
        self.register_buffer("mean", torch.ones(4), persistent=False)
        self.register_buffer("last", None)
        self.register_buffer("before", None, persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        found: Tensor = self.layer(x)
        mean = self.get_buffer("mean").mul_(0.5).add_(found.detach().mean(0))
        for name in ("last", "before"):
            if (kept := getattr(self, name)) is not None:
                found = found - kept
            setattr(self, name, found.detach().mean(0))
        return nn.functional.mse_loss(found - mean * self.steps, y)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def losses_with_own_state(checkpoint: Path, ends: Sequence[int]) -> list[tuple[float, ...]]:
    found = []
    for steps in ends:
        model = WithOwnState()
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.5)
        done = train(
            Replica(model),
            make_sync(model, make),
            lambda number: (tuple(own_batch(number)), {}),
            steps=steps,
            checkpoint=Checkpoint(checkpoint, {}),
            resume=True,
        )
        found.append(done.losses)
    return found


def test_state_that_is_not_in_the_state_dict_as_a_tensor_is_resumed(tmp_path: Path) -> None:
    [[whole]] = on_ranks(1, losses_with_own_state, tmp_path / "whole.json", (6,))
    [[_, resumed]] = on_ranks(1, losses_with_own_state, tmp_path / "parts.json", (3, 6))
    assert resumed == whole
