"""Inference of transformers as it is given: outputs and inputs with caches of keys and values."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from graphs.extract import Extraction, ExtractionError, StepError, Workload, extract
from graphs.extract.extraction import EXTRACTORS
from tests.helpers.placed_steps import CORES, by_calls, on_cores
from tests.helpers.tiny_models import Plain

transformers = pytest.importorskip("transformers")
BaseModelOutput = transformers.modeling_outputs.BaseModelOutput

SIZES = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
DECODER = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DECODER |= {"num_key_value_heads": 2, "hidden_size": 16}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
BART = {"d_model": 16, "max_position_embeddings": 32}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", DECODER),
    "Mistral": ("ForCausalLM", {"sliding_window": 4, **DECODER}),
    "GPT2": ("LMHeadModel", GPT2),
    "T5": ("ForConditionalGeneration", T5),
    "Bart": ("ForConditionalGeneration", {**BART, **HEADS, **LAYERS}),
}

QUICK = (("Llama", "auto"), ("Mistral", "dispatch"), ("Bart", "auto"))
"""A cache of each kind, and both extractors; the others are slow tests."""


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (2, count), generator=torch.Generator().manual_seed(seed))


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, sizes = CONFIGS[name]
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
    return model.eval()


def inputs_of(name: str, seed: int = 0) -> dict[str, Tensor]:
    decoded = {"decoder_input_ids": tokens(5, seed + 1)} if name in ("T5", "Bart") else {}
    return {"input_ids": tokens(6, seed), **decoded}


def assert_runs_as_eager(extraction: Extraction, model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Assert that a placed step returns the same objects with the same tensors; return them."""
    with torch.no_grad():
        expected = model(**copy.deepcopy(inputs))
    if len(CORES) > 1:
        with on_cores(extraction) as placed:
            assert_same_output(placed.step(copy.deepcopy(inputs)), expected)
    if extraction.forward_program is not None:
        placed_module = by_calls(extraction, ["cpu"])
        assert_same_output(placed_module.step(copy.deepcopy(inputs)), expected)
    return expected


def assert_same_output(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found.keys() == expected.keys()
    cache, other = found.past_key_values, expected.past_key_values
    assert type(cache) is type(other)
    assert cache.get_seq_length() == other.get_seq_length()
    for one, two in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(two, Tensor):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)
        else:
            assert one == two


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("name", "extractor"),
    [
        pytest.param(name, extractor, marks=[pytest.mark.slow] * ((name, extractor) not in QUICK))
        for name in CONFIGS
        for extractor in ("auto", "dispatch")
    ],
)
def test_outputs_with_caches_are_returned_as_the_model_does(name: str, extractor: str) -> None:
    model = model_of(name)
    extraction = extract(Workload.of(model, inputs_of(name), training=False), extractor)
    assert extraction.extractor == ("export" if extractor == "auto" else extractor)
    assert not extraction.no_forward
    assert_runs_as_eager(extraction, model, inputs_of(name, seed=7))


def with_past(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return a past as a keyword, by the name that this version of transformers has for it."""
    named = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in named else "past_key_values": cache}


@pytest.mark.slow
def test_a_single_step_with_a_past_takes_and_returns_a_cache() -> None:
    model = model_of("Llama")

    def step_after(seed: int) -> dict[str, Any]:
        with torch.no_grad():
            past = model(input_ids=tokens(6, seed)).past_key_values
        return {"input_ids": tokens(1, seed), **with_past(model, past)}

    extraction = extract(Workload.of(model, step_after(0), training=False))
    assert extraction.extractor == "export"
    output = assert_runs_as_eager(extraction, model, step_after(3))
    assert output.past_key_values.get_seq_length() == 7


@pytest.mark.slow
@pytest.mark.parametrize("encoded", ["tokens", "output", "tuple"])
@pytest.mark.parametrize("name", ["Bart", pytest.param("T5", marks=pytest.mark.slow)])
def test_a_single_step_of_an_encoder_decoder_takes_and_returns_a_cache(
    name: str, encoded: str
) -> None:
    model = model_of(name)

    def step_after(seed: int) -> dict[str, Any]:
        with torch.no_grad():
            output = model(input_ids=tokens(6, seed), decoder_input_ids=tokens(3, seed + 1))
        hidden = output.encoder_last_hidden_state
        given = {
            "tokens": {"input_ids": tokens(6, seed)},
            "output": {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden)},
            "tuple": {"encoder_outputs": (hidden,)},
        }
        past = with_past(model, output.past_key_values)
        return {"decoder_input_ids": tokens(1, seed), **given[encoded], **past}

    extraction = extract(Workload.of(model, step_after(0), training=False))
    assert extraction.extractor == "export"
    output = assert_runs_as_eager(extraction, model, step_after(3))
    assert output.past_key_values.get_seq_length() == 4


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("extractor", ["auto", *EXTRACTORS])
def test_a_cache_of_fixed_size_is_refused_with_what_to_do(extractor: str, is_filled: bool) -> None:
    model = model_of("Llama")
    past = with_past(model, transformers.StaticCache(config=model.config, max_cache_len=16))
    if is_filled:
        with torch.no_grad():
            model(input_ids=tokens(6), **past)
    step = Workload.of(model, {"input_ids": tokens(1), **past}, training=False)
    with pytest.raises(StepError, match=r"is a StaticCache, into which.*\(DynamicCache\), or none"):
        extract(step, extractor)


class OwnCache:
    """Copies itself by code of its own, so that it cannot be taken apart."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def __copy__(self) -> OwnCache:
        return OwnCache(self.keys.clone())


def test_a_cache_that_cannot_be_returned_is_refused_with_what_to_do() -> None:
    model = Plain(lambda m, x: {"out": m.a(x), "past": OwnCache(m.a(x))}, a=nn.Linear(4, 4))
    step = Workload.of(model, torch.randn(2, 4), training=False)
    for extractor in ("export", "dispatch"):
        with pytest.raises(ExtractionError, match=r"returns a OwnCache.*use_cache=False"):
            extract(step, extractor)
    assert extract(step).extractor == "modules"
