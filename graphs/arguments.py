"""The forms in which example inputs and batches are given, and how they are bound to a model.

Inputs are a tensor, a tuple or list of arguments, a dict of keywords, or ``(args, kwargs)``, a
tuple and a dict. The target of a loss function is named (``target=``), is the entry of the keywords
that the model does not take, or is the last argument. Everything else works with the bound form:
positional inputs, the target at their end, and keywords.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import keystr

from graphs.inputs import contexts, leaves_with_paths

TARGET: Final = "target"
"""Name of the target among keywords, unless ``forward`` has a parameter of this name."""


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional arguments and keywords that inputs stand for.

    >>> arguments(1), arguments([1, 2]), arguments({"x": 1}), arguments(((1,), {"mask": 2}))
    (((1,), {}), ((1, 2), {}), ((), {'x': 1}), ((1,), {'mask': 2}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if not isinstance(inputs, tuple | list) or isinstance(inputs, PackedSequence):
        return (inputs,), {}
    if isinstance(inputs, tuple) and len(inputs) == 2:
        positional, keywords = inputs
        if isinstance(positional, tuple) and isinstance(keywords, Mapping):
            return positional, dict(keywords)
    return tuple(inputs), {}


def target_names(model: nn.Module, keywords: Iterable[str], *, alone: bool) -> list[str]:
    """Return the keywords that can be the target: those that ``forward`` has no parameter for.

    A ``forward`` with ``**kwargs`` takes those, too, but not ``target``; without it, and with no
    positional inputs (``alone``), one that is named by no parameter is the target.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unnamed = [name for name in keywords if name not in named]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        if TARGET in unnamed:
            return [TARGET]
        return unnamed if alone else []
    return unnamed


def without_target(
    model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any], new: Iterable[str]
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """Move the target from the keywords to the end of the inputs, if just one can be it.

    Only the keywords in ``new`` are considered. The third result are those that could be it.
    """
    named = dict(keywords)
    names = target_names(model, new, alone=not inputs)
    if len(names) == 1:
        return (*inputs, named.pop(names[0])), named, names
    return tuple(inputs), named, names


def rearranged(
    model: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    count: int,
    names: Collection[str],
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the same call with ``count`` positional arguments and the rest as keywords.

    Where other keywords than ``names`` would remain, the call is returned as it is.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = {**dict(zip(positional, inputs, strict=False)), **keywords}
    first = [p.name for p in parameters[:count]]
    is_whole = len(by_name) == len(inputs) + len(keywords)  # no argument is left out, or twice
    if is_whole and first == positional[:count] and by_name.keys() == {*first, *names}:
        return tuple(by_name[name] for name in first), {name: by_name[name] for name in names}
    return inputs, keywords


def leaves_by_path(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return every leaf of a batch by its path, such as ``[0]`` or ``['mask']``."""
    positional = {keystr(path): leaf for path, leaf in leaves_with_paths(tuple(inputs))}
    named = {keystr(path): leaf for path, leaf in leaves_with_paths(dict(keywords))}
    return positional | named


def contexts_by_name(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> dict[Any, list[Any]]:
    """Return what registered classes of a batch keep beside their parts, by position or keyword."""
    return contexts({**dict(enumerate(inputs)), **keywords})
