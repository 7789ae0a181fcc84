"""Safety check of transformers configurations: none may fetch or run code or weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from graphs.strict_json import load_checked, table, within

CONFIG_NAME: Final = "config.json"
OWN_FUNCTION: Final = (
    "write a function that returns (model, inputs, loss) and give path/to/model.py:function"
)
OF_CODE: Final = frozenset({"auto_map", "code_revision", "custom_pipelines", "trust_remote_code"})
"""Keys by which a folder refers to its own classes."""
OF_LOADING: Final = OF_CODE | {
    *("allow_all_kernels", "cache_dir", "configuration_files", "device_map", "force_download"),
    *("from_tf", "gguf_file", "kernel_config", "local_files_only", "name_or_path", "proxies"),
    *("quantization_config", "resume_download", "return_unused_kwargs", "revision", "state_dict"),
    *("subfolder", "token", "use_auth_token", "use_kernels", "use_safetensors", "weights_only"),
}
"""Keywords of transformers' loading functions: not fields, though a configuration may list them."""
IMPLEMENTATION: Final = re.compile(r"_*\w*_implementation(_internal)?")
OF_WEIGHTS: Final = frozenset({"use_pretrained_backbone", "model_args"})
MOST_LAYERS: Final = 10_000
MOST_LABELS: Final = 100_000
"""Maximum number of labels: transformers creates a name for each, in Python."""
LONGEST: Final = 100_000
"""Maximum length of lists and tables."""
LARGEST_NUMBER: Final = 1 << 40
COUNTS: Final = re.compile(r"(.*_)?depths?|.*(blocks|block_sizes|blocks_per_stage|repeats)")
"""Keys of numbers of parts to create; lists of them are summed, lists of layers may be indices."""
OF_HUB: Final = frozenset({"architecture", "backbone"})


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration, of a file or folder, without references to the folder's own code."""
    file = path / CONFIG_NAME if path.is_dir() else path
    return load_checked(file, _harmless)


def quantization_method(content: Mapping[str, Any]) -> str:
    """Return how the weights of a configuration or a part of it are quantized, "" if they are not.

    >>> quantization_method({"text_config": {"quantization_config": {"quant_method": "gptq"}}})
    'gptq'
    """
    if given := content.get("quantization_config"):
        method = given.get("quant_method") if isinstance(given, Mapping) else None
        return method if isinstance(method, str) else "quantization_config"
    parts = (part for part in content.values() if isinstance(part, Mapping))
    return next(filter(None, map(quantization_method, parts)), "")


def _harmless(data: object) -> dict[str, Any]:
    content: dict[str, Any] = _without_code(table(data, ""))
    check_harmless(content)
    return content


def check_harmless(value: object, where: str = "") -> None:
    """Check that no value of a configuration refers to downloads or makes the model too large."""
    if isinstance(value, list | Mapping) and len(value) > LONGEST:
        raise ValueError(f"{where} has {len(value)} entries, more than {LONGEST}")
    key = where.rpartition(".")[2]
    if isinstance(value, int):
        is_count = COUNTS.fullmatch(key) or key.endswith(("layer", "layers"))
        most = MOST_LABELS if key == "num_labels" else LARGEST_NUMBER
        within(value, -LARGEST_NUMBER, MOST_LAYERS if is_count else most, where)
    elif isinstance(value, list):
        for item in value:
            check_harmless(item, where)
        counts = [item for item in value if isinstance(item, int)]
        if COUNTS.fullmatch(key) and sum(counts) > MOST_LAYERS:
            raise ValueError(f"{where} sums up to {sum(counts)}, more than {MOST_LAYERS}")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _check_entry(str(name), item, f"{where}.{name}" if where else str(name))


def _check_entry(key: str, item: object, where: str) -> None:
    if key in OF_CODE or re.fullmatch("__.*__", key):
        raise ValueError(f"{where} is no field of a model, and no code is loaded; {OWN_FUNCTION}")
    if IMPLEMENTATION.fullmatch(key):
        _check_implementation(item, where)
    if (key in OF_WEIGHTS and item) or (key in OF_HUB and set("/:") & set(str(item))):
        raise ValueError(
            f"{where} asks for weights or models from elsewhere, and nothing is downloaded; "
            f"{OWN_FUNCTION}"
        )
    check_harmless(item, where)


def _check_implementation(value: object, name: str) -> None:
    """Refuse names of kernels on the Hub, which transformers downloads and runs."""
    values = list(value.values()) if isinstance(value, Mapping) else [value]
    for text in values:
        if text is None:
            continue
        if not isinstance(text, str) or not re.fullmatch("[a-z0-9_]+", text):
            raise ValueError(
                f"{name} is {text!a}, which is no implementation in transformers itself"
            )
        if text.startswith("flash") and find_spec("flash_attn") is None:
            raise ValueError(f"{name} is {text}, which needs flash-attn, and that is not installed")


def _without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_code(item) for key, item in value.items() if key not in OF_CODE}
    return [_without_code(item) for item in value] if isinstance(value, list) else value
