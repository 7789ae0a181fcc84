"""``hf:name``: a model of transformers with random weights; nothing is downloaded.

Language models take random tokens, image classifiers random pixels, and speech-to-text models a
random spectrum.

A name is one of ``SIZES``, a model type of transformers (``hf:llama``, with the default sizes of
its configuration), or a folder with a ``config.json`` (weights in it are not read). After a
question mark follow the batch size, the number of tokens, or fields of the configuration:
``hf:llama?batch=2&sequence=64&num_hidden_layers=4``.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import parse_qsl

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from envs.hardware.discover import available_memory_bytes
from envs.hardware.torch_devices import is_out_of_memory
from graphs.extract import Workload
from graphs.files import file_error_message
from graphs.strict_json import brief, parse_json
from graphs.text import suggestion
from placer.sources.huggingface_config import (
    CONFIG_NAME,
    OF_LOADING,
    OWN_FUNCTION,
    check_harmless,
    quantization_method,
    read_config,
)
from placer.sources.names import PREFIX, TargetError

BATCH: Final = 1
SEQUENCE: Final = 128
IMAGE_SIZE: Final = 224
SEED: Final = 0
MOST_PARTS: Final = 300_000
"""Maximum modules and parameters of a model; creating this many takes 20 s and 1 GB, without
weights."""
WITHOUT_HUB: Final = MappingProxyType({"USE_HUB_KERNELS": "0", "HF_HUB_OFFLINE": "1"})
"""Environment variables read when transformers is imported: without them it downloads and runs
kernels if the package kernels is installed."""

SIZES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bert-base-uncased": "bert",
        "bert-base-cased": "bert?vocab_size=28996",
        "bert-large-uncased": "bert?hidden_size=1024&num_hidden_layers=24"
        "&num_attention_heads=16&intermediate_size=4096",
        "distilbert-base-uncased": "distilbert",
        "roberta-base": "roberta?max_position_embeddings=514&type_vocab_size=1",
        "gpt2": "gpt2",
        "distilgpt2": "gpt2?n_layer=6",
        "gpt2-medium": "gpt2?n_embd=1024&n_layer=24&n_head=16",
        "gpt2-large": "gpt2?n_embd=1280&n_layer=36&n_head=20",
        "gpt2-xl": "gpt2?n_embd=1600&n_layer=48&n_head=25",
        "t5-small": "t5",
        "t5-base": "t5?d_model=768&d_ff=3072&num_layers=12&num_heads=12",
        "tinyllama-1.1b": "llama?hidden_size=2048&intermediate_size=5632"
        "&num_hidden_layers=22&num_key_value_heads=4",
        "llama-2-7b": "llama?max_position_embeddings=4096",
        "llama-3-8b": "llama?vocab_size=128256&intermediate_size=14336"
        "&num_key_value_heads=8&max_position_embeddings=8192",
        "mixtral-8x7b": "mixtral",
        "vit-base-patch16-224": "vit?num_labels=1000",
        "resnet-50": "resnet?num_labels=1000",
        "whisper-tiny": "whisper",
        "whisper-base": "whisper?d_model=512&encoder_layers=6&encoder_ffn_dim=2048"
        "&encoder_attention_heads=8&decoder_layers=6&decoder_ffn_dim=2048"
        "&decoder_attention_heads=8",
    }
)
"""{name of a published model: its type in transformers, with the sizes that are not the defaults}.

The numbers are those of the ``config.json`` published with each model.
"""

HEADS: Final = (
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
)
"""(mapping from configuration types to models in transformers, its auto class)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed target: name, batch size, number of tokens, and fields of the configuration."""

    name: str
    batch: int = BATCH
    sequence: int = SEQUENCE
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value in (("batch", self.batch), ("sequence", self.sequence)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TargetError(f"{self}: {what} is {value}, not a number above 0")

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}"

    @classmethod
    def parse(cls, target: str) -> Request:
        """Parse ``hf:name?batch=2&sequence=64&field=value``."""
        name, _, query = target.removeprefix(PREFIX).partition("?")
        if not name:
            raise TargetError(f"target {target!r} names no model; {_known()}")
        try:
            fields = _fields(query)
        except ValueError as error:
            raise TargetError(f"target {target!r}: {error}; write ?key=value&key=value") from error
        batch, sequence = fields.pop("batch", BATCH), fields.pop("sequence", SEQUENCE)
        return cls(name, batch, sequence, fields)


def load(request: Request, *, training: bool, weights: bool = True) -> Workload:
    """Return the step of a model with random inputs and weights, always the same ones.

    The model is for sequence to sequence, masked words, speech to text, the next word, or image
    classification, the first of these that its type supports. In training the labels are random
    too, and the loss is the model's own. Without ``weights`` the model is on the meta device, which
    takes no memory and holds no values.
    """
    transformers = _transformers(request)
    with _quiet(transformers), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        config = _config(transformers, request)
        head = _head(transformers, config, request)
        make = partial(head.from_config, config, trust_remote_code=False)
        with _refusing(request):
            with torch.device("meta"), _few_parts(request):
                model = make()
            if weights:
                _check_memory(model, request, training)
                model = make()
            return _step(model, request, training=training)


def made_up(model: nn.Module, *, training: bool) -> Workload:
    """Return the step of a given model of transformers on random inputs, always the same ones."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "main_input_name"):
        raise TargetError(
            f"{type(model).__name__} is no model of transformers, whose inputs could be made up: "
            "give example inputs"
        )
    sequence = min(SEQUENCE, _longest(config) or SEQUENCE)
    request = Request(str(config.model_type), sequence=sequence)
    with torch.random.fork_rng(devices=[]), _refusing(request):
        torch.manual_seed(SEED)
        step = _step(model, request, training=training)
    if "use_cache" in signature(model.forward).parameters:
        return replace(step, keywords={**step.keywords, "use_cache": False})
    return step


def _step(model: Any, request: Request, *, training: bool) -> Workload:
    """Return the step of a model of transformers on random inputs, chosen by its main input."""
    config, batch = model.config, request.batch
    tokens = (batch, request.sequence)
    match model.main_input_name:
        case "input_ids":
            inputs = {"input_ids": torch.randint(config.vocab_size, tokens)}
        case "pixel_values":
            inputs = {"pixel_values": torch.randn(batch, config.num_channels, *_image_size(config))}
            if training:
                inputs["labels"] = torch.randint(config.num_labels, (batch,))
            return Workload.of(model, inputs, training=training)
        case "input_features" if hasattr(config, "num_mel_bins"):
            # Two frames of the spectrum make one position.
            frames = 2 * config.max_source_positions
            inputs = {"input_features": torch.randn(batch, config.num_mel_bins, frames)}
        case other:
            raise TargetError(
                f"{request} takes {other}, of which placer does not know the sizes; {OWN_FUNCTION}"
            )
    if training:
        inputs |= _labels(model, tokens)
    elif config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(config.vocab_size, tokens)
    return Workload.of(model, inputs, training=training)


def _labels(model: Any, tokens: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return random labels as the head of a model takes them, which its class tells."""
    config, head = model.config, type(model).__name__.partition("For")[2]
    if head == "QuestionAnswering":
        start, end = torch.randint(tokens[1], (2, tokens[0]))
        return {"start_positions": start, "end_positions": end}
    classes = config.num_labels if head.endswith("Classification") else config.vocab_size
    return {"labels": torch.randint(classes, tokens[: 1 + (head != "SequenceClassification")])}


def _image_size(config: Any) -> tuple[int, int]:
    """Return height and width in pixels; models that take any size get the usual one."""
    size = getattr(config, "image_size", None) or IMAGE_SIZE
    return (size, size) if isinstance(size, int) else tuple(size)


def _transformers(request: Request) -> Any:
    os.environ |= WITHOUT_HUB
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        raise TargetError(
            f"{request} needs {error.name}, which is not installed: pip install 'device-placer[hf]'"
        ) from error


def _config(transformers: Any, request: Request) -> Any:
    maker, sizes = _maker(transformers, request)
    with _refusing(request):
        usual = maker()
    _check_fields(usual, request)
    with _refusing(request):
        config = maker(**{**sizes, **request.fields})
    if "use_cache" not in request.fields:  # the key-value cache is for generating text
        config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    longest = _longest(config)
    if longest is not None and request.sequence > longest:
        raise TargetError(
            f"{request} takes {longest} tokens at most, not {request.sequence}; ask "
            f"for {request}?sequence={longest}"
        )
    return config


def _longest(config: Any) -> int | None:
    """Return the most tokens that a model takes, None if there is no limit."""
    limits = (
        getattr(config, "max_position_embeddings", None),
        getattr(config, "max_target_positions", None),
    )
    return next(filter(None, limits), None)


def _maker(transformers: Any, request: Request) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return a factory of the configuration, and the sizes of the published model."""
    path = Path(request.name)
    if path.exists():
        return _maker_of_file(transformers, request, path), {}
    name = request.name.rpartition("/")[2].lower()  # of "google-bert/bert-base-uncased"
    kind, _, sizes = SIZES.get(name, name).partition("?")
    if kind in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[kind], _fields(sizes)
    known = (f"{PREFIX}{kind}" for kind in (*SIZES, *transformers.CONFIG_MAPPING))
    hint = suggestion(f"{PREFIX}{name}", known, cutoff=0.75)  # the prefix is alike in all
    raise TargetError(
        f"{request}: there is no such folder, and neither a type that transformers knows nor a "
        f"model whose sizes placer knows has this name{hint or ';'} {_known()}; for "
        f"another model {OWN_FUNCTION}"
    )


def _maker_of_file(transformers: Any, request: Request, path: Path) -> Callable[..., Any]:
    """Return a factory for the configuration in a file or folder, by a class of transformers."""
    try:
        content = read_config(path)
    except OSError as error:
        raise TargetError(f"{request}: {file_error_message(error)}") from error
    except ValueError as error:
        raise TargetError(f"{request}: {error}") from error
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise TargetError(
            f"{request}: transformers does not know its model_type {kind!a}, and code "
            f"in a folder is not run; {OWN_FUNCTION}"
        )
    if quantization := quantization_method(content):
        raise TargetError(
            f"{request}: its weights are quantized ({quantization}), and quantized weights cannot "
            "be placed; to place the model in full precision, remove quantization_config from "
            f"{CONFIG_NAME}"
        )
    from_dict = transformers.CONFIG_MAPPING[kind].from_dict
    return lambda **fields: from_dict(copy.deepcopy(content), **fields)


def _known() -> str:
    return f"known sizes: {', '.join(SIZES)}"


NOT_LISTED: Final = ("num_labels", "image_size", "attn_implementation", "experts_implementation")
"""Fields that every configuration accepts but may not list."""


def _check_fields(config: Any, request: Request) -> None:
    try:
        check_harmless(request.fields)
    except ValueError as error:
        raise TargetError(f"{request}: {error}") from error
    listed = {*config.to_dict(), *config.attribute_map, *NOT_LISTED} - OF_LOADING
    known = {name for name in listed if not name.startswith("_")}
    for name in request.fields:
        if name not in known:
            hint = suggestion(name, ["batch", "sequence", *known])
            hint = f"; {OWN_FUNCTION}" if name in OF_LOADING else hint
            raise TargetError(f"{request} has no field {name!r}{hint}")


def _head(transformers: Any, config: Any, request: Request) -> Any:
    for mapping, head in HEADS:
        if type(config) in getattr(transformers, mapping):
            return getattr(transformers, head)
    raise TargetError(
        f"{request}: transformers has no model of language, speech or images for "
        f"{type(config).__name__}; {OWN_FUNCTION}"
    )


def _check_memory(model: nn.Module, request: Request, training: bool) -> None:
    """Refuse a model (on the meta device) whose weights and gradients would not fit."""
    needed = sum(p.numel() * p.element_size() for p in model.parameters()) * (1 + training)
    free = available_memory_bytes()
    if needed > free:
        raise TargetError(
            f"{request} needs {needed / 1e9:.1f} GB for its weights"
            f"{' and their gradients' if training else ''}, but {free / 1e9:.1f} GB are free here; "
            f"make it smaller, such as with ?num_hidden_layers=2"
        )


def _fields(query: str) -> dict[str, Any]:
    """Parse fields, whose values are JSON or else plain strings; ValueError if malformed."""
    fields: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
        try:
            fields[key] = parse_json(text, lambda content: content)
        except ValueError:
            fields[key] = text
    return fields


@contextmanager
def _refusing(request: Request) -> Iterator[None]:
    """Convert errors of transformers to TargetError with their message."""
    try:
        yield
    except TargetError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise TargetError(f"{request}: there is too little memory") from error
        reason = brief(str(error)) or type(error).__name__
        raise TargetError(f"{request}: transformers refuses it: {reason}") from error


@contextmanager
def _few_parts(request: Request) -> Iterator[None]:
    """Raise TargetError if too many modules and parameters are created, for whatever reason."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_PARTS:
            raise TargetError(
                f"{request} has more than {MOST_PARTS} modules and parameters; make "
                "it smaller, such as with ?num_hidden_layers=2"
            )

    with (
        register_module_module_registration_hook(counted),
        register_module_parameter_registration_hook(counted),
    ):
        yield


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Suppress the messages of transformers for every model it creates."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
