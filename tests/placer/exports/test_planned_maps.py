"""``placer.device_map``: maps of tiny transformers beside those of accelerate, dispatched by it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import placer
from graphs.extract import Workload
from placer.exports.module_tree import around, whole_modules
from tests.fake_cuda import fake_cuda
from tests.helpers import tiny_models, tiny_transformers
from tests.placer.exports.test_device_map import contrast

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

NAMES = ("slow", "fast")


def cluster(memory_bytes: int = 10**9) -> placer.Cluster:
    """Return a slow and a fast GPU; ops take microseconds, and a copy as long as some of them."""
    devices = tuple(
        placer.Device(
            name=name,
            kind=name,
            memory_bytes=memory_bytes,
            launch_s=1e-6,
            peak_flop_per_s=flop_per_s,
            bandwidth_bytes_per_s=flop_per_s,
        )
        for name, flop_per_s in zip(NAMES, (1e9, 4e9), strict=True)
    )
    link = placer.Link(between=NAMES, latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    return placer.Cluster(name="slow and fast", devices=devices, links=(link,))


def clip() -> Workload:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "projection_dim": 8}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 31, "max_position_embeddings": 8, "eos_token_id": 30},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config)
    inputs = {"input_ids": torch.randint(31, (2, 8)), "pixel_values": torch.randn(2, 3, 8, 8)}
    return Workload.of(model, inputs, training=False)


def in_a_row(*, batch: int = 32) -> Workload:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    return Workload.of(nn.Sequential(*layers), torch.ones(batch, 64), training=False)


OWN = {"clip": clip, "layers": in_a_row}


def workload(name: str) -> Workload:
    if name in OWN:
        return OWN[name]()
    return tiny_transformers.without_dropout(name, training=False)


def weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@functools.cache
def needing(name: str) -> tuple[Workload, int]:
    """Return a step and the memory that it needs on one GPU."""
    step = workload(name)
    alone = placer.evaluate({"": "fast"}, step, devices=cluster(), progress=False)
    return step, alone.result.peak_memory_bytes["fast"]


@functools.cache
def planned(name: str, share: float) -> tuple[Workload, Any]:
    """Return a step and its map if every GPU has this share of the memory that the step needs."""
    step, needed_bytes = needing(name)
    limit = int(share * needed_bytes)
    return step, placer.device_map(step, devices=cluster(limit), budget="100e", progress=False)


def outputs(step: Workload, model: nn.Module) -> list[Tensor]:
    """Return the floating-point tensors of an output, on the CPU."""
    with torch.no_grad():
        output = model(*step.model_inputs, **step.keywords)
    leaves = tree_leaves(output if torch.is_tensor(output) else tuple(output.to_tuple()))
    return [leaf.to("cpu") for leaf in leaves if torch.is_tensor(leaf) and leaf.is_floating_point()]


def dispatched(step: Workload, content: Mapping[str, int | str]) -> list[Tensor]:
    """Return the outputs of a model that accelerate dispatches on two devices of this machine."""
    devices = {path: ("cpu", "cuda:0")[int(number)] for path, number in content.items()}
    with fake_cuda():
        model = copy.deepcopy(step.model).eval()
        dispatched = accelerate.dispatch_model(model, devices, main_device="cpu")
        return outputs(step, dispatched)


MODELS = (
    "llama",
    pytest.param("bert", marks=pytest.mark.slow),
    pytest.param("t5", marks=pytest.mark.slow),
    pytest.param("clip", marks=pytest.mark.slow),
)
TOO_SMALL = 0.8
"""Share of the memory of a step that one GPU has: two are needed."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize("name", MODELS)
def test_the_map_is_complete_whole_and_dispatched_by_accelerate(name: str) -> None:
    step, found = planned(name, TOO_SMALL)
    model: Any = step.model
    assert set(found.values()) == {0, 1}, "one GPU has too little memory"
    assert all(around(entry, found) is not None for entry in model.state_dict())
    classes = model._no_split_modules
    whole = [path for path, part in model.named_modules() if type(part).__name__ in classes]
    assert whole
    assert not [entry for entry in found for path in whole if entry.startswith(f"{path}.")]
    torch.testing.assert_close(
        dispatched(step, found), outputs(step, copy.deepcopy(model).eval()), atol=1e-5, rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_map_that_it_is_compared_with_is_faster(name: str) -> None:
    _, found = planned(name, TOO_SMALL)
    assert 0 < found.predicted_step_s < math.inf
    if name != "bert":  # on whose tied bias accelerate 1.15 fails with these limits
        assert found.others.keys() == {
            "accelerate",
            "accelerate, balanced",
            "single cuda:0",
            "single cuda:1",
        }
        assert found.accelerate_predicted_step_s == found.others["accelerate"].step_s
    assert found.predicted_step_s <= min(each.step_s for each in found.others.values())
    assert found.single_device_predicted_step_s == math.inf
    assert found.summary.endswith("; best single device impossible")
    assert "but has" in found.others["single cuda:0"].why


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize(
    "name",
    [
        "layers",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("t5", marks=pytest.mark.slow),
    ],
)
def test_maps_of_accelerate_are_predicted_to_run_if_they_do(name: str) -> None:
    step, found = planned(name, 2.0)
    balanced = found.others["accelerate, balanced"]
    assert set(balanced.content.values()) == {0, 1}
    dispatched(step, balanced.content)
    assert math.isfinite(balanced.step_s), balanced.why


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two towers", pytest.param("clip", marks=pytest.mark.slow)])
def test_a_map_of_accelerate_that_mixes_devices_in_an_op_cannot_run(name: str) -> None:
    if name == "clip":
        _, found = planned("clip", 2.0)
    else:
        step = replace(contrast(), inputs=contrast().model_inputs, loss=None, training=False)
        found = placer.device_map(step, devices=cluster(), budget="20e", progress=False)
    balanced = found.others["accelerate, balanced"]
    # The outputs are on the second GPU, the scale is a parameter of the model itself.
    model = "CLIPModel" if name == "clip" else "Contrast"
    assert balanced.why == f"mul in {model}.forward reads from several devices"


def test_with_enough_memory_one_fast_gpu_has_it_all() -> None:
    found = placer.device_map(in_a_row(), devices=cluster(), budget="100e", progress=False)
    assert found == {"": 1}
    assert found.predicted_step_s == found.single_device_predicted_step_s
    # accelerate fills the GPUs by number. The second is four times as fast.
    accelerate_step_s = found.accelerate_predicted_step_s
    assert found.others["accelerate"].content == {"": 0}
    assert accelerate_step_s is not None
    assert 3.5 < accelerate_step_s / found.predicted_step_s < 4


@pytest.mark.slow
def test_a_map_is_predicted_as_by_evaluating_it_as_a_placement() -> None:
    step = in_a_row()
    limit = int(0.9 * weight_bytes(step.model))
    found = placer.device_map(step, devices=cluster(limit), budget="100e", progress=False)
    assert set(found.values()) == {0, 1}
    for content, step_s in (
        (found, found.predicted_step_s),
        (found.others["accelerate"].content, found.accelerate_predicted_step_s),
    ):
        given = {path: NAMES[int(number)] for path, number in content.items()}
        evaluated = placer.evaluate(given, step, devices=cluster(limit), progress=False)
        assert evaluated.step_s == step_s


@pytest.mark.slow
def test_training_steps_are_mapped_with_room_for_gradients() -> None:
    step = replace(in_a_row(), training=True, loss=tiny_models.squared)
    step = replace(step, inputs=(*step.inputs, torch.ones(32, 64)))
    alone = placer.evaluate({"": "fast"}, step, devices=cluster(), progress=False)
    limit = int(TOO_SMALL * alone.result.peak_memory_bytes["fast"])
    assert limit > weight_bytes(step.model)
    found = placer.device_map(step, devices=cluster(limit), budget="100e", progress=False)
    assert set(found.values()) == {0, 1}
    homes = {around(name, found) for name in step.model.state_dict()}
    assert None not in homes
    # accelerate counts weights alone, and has them all on the first GPU.
    assert found.others["accelerate"].content == {"": 0}
    assert found.accelerate_predicted_step_s == math.inf


@pytest.mark.slow
def test_a_name_or_model_of_transformers_needs_no_inputs_and_limits_are_as_accelerates() -> None:
    name = tiny_transformers.TARGETS["llama"].removeprefix("hf:")
    name = name.replace("num_hidden_layers=2", "num_hidden_layers=1")
    options: dict[str, Any] = {"devices": cluster(), "budget": "20e", "progress": False}
    assert 1 in placer.device_map(name, **options).values()
    model = tiny_transformers.load(f"hf:{name}").model
    limits: dict[str | int, int | str] = {1: int(0.9 * weight_bytes(model)), "slow": "10MB"}
    # Activations of the made-up batch of 128 tokens take less.
    assert set(placer.device_map(model, memory=limits, **options).values()) <= {0, 1}
    with pytest.raises(placer.PlacementError, match="fits"):
        placer.device_map(model, memory={0: 10, 1: 10}, **options)


def test_the_map_is_a_dict_that_from_pretrained_takes(tmp_path: Path) -> None:
    step, found = planned("llama", TOO_SMALL)
    model: Any = step.model
    model.save_pretrained(tmp_path)
    assert copy.deepcopy(found).predicted_step_s == found.predicted_step_s
    on_cpu = {path: "cpu" for path in found}  # noqa: C420  # the GPUs are not here
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=on_cpu)
    assert loaded.state_dict().keys() == step.model.state_dict().keys()


class Check(nn.Module):
    """Two branches and a loss that reads a value: the step can only be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.right = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.meet = nn.Bilinear(64, 64, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.meet(self.left(x), self.right(x))
        return out


def scaled(output: Tensor, target: Tensor) -> Tensor:
    return tiny_models.squared(output * float(output.detach().abs().max().item()), target)


@pytest.mark.slow
def test_a_recorded_training_step_is_mapped_by_the_forward_pass_of_its_model() -> None:
    torch.manual_seed(0)
    step = Workload.of(Check(), (torch.randn(16, 64), torch.randn(16, 8)), scaled)
    alone = placer.evaluate({"": "fast"}, step, devices=cluster(), progress=False)
    limit = int(TOO_SMALL * alone.result.peak_memory_bytes["fast"])
    found = placer.device_map(step, devices=cluster(limit), budget="100e", progress=False)
    assert set(found.values()) == {0, 1}
    assert all(around(entry, found) is not None for entry in step.model.state_dict())
    assert found.predicted_step_s < math.inf


@pytest.mark.slow
def test_weights_that_accelerate_offloads_are_sent_in_every_step() -> None:
    step, size, gpu = in_a_row(batch=1), 64 * 64 * 4, cluster().devices[0]
    host = replace(gpu, name="host", kind="host", memory_bytes=10**9)
    link = placer.Link(between=("gpu", "host"), latency_s=1e-3, bandwidth_bytes_per_s=size / 1e-3)
    memory = int(3.5 * size)  # of accelerate's map: two layers, and room to send one
    offloading = placer.Cluster(
        name="small",
        devices=(replace(gpu, name="gpu", kind="gpu", memory_bytes=memory), host),
        links=(link,),
    )
    options: dict[str, Any] = {"budget": "20e", "progress": False}
    found = placer.device_map(step, devices=offloading, **options)
    assert found == {"0": 0, "1": 0, "2": "cpu", "3": "cpu"}
    ample = placer.device_map(step, devices=offloading, memory={"gpu": 10**9}, **options)
    assert ample == {"": 0}
    # Each layer that is sent takes a latency of 1 ms, and 1 ms for its bytes.
    assert found.predicted_step_s == pytest.approx(ample.predicted_step_s + 4e-3)
    trained = replace(step, training=True, inputs=(*step.inputs, torch.ones(1, 64)))
    trained = replace(trained, loss=tiny_models.squared)
    with pytest.raises(placer.PlacementError, match="fits nowhere"):
        placer.device_map(trained, devices=offloading, **options)


def test_a_model_that_accelerate_fails_to_map_is_mapped_without_its_maps() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer, nn.Linear(4, 4))
    limits: dict[str | int, int | str] = {0: 10**6, 1: 10**6}
    found = placer.device_map(
        model, torch.ones(2, 4), devices=cluster(), memory=limits, budget="20e", progress=False
    )
    assert found == {"": 1}
    assert found.others.keys() == {"single cuda:0", "single cuda:1"}
    assert found.accelerate_predicted_step_s is None


def test_what_cannot_be_mapped_is_refused() -> None:
    model = nn.Linear(2, 2)
    options: dict[str, Any] = {"progress": False}
    with pytest.raises(ValueError, match="give example inputs"):
        placer.device_map(model, devices=cluster(), **options)
    with pytest.raises(ValueError, match="memory of 2 is limited"):
        placer.device_map(model, torch.ones(1, 2), devices=cluster(), memory={2: 1}, **options)
    with pytest.raises(ValueError, match="inputs are for a model"):
        placer.device_map("gpt2", torch.ones(1, 2), devices=cluster(), **options)
    with pytest.raises(ValueError, match="ReLU has no parameters or buffers"):
        placer.device_map(nn.ReLU(), torch.ones(1, 2), devices=cluster(), **options)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no GPU here"):
            placer.device_map(model, torch.ones(1, 2), **options)


def test_the_outermost_modules_that_transformers_does_not_divide_are_whole() -> None:
    assert whole_modules(workload("llama").model) == ("model.layers.0", "model.layers.1")
    assert whole_modules(nn.Sequential(nn.Linear(2, 2))) == ()
