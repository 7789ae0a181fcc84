"""Models of transformers as workloads: sizes, steps, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn

from graphs.extract import extract
from placer.sources import huggingface
from placer.sources.names import TargetError, is_graph_file
from placer.sources.target import load_step
from tests.helpers.tiny_models import assert_same
from tests.helpers.tiny_transformers import COMMON, OTHERS, TARGETS, load

transformers = pytest.importorskip("transformers")

PUBLISHED = {
    "bert-base-uncased": 109_514_298,
    "bert-base-cased": 108_340_804,
    "bert-large-uncased": 335_174_458,
    "distilbert-base-uncased": 66_985_530,
    "roberta-base": 124_697_433,
    "gpt2": 124_439_808,
    "distilgpt2": 81_912_576,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "vit-base-patch16-224": 86_567_656,
    "resnet-50": 25_557_032,
    "whisper-tiny": 37_760_640,
    "whisper-base": 72_593_920,
}
"""Parameter counts of the published models, including the word prediction head."""


@pytest.mark.slow_repeats
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_model_has_the_size_of_the_published_one_and_without_weights_needs_no_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "available_memory_bytes", lambda: 0)
    model = load_step(f"hf:{name}", training=True, weights=False).model
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_a_target_makes_the_same_step_every_time_silently_and_leaves_random_numbers_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = torch.get_rng_state()
    first, second = load_step(TARGETS["gpt2"], training=True), load(TARGETS["gpt2"])
    assert_same(first.model.state_dict(), second.model.state_dict())
    assert_same(dict(first.keywords), dict(second.keywords))
    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")


def test_a_target_says_how_many_tokens_and_which_sizes() -> None:
    step = load("hf:openai-community/gpt2?batch=3&sequence=5&n_layer=1&n_embd=8&n_head=2")
    assert step.keywords["input_ids"].shape == step.keywords["labels"].shape == (3, 5)
    assert len(step.model.get_submodule("transformer.h")) == 1  # type: ignore[arg-type]  # a ModuleList


def test_images_and_spectra_have_the_sizes_of_the_configuration_and_inference_no_labels() -> None:
    keywords = load("hf:vit?batch=2&image_size=[32,16]&num_hidden_layers=1").keywords
    assert keywords["pixel_values"].shape == (2, 3, 32, 16)
    assert keywords["labels"].shape == (2,)
    keywords = load(OTHERS["whisper"]).keywords
    assert keywords["input_features"].shape == (2, 4, 12)
    assert keywords["labels"].shape == (2, 8)
    assert set(load(TARGETS["bert"], training=False).keywords) == {"input_ids"}
    assert set(load(TARGETS["t5"], training=False).keywords) == {"input_ids", "decoder_input_ids"}


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        ("SequenceClassification", {"labels": (2,)}),
        ("TokenClassification", {"labels": (2, 128)}),
        ("QuestionAnswering", {"start_positions": (2,), "end_positions": (2,)}),
        ("MaskedLM", {"labels": (2, 128)}),
    ],
)
def test_a_model_gets_the_labels_of_its_head(head: str, labels: dict[str, tuple[int, ...]]) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 2}
    config = transformers.BertConfig(intermediate_size=8, vocab_size=31, **sizes)
    step = huggingface.made_up(getattr(transformers, f"BertFor{head}")(config), training=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in step.keywords.items()}
    rows = shapes.pop("input_ids")[0]
    assert shapes == {name: (rows, *shape[1:]) for name, shape in labels.items()}
    assert step.model(**step.keywords).loss.isfinite()


@pytest.mark.slow
def test_the_cache_of_keys_and_values_is_off_unless_it_is_asked_for() -> None:
    for field, expected in (("", False), ("&use_cache=true", True)):
        config: Any = load(f"hf:gpt2?{COMMON}{field}", training=False).model.config
        assert config.use_cache is expected


def test_a_folder_with_a_configuration_is_a_model(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 31}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        target = f"hf:{path}?sequence=4"
        assert not is_graph_file(target)
        step = load_step(target, training=True)
        assert type(step.model).__name__ == "GPT2LMHeadModel"
        assert step.keywords["input_ids"].shape == (1, 4)


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("hf:", "names no model"),
        ("hf:bert-base-uncasd", "hf:bert-base-uncased?"),
        ("hf:THUDM/chatglm-6b", "for another model write a function that returns (model, inputs"),
        ("hf:gpt2?trust_remote_code=true", "no code is loaded; write a function that returns"),
        ("hf:gpt2?revision=main", "no field 'revision'; write a function that returns"),
        ("hf:resnet?use_pretrained_backbone=true", "downloaded; write a function that returns"),
        ("hf:.", "there is no file config.json"),
        ("hf:sam", "SamConfig"),
        ("hf:speech_to_text", "input_features"),
        ("hf:whisper?sequence=500", "448"),
        ("hf:gpt2?layers=3", "n_layer?"),
        ("hf:gpt2?sequence=2000", "1024"),
        ("hf:gpt2?n_layer=1000000", "n_layer is 1000000"),
        ("hf:gpt2?batch=0", "batch is 0"),
        ("hf:gpt2?batch=true", "batch is True"),
        ("hf:gpt2?batch", "?key=value"),
        ("hf:bert?hidden_size=x", "refuses"),
        (f"hf:gpt2?{COMMON}&batch=1000000000000000", "there is too little memory"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(
    target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError) as refused:
        load_step(target, training=True)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface, "available_memory_bytes", lambda: 40 * 10**9)
    with pytest.raises(TargetError, match=r"64\.2 GB"):
        load("hf:llama-3-8b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(TARGETS["gpt2"].replace("n_layer=2", "n_layer=1"), id="one layer"),
        *(pytest.param(each, marks=pytest.mark.slow, id=n) for n, each in TARGETS.items()),
    ],
)
def test_without_weights_the_graph_is_the_same(target: str) -> None:
    step = load_step(target, training=True, weights=False)
    assert all(tensor.is_meta for tensor in step.model.state_dict().values())
    real = load(target)
    assert nx.utils.graphs_equal(extract(step).graph, extract(real).graph)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "swin", "depths": [10**9, 1, 1, 1]}, "depths is"),
        ({"model_type": "swin", "depths": [3000, 3000, 3000, 3000]}, "depths sums up to 12000"),
        ({"model_type": "vit", "depth": 10**9}, "depth is"),
        ({"model_type": "llava", "text_config": {"num_labels": 10**6}}, "text_config.num_labels"),
        ({"model_type": "resnet", "layers": {"widths": [[[1 << 50]]]}}, "layers.widths is"),
        ({"model_type": "gpt2", "layer_types": ["full"] * 100_001}, "layer_types has 100001"),
        ({"model_type": "gpt2", "id2label": dict.fromkeys(range(100_001), "a")}, "id2label has"),
    ],
)
def test_numbers_and_lists_of_a_configuration_are_bounded_wherever_they_stand(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=message):
        load(f"hf:{tmp_path}")


@pytest.mark.slow_repeats
@pytest.mark.parametrize("target", ["gpt2?n_layer=9000", "swinv2?depths=[9,9990]&num_heads=[1,1]"])
def test_a_model_of_too_many_modules_is_not_made(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "MOST_PARTS", 1000)
    with pytest.raises(TargetError, match="more than 1000 modules and parameters"):
        load(f"hf:{target}")
    made = nn.Sequential(*(nn.Linear(1, 1) for _ in range(400)))  # counted only inside load
    assert len(made) == 400


def test_an_error_without_a_text_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", fail)
    with pytest.raises(TargetError, match="KeyError"):
        load("hf:gpt2")


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TargetError, match=r"pip install 'device-placer\[hf\]'"):
        load(f"hf:gpt2?{COMMON}")


@pytest.mark.parametrize(
    ("content", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config"),
    ],
)
def test_a_configuration_of_quantized_weights_is_refused(
    content: dict[str, Any], method: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **content}))
    with pytest.raises(
        TargetError, match=rf"are quantized \({method}\).*remove quantization_config"
    ):
        load(f"hf:{tmp_path}")
