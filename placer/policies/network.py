"""Trained policies: a small network in numpy, stored as safetensors with a JSON card."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

from graphs.files import read_limited, write_whole
from graphs.strict_json import brief, load_checked, table, within
from graphs.text import suggestion
from placer.policies.summary import FEATURES, summarise
from placer.search.candidate import Candidate
from placer.search.evaluator import Evaluator
from placer.search.list_scheduler.decoder import HEFT, WEIGHT_COUNT

GENERALIST: Final = "generalist"
"""The default policy."""
FORMAT: Final = "placer-policy/4"
ACTION_SCALE: Final = 2.0
"""Decoder weights are those of HEFT + ACTION_SCALE * action, actions within -1 .. 1."""
FARTHEST: Final = 2.0
"""Normalised features are clipped to -FARTHEST .. FARTHEST."""
DECIMALS: Final = 6
"""Weights are rounded, so that the last bit of a linear algebra library does not matter."""
WEIGHTS: Final = ".safetensors"
CARD: Final = ".json"
"""Suffixes of the two files of a policy; its name itself may contain dots."""
LARGEST_FILE_BYTES: Final = 10**8
"""Maximum size of the weights; the shipped ones have 0.1 MB."""
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "feature_mean": (-1e6, 1e6),
    "feature_deviation": (1e-7, 1e6),
    "log_std": (-13.0, 3.0),  # from the smallest deviation that survives rounding
    "layers": (-1e6, 1e6),
}
"""Allowed ranges of tensor values, by the first part of their names."""
_SHARED: Final = ("feature_mean", "feature_deviation")
_ANY_FORMAT: Final = re.compile(r"placer-policy/\d{1,9}")
_OTHERS: Final = "others."
_OTHER_KEY: Final = re.compile(r"others\.(\d+)\.([a-z].*)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """Maps the summary of a problem to decoder weights.

    ``layers`` are (out, in) matrices with biases (out,), with tanh between them and none at the
    end. ``others`` are policies of other training seeds, the most helpful first; search uses them,
    too.
    """

    name: str
    card: Mapping[str, Any]
    feature_mean: NDArray[np.float32]  # (F,) of FEATURES
    feature_deviation: NDArray[np.float32]  # (F,) of FEATURES
    layers: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]
    log_std: NDArray[np.float32]  # (K,) of actions, K being WEIGHT_COUNT
    others: tuple[Policy, ...] = ()

    def propose(
        self, evaluator: Evaluator, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return means (M, K) and standard deviations (M, K) of weights for a problem.

        The first of M is this policy's own proposal, the rest are those of the others. ``known``
        are the candidates of :func:`placer.search.heuristics.heuristics`.
        """
        return self.proposals(summarise(evaluator, known))

    def proposals(
        self, summary: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the means and standard deviations of :meth:`propose` for a summary (F,)."""
        own = [policy.weights(summary) for policy in (self, *self.others)]
        return np.stack([mean for mean, _ in own]), np.stack([spread for _, spread in own])

    def weights(
        self, summary: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean (K,) and standard deviation (K,) of this policy alone."""
        x = normalised(summary, self.feature_mean, self.feature_deviation)
        for number, (matrix, bias) in enumerate(self.layers):
            x = np.asarray(matrix @ x + bias)
            if number + 1 < len(self.layers):
                x = np.tanh(x)
        mean = HEFT + ACTION_SCALE * np.clip(x.astype(np.float64), -1.0, 1.0)
        deviation = ACTION_SCALE * np.exp(self.log_std.astype(np.float64))
        return mean.round(DECIMALS), deviation.round(DECIMALS)

    def save(self, path: Path) -> None:
        """Write ``path``.safetensors and ``path``.json, each completely or not at all.

        Raises:
            OSError: they cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file_of(path, WEIGHTS), save(self.tensors()))
        write_card(path, self.card)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return all tensors by name, the inverse of :meth:`of`."""
        tensors = {
            "feature_mean": self.feature_mean,
            "feature_deviation": self.feature_deviation,
            "log_std": self.log_std,
        }
        for number, (matrix, bias) in enumerate(self.layers):
            tensors[f"layers.{number}.weight"] = np.ascontiguousarray(matrix)
            tensors[f"layers.{number}.bias"] = bias
        for number, other in enumerate(self.others):
            own = other.tensors()
            tensors |= {f"{_OTHERS}{number}.{k}": v for k, v in own.items() if k not in _SHARED}
        return tensors

    @classmethod
    def of(cls, name: str, card: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Policy:
        """Create a policy from its tensors.

        Raises:
            ValueError: a tensor is missing, has another shape or type, or values out of range.
        """
        shared = {key: value for key, value in tensors.items() if key in _SHARED}
        groups: dict[int, dict[str, NDArray[Any]]] = {}
        for key, value in tensors.items():
            if match := _OTHER_KEY.fullmatch(key):
                groups.setdefault(int(match[1]), dict(shared))[match[2]] = value
        depth = sum(key.startswith("layers.") for key in tensors) // 2
        if not depth:
            raise ValueError("there are no layers, such as layers.0.weight with layers.0.bias")
        for key, shape in _shapes(tensors, depth).items():
            if key not in tensors:
                raise ValueError(f"there is no {key}")
            _check_tensor(key, tensors[key], shape)
        return cls(
            name=name,
            card=card,
            feature_mean=tensors["feature_mean"],
            feature_deviation=tensors["feature_deviation"],
            layers=tuple(
                (tensors[f"layers.{number}.weight"], tensors[f"layers.{number}.bias"])
                for number in range(depth)
            ),
            log_std=tensors["log_std"],
            others=tuple(cls.of(name, {}, groups[number]) for number in sorted(groups)),
        )


def normalised(
    summary: NDArray[np.float64], mean: NDArray[np.float32], deviation: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return summaries (..., F) in units of the training pool's standard deviations, clipped."""
    return np.asarray(np.clip((summary - mean) / deviation, -FARTHEST, FARTHEST), np.float32)


def names() -> tuple[str, ...]:
    """Return the names of the shipped policies."""
    return tuple(sorted(path.stem for path in shipped().glob(f"*{WEIGHTS}")))


def load(name: str) -> Policy:
    """Load a shipped policy by name, or any policy by its path, with or without suffix."""
    path = path_of(name)
    tensors_path, card_path = file_of(path, WEIGHTS), file_of(path, CARD)
    try:
        card = load_checked(card_path, partial(_card, path=path))
        tensors = _tensors(tensors_path)
    except OSError as error:
        raise ValueError(f"{path}: not a policy: {error}") from error
    try:
        return Policy.of(path.name, card, tensors)
    except ValueError as error:
        raise ValueError(f"{tensors_path}: {brief(str(error))}") from error


def _card(content: object, path: Path) -> dict[str, Any]:
    card = table(content, "")
    if (given := card.get("format")) != FORMAT:
        if not isinstance(given, str) or not _ANY_FORMAT.fullmatch(given):
            raise ValueError(f"the format is not {FORMAT!r}: not the card of a policy")
        config = path.with_name(f"{path.name}.toml")
        shown = config if config.is_file() else "CONFIG.toml"
        raise ValueError(
            f"the format is not {FORMAT!r} but {given!r}, of another version of placer; train the "
            f"policy anew: placer train --config {shown} --out {path}"
        )
    table(card.get("evaluations", {}), "evaluations")
    return card


def _tensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        return load_tensors(read_limited(path, LARGEST_FILE_BYTES))
    except (AttributeError, KeyError, TypeError):  # numpy has no such type
        raise ValueError(f"{path}: tensors of a policy are of dtype float32") from None
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{path}: not a policy: {brief(str(error))}") from error


def path_of(name: str) -> Path:
    """Return the path without suffix of a shipped policy, or of any policy given by its path."""
    path = shipped() / name if name in names() else Path(name)
    path = path.with_suffix("") if path.suffix in (WEIGHTS, CARD) else path
    tensors_path = file_of(path, WEIGHTS)
    if not tensors_path.is_file():
        hint = suggestion(name, names())
        raise ValueError(
            f"there is no policy {name!r}: {', '.join(names()) or 'none'} ship with placer, and "
            f"{tensors_path} does not exist{hint}"
        )
    return path


def file_of(path: Path, ending: str) -> Path:
    """Return the file of a policy with this suffix."""
    return path.parent / f"{path.name}{ending}"


def write_card(path: Path, card: Mapping[str, Any]) -> None:
    """Write ``path``.json."""
    write_whole(file_of(path, CARD), json.dumps(card, indent=1) + "\n")


def _check_tensor(key: str, tensor: NDArray[Any], shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != np.float32:
        raise ValueError(f"{key} is {tensor.dtype} of shape {tensor.shape}, not float32 of {shape}")
    for value in (float(tensor.min()), float(tensor.max())):
        within(value, *RANGES[key.partition(".")[0]], f"a number of {key}")


def _shapes(tensors: Mapping[str, NDArray[Any]], depth: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "feature_mean": (len(FEATURES),),
        "feature_deviation": (len(FEATURES),),
        "log_std": (WEIGHT_COUNT,),
    }
    size = len(FEATURES)
    for number in range(depth):
        bias = tensors.get(f"layers.{number}.bias")
        last = number + 1 == depth or bias is None or bias.ndim != 1
        out = WEIGHT_COUNT if last or bias is None else len(bias)
        shapes[f"layers.{number}.weight"] = (out, size)
        shapes[f"layers.{number}.bias"] = (out,)
        size = out
    return shapes


def shipped() -> Path:
    """Return the folder of shipped policies: in an installed package, else beside the sources."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "trained_policies"
    return inside if inside.is_dir() else package.parent / "trained_policies"
