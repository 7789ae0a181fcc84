"""``hf:name``: a language model of transformers with random weights; nothing is downloaded.

A name is one of ``SIZES``, a type that transformers knows (``hf:llama``: the sizes that its
configuration has by default), or a folder with a ``config.json`` (weights in it are not read).
What follows a question mark is the batch size, the number of tokens, or a field of the
configuration: ``hf:llama?batch=2&sequence=64&num_hidden_layers=4``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qsl

import torch
from torch import nn

from envs.discover import available_memory_bytes
from graphs.extract import Step
from placer.sources.fault import TargetError

PREFIX: Final = "hf:"
BATCH: Final = 1
SEQUENCE: Final = 128
SEED: Final = 0

SIZES: Final[Mapping[str, tuple[str, Mapping[str, int]]]] = MappingProxyType(
    {
        "bert-base-uncased": ("bert", {}),
        "bert-base-cased": ("bert", {"vocab_size": 28996}),
        "bert-large-uncased": (
            "bert",
            {
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "intermediate_size": 4096,
            },
        ),
        "distilbert-base-uncased": ("distilbert", {}),
        "roberta-base": ("roberta", {"max_position_embeddings": 514, "type_vocab_size": 1}),
        "gpt2": ("gpt2", {}),
        "distilgpt2": ("gpt2", {"n_layer": 6}),
        "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
        "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
        "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
        "t5-small": ("t5", {}),
        "t5-base": ("t5", {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
        "tinyllama-1.1b": (
            "llama",
            {
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 22,
                "num_key_value_heads": 4,
            },
        ),
        "llama-2-7b": ("llama", {"max_position_embeddings": 4096}),
        "llama-3-8b": (
            "llama",
            {
                "vocab_size": 128256,
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 8192,
            },
        ),
        "mixtral-8x7b": ("mixtral", {}),
    }
)
"""{name of a published model: (its type in transformers, sizes that are not that type's own)}.

The numbers are those of the ``config.json`` published with each model.
"""


HEADS: Final = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
)
"""What transformers calls its tables of models by type of configuration, and their classes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a target asks for: a name, the size of the batch, fields of the configuration."""

    name: str
    batch: int = BATCH
    sequence: int = SEQUENCE
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value in (("batch", self.batch), ("sequence", self.sequence)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TargetError(f"{PREFIX}{self.name}: {what} is {value}, not a number above 0")

    @classmethod
    def parse(cls, target: str) -> Request:
        """Read ``hf:name?batch=2&sequence=64&field=value``.

        Raises:
            TargetError: it has no name, or what follows the question mark cannot be read.
        """
        name, _, query = target.removeprefix(PREFIX).partition("?")
        if not name:
            raise TargetError(f"target {target!r} names no model; {_known()}")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError as error:
            raise TargetError(f"target {target!r}: {error}; write ?key=value&key=value") from error
        fields = {key: _value(text) for key, text in pairs}
        batch, sequence = fields.pop("batch", BATCH), fields.pop("sequence", SEQUENCE)
        return cls(name, batch, sequence, fields)


def load(request: Request, *, training: bool, weights: bool = True) -> Step:
    """The step of a model on random tokens (batch, sequence), random weights, always the same.

    It is the model for masked words, for the next word, or from sequence to sequence, whichever
    its type has first. Trained, the labels are random too, and the loss is the model's own.
    Without ``weights`` the model is on the meta device, which takes no memory and holds no values.

    Raises:
        TargetError: transformers is not installed, has no such model or refuses its sizes, the
            sequence is longer than the model takes, or the weights do not fit into free memory.
    """
    transformers = _transformers(request)
    with _quiet(transformers), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        config = _config(transformers, request)
        head = _head(transformers, config, request)
        with _refusing(request), torch.device("meta"):
            model = head.from_config(config)
        if weights:
            _check_memory(model, request, training)
            model = head.from_config(config)
        return step_on_tokens(model, request.batch, request.sequence, training=training)


def step_on_tokens(model: Any, batch: int, sequence: int, *, training: bool) -> Step:
    """The step of a language model of transformers on random tokens (batch, sequence)."""
    words = model.config.vocab_size
    inputs = {"input_ids": torch.randint(words, (batch, sequence))}
    if training:
        inputs["labels"] = torch.randint(words, (batch, sequence))
    elif model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(words, (batch, sequence))
    return Step.of(model, inputs, training=training)


def _transformers(request: Request) -> Any:
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        raise TargetError(
            f"{PREFIX}{request.name} needs {error.name}, which is not installed: "
            "pip install 'device-placer[hf]'"
        ) from error


def _config(transformers: Any, request: Request) -> Any:
    maker, sizes = _maker(transformers, request)
    with _refusing(request):
        usual = maker()
    _check_fields(usual, request)
    with _refusing(request):
        config = maker(**{**sizes, **request.fields})
    # A cache of keys and values serves to generate text, and no graph could return it.
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and request.sequence > longest:
        raise TargetError(
            f"{PREFIX}{request.name} takes {longest} tokens at most, not {request.sequence}; ask "
            f"for {PREFIX}{request.name}?sequence={longest}"
        )
    return config


def _maker(transformers: Any, request: Request) -> tuple[Callable[..., Any], Mapping[str, int]]:
    """What makes the configuration, and the sizes of the published model."""
    path = Path(request.name)
    if path.exists():
        load_config = transformers.AutoConfig.from_pretrained
        return partial(load_config, request.name, local_files_only=True), {}
    name = request.name.rpartition("/")[2].lower()  # of "google-bert/bert-base-uncased"
    kind, sizes = SIZES.get(name, (name, {}))
    if kind in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[kind], sizes
    similar = difflib.get_close_matches(name, [*SIZES, *transformers.CONFIG_MAPPING], 1)
    meant = f"did you mean {PREFIX}{similar[0]}? " if similar else ""
    raise TargetError(
        f"{PREFIX}{request.name}: there is no such folder, and neither a type that transformers "
        f"knows nor a model whose sizes placer knows has this name; {meant}{_known()}"
    )


def _known() -> str:
    return f"known sizes: {', '.join(SIZES)}"


def _check_fields(config: Any, request: Request) -> None:
    known = {*config.to_dict(), *config.attribute_map}
    for name in request.fields:
        if name not in known:
            similar = difflib.get_close_matches(name, ["batch", "sequence", *known], 1)
            raise TargetError(
                f"{PREFIX}{request.name} has no field {name!r}"
                + (f"; did you mean {similar[0]}?" if similar else "")
            )


def _head(transformers: Any, config: Any, request: Request) -> Any:
    """The class of the model with its loss."""
    for mapping, head in HEADS:
        if type(config) in getattr(transformers, mapping):
            return getattr(transformers, head)
    raise TargetError(
        f"{PREFIX}{request.name}: transformers has no language model for {type(config).__name__}; "
        "write a function that returns (model, inputs, loss) and give path/to/model.py:function"
    )


def _check_memory(model: nn.Module, request: Request, training: bool) -> None:
    """Refuse a model (on the meta device) whose weights and gradients would not fit."""
    needed = sum(p.numel() * p.element_size() for p in model.parameters()) * (1 + training)
    free = available_memory_bytes()
    if needed > free:
        raise TargetError(
            f"{PREFIX}{request.name} needs {needed / 1e9:.1f} GB for its weights"
            f"{' and their gradients' if training else ''}, but {free / 1e9:.1f} GB are free here; "
            f"make it smaller, such as with ?num_hidden_layers=2"
        )


def _value(text: str) -> Any:
    """A number, true or false; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def _refusing(request: Request) -> Iterator[None]:
    """With the words of transformers for what it does not take."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise TargetError(f"{PREFIX}{request.name}: transformers refuses it: {reason}") from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without what transformers says of every model it makes."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
