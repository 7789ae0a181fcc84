"""A trained policy: a small network in numpy, read from safetensors beside a readable card."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save

from graphs.strict_json import brief, load_checked, table, within
from graphs.whole_file import read_limited, write_whole
from placer.policies.summary import FEATURES, summarise
from placer.search.candidate import Candidate
from placer.search.decoder import HEFT, WEIGHT_COUNT
from placer.search.judge import Judge

GENERALIST: Final = "generalist"
"""The policy that is taken where none is named."""
FORMAT: Final = "placer-policy/1"
SEQUENTIAL_FORMAT: Final = "placer-sequential-policy/1"
ACTION_SCALE: Final = 2.0
"""Decoder weights are those of HEFT + ACTION_SCALE * action, actions within -1 .. 1."""
FARTHEST: Final = 2.0
"""Normalised features are clipped to -FARTHEST .. FARTHEST."""
DECIMALS: Final = 6
"""Weights are rounded, so that the last bit of a linear algebra library does not matter."""
WEIGHTS: Final = ".safetensors"
CARD: Final = ".json"
"""Endings of the two files of a policy, whose own name may have dots."""
LARGEST_FILE_BYTES: Final = 10**8
"""Of weights; the shipped ones have 0.1 MB."""
RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "feature_mean": (-1e6, 1e6),
    "feature_deviation": (1e-7, 1e6),
    "log_std": (-13.0, 3.0),  # spreads of actions: from what is left when they are rounded
    "layers": (-1e6, 1e6),
}
"""What the numbers of tensors may be, by how their names begin."""
_SHARED: Final = ("feature_mean", "feature_deviation")
_OTHERS: Final = "others."
_OTHER_KEY: Final = re.compile(r"others\.(\d+)\.([a-z].*)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """Maps the summary of a problem to decoder weights.

    ``layers`` are (out, in) matrices with their biases (out,); tanh between them, none at the end.
    ``others`` are policies of other training seeds, the most helpful first: search asks them, too.
    """

    name: str
    card: Mapping[str, Any]
    feature_mean: NDArray[np.float32]  # (F,) of FEATURES
    feature_deviation: NDArray[np.float32]  # (F,) of FEATURES
    layers: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]
    log_std: NDArray[np.float32]  # (K,) of actions, K being WEIGHT_COUNT
    others: tuple[Policy, ...] = ()

    def propose(
        self, judge: Judge, known: list[Candidate]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means (M, K) and standard deviations (M, K) of the weights that suit a problem.

        The first of M is this policy's own proposal, the rest are those of the others. ``known``
        are the candidates of :func:`placer.search.heuristics.heuristics`.
        """
        return self.proposals(summarise(judge, known))

    def proposals(
        self, summary: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The same from the summary (F,)."""
        own = [policy.weights(summary) for policy in (self, *self.others)]
        return np.stack([mean for mean, _ in own]), np.stack([spread for _, spread in own])

    def weights(
        self, summary: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean (K,) and standard deviation (K,) of this policy alone."""
        x = normalised(summary, self.feature_mean, self.feature_deviation)
        for number, (matrix, bias) in enumerate(self.layers):
            x = np.asarray(matrix @ x + bias)
            if number + 1 < len(self.layers):
                x = np.tanh(x)
        mean = HEFT + ACTION_SCALE * np.clip(x.astype(np.float64), -1.0, 1.0)
        deviation = ACTION_SCALE * np.exp(self.log_std.astype(np.float64))
        return mean.round(DECIMALS), deviation.round(DECIMALS)

    def save(self, path: Path) -> None:
        """Write ``path``.safetensors and ``path``.json; each is complete or absent.

        Raises:
            OSError: they cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file_of(path, WEIGHTS), save(self.tensors()))
        write_card(path, self.card)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """What it consists of, by name; :meth:`of` makes it again."""
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
        """The policy that consists of these.

        Raises:
            ValueError: one is missing, of another shape or type, or has numbers out of range.
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
    """Summaries (..., F) in units of the training pool's standard deviations, clipped."""
    return np.asarray(np.clip((summary - mean) / deviation, -FARTHEST, FARTHEST), np.float32)


def names() -> tuple[str, ...]:
    """The policies that ship with this project."""
    return tuple(sorted(path.stem for path in shipped().glob(f"*{WEIGHTS}")))


def load(name: str) -> Policy:
    """A shipped policy by name, or one of your own by its path, with or without ending.

    Raises:
        ValueError: there is no such policy (the message lists those there are), or its files are
            not those of a policy of this version.
    """
    path = path_of(name)
    tensors_path, card_path = file_of(path, WEIGHTS), file_of(path, CARD)
    try:
        card = load_checked(card_path, _card)
        tensors = _tensors(tensors_path)
    except OSError as error:
        raise ValueError(f"{path}: not a policy: {error}") from error
    try:
        return Policy.of(path.name, card, tensors)
    except ValueError as error:
        raise ValueError(f"{tensors_path}: {brief(str(error))}") from error


def _card(content: object) -> dict[str, Any]:
    card = table(content, "")
    if card.get("format") == SEQUENTIAL_FORMAT:
        raise ValueError("this policy chooses devices op by op: it proposes no decoder weights")
    if card.get("format") != FORMAT:
        raise ValueError(f"the format is not {FORMAT!r}; train the policy again")
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
    """Where a policy is, without ending: a shipped one by name, or one of your own by its path.

    Raises:
        ValueError: there is no such policy; the message lists those there are.
    """
    path = shipped() / name if name in names() else Path(name)
    path = path.with_suffix("") if path.suffix in (WEIGHTS, CARD) else path
    tensors_path = file_of(path, WEIGHTS)
    if not tensors_path.is_file():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"there is no policy {name!r}: {', '.join(names()) or 'none'} ship with placer, and "
            f"{tensors_path} does not exist{hint}"
        )
    return path


def file_of(path: Path, ending: str) -> Path:
    """The file with an ending of the policy at a path without one."""
    return path.parent / f"{path.name}{ending}"


def write_card(path: Path, card: Mapping[str, Any]) -> None:
    """Write ``path``.json.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(file_of(path, CARD), json.dumps(card, indent=1) + "\n")


def _check_tensor(key: str, tensor: NDArray[Any], shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.dtype != np.float32:
        raise ValueError(f"{key} is {tensor.dtype} of shape {tensor.shape}, not float32 of {shape}")
    for value in (float(tensor.min()), float(tensor.max())):
        within(value, *RANGES[key.partition(".")[0]], f"a number of {key}")


def _shapes(tensors: Mapping[str, NDArray[Any]], depth: int) -> dict[str, tuple[int, ...]]:
    """What shapes the tensors of a policy must have."""
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
    """Where the shipped policies are: inside an installed package, else beside the sources."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "trained_policies"
    return inside if inside.is_dir() else package.parent / "trained_policies"
