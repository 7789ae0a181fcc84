"""Writes of hooked modules into their inputs, on one device and on two."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.extracted_steps import placed_at, two_linear
from tests.helpers.tiny_models import Plain
from tests.helpers.trained_alike import assert_trains_alike

# --- lists and dicts


class Cached(nn.Module):
    """Keeps keys as a decoder does: extends the previous ones and stores its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: dict[str, Any], at: int) -> dict[str, Any]:
        cache["seen"] = cache["seen"] + x.detach().mean(0)
        cache["keys"][at] = [self.linear(x), x]
        cache["all"].append((x, {"sum": x.sum(), "kept": cache["scale"]}))
        cache.pop("old", None)
        return cache


def keeps_a_nested_cache(m: Any, x: Tensor) -> Tensor:
    scale = torch.ones(4) * 2
    cache: dict[str, Any] = {"seen": torch.zeros(4), "old": torch.ones(1), "scale": scale}
    cache |= {"keys": defaultdict(list), "all": []}
    keys, kept = cache["keys"], cache["all"]
    for at in range(3):
        assert m.inner(x, cache=cache, at=at) is cache
        x = m.first(x + sum(keys[at]))
    assert (cache["keys"], cache["all"]) == (keys, kept)
    assert "old" not in cache
    assert cache["scale"] is kept[1][1]["kept"] is scale
    scale.add_(1)
    total = sum(key + value for key, value in keys.values()) * kept[1][1]["kept"]
    out: Tensor = m.second(x) + total + cache["seen"] + kept[-1][0] + kept[0][1]["sum"]
    return out


class Reordered(nn.Module):
    """Removes, moves and overwrites entries, some of them in place."""

    def forward(self, parts: OrderedDict[str, Tensor], rows: list[list[Tensor]]) -> Tensor:
        parts.move_to_end("a")
        parts["b"].mul_(2)
        parts["c"] = parts.pop("d") + 1
        taken = rows.pop(0)
        rows.reverse()
        rows[0][0] = rows[0][0] * 3
        return taken[0]


def reorders(m: Any, x: Tensor) -> Tensor:
    h = m.first(x) * 1
    parts = OrderedDict((name, h * i) for i, name in enumerate("abcd", 1))
    first, b = [h + 1], parts["b"]
    rows = [first, [h + 2], [h + 3, h]]
    taken = m.inner(parts, rows)
    assert taken is first[0]
    assert parts["b"] is b
    assert list(parts) == ["b", "c", "a"]
    every = torch.cat([*parts.values(), *(tensor for row in rows for tensor in row)])
    out: Tensor = m.second(every).mean(0) + taken + b
    return out


class Keeping(nn.Module):
    """Continues to use its own list after passing it to others."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, given: list[Tensor] | None = None) -> list[Tensor]:
        self.kept = [x * 2] if given is None else given
        self.kept.append(x)
        return self.kept


def shares_a_list_with_a_module(m: Any, x: Tensor) -> Tensor:
    given = [m.first(x)]
    assert m.inner(x, given) is given
    assert m.inner.kept is given
    assert len(m.inner(x)) == 2
    out: Tensor = m.second(given[0] + given[1])
    return out


CODES: list[tuple[Callable[..., Tensor], type[nn.Module]]] = [
    (keeps_a_nested_cache, Cached),
    (reorders, Reordered),
    (shares_a_list_with_a_module, Keeping),
]


@pytest.mark.slow_repeats
@pytest.mark.parametrize(("function", "inner"), CODES)
@pytest.mark.parametrize("where", [1, 2, 4, 6])
def test_what_a_module_puts_into_lists_and_dicts_is_there_for_its_caller(
    function: Callable[..., Tensor], inner: type[nn.Module], where: int, device: torch.device
) -> None:
    step = two_linear(function, inner=inner())
    paths = ("", "inner", "second")
    devices = {path: device if where >> i & 1 else "cpu" for i, path in enumerate(paths)}
    assert_trains_alike(*placed_at(step, devices))


def test_containers_without_anything_foreign_are_the_ones_that_were_given(
    device: torch.device,
) -> None:
    seen: list[Any] = []

    def noted(_: Any, *given: Any, **named: Any) -> Any:
        seen.extend([*given, *named.values()])
        return given[0]

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        given = ([h, 1], {"a": (h, None)}, (h, [h]))
        seen.clear()
        assert m.inner(*given[:2], named=given[2]) is given[0]
        assert all(one is own for one, own in zip(seen, given, strict=True))
        out: Tensor = m.second(given[0][0])
        return out

    step = two_linear(forward, inner=Plain(noted))
    for where in ("cpu", device):
        assert_trains_alike(*placed_at(step, {"": where, "inner": where, "second": "cpu"}))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_an_error_lists_hold_what_they_held(
    error: type[BaseException], device: torch.device
) -> None:
    raised: list[BaseException] = []
    before: list[Tensor] = []
    held: list[Tensor] = []

    def failing(_: Any, given: list[Tensor]) -> Tensor:
        if raised:
            raise raised.pop()
        return given[0]

    def forward(m: Any, x: Tensor) -> Tensor:
        held[:] = before[:] = [m.first(x)]
        out: Tensor = m.second(m.outer(held))
        return out

    outer = Plain(lambda m, given: m.inner(given), inner=Plain(failing))
    step = two_linear(forward, outer=outer)
    _, placed = placed_at(step, {"": "cpu", "outer": device, "outer.inner": "cpu"})
    raised.append(error())
    with pytest.raises(error):
        placed(*step.inputs)
    assert held[0] is before[0]
    assert_trains_alike(step, placed)


# --- undeclared writes of functions


def normed(m: Any, x: Tensor) -> Tensor:
    norm = m.norm
    stats = {"running_mean": norm.running_mean, "running_var": norm.running_var}
    h = F.batch_norm(
        m.first(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, m.training
    )
    by_keywords = F.batch_norm(x, **stats, training=True)
    found: Tensor = m.second(h) * norm.running_mean + by_keywords
    return found


def normed_one_by_one(m: Any, x: Tensor) -> Tensor:
    norm = m.norm
    h = m.first(x)[:, :, None].expand(-1, -1, 5) * torch.arange(5.0)
    found: Tensor = m.second(F.instance_norm(h, norm.running_mean, norm.running_var)[:, :, 0])
    return found


def renormed(m: Any, x: Tensor) -> Tensor:
    tokens = torch.arange(3)
    found: Tensor = m.second(F.embedding(tokens, m.first.weight, max_norm=0.1)) + m.first(x)
    return found


def sorted_out(m: Any, x: Tensor) -> Tensor:
    held = m.norm.running_mean.new_zeros(3)
    rank = torch.zeros(3, dtype=torch.int64)
    with torch.no_grad():
        found = torch.max(m.first(x), 1, out=(held, rank))
    assert found[0] is held
    assert found[1] is rank
    out: Tensor = m.second(x) * held[:, None] + rank[:, None]
    return out


@pytest.mark.slow_repeats
@pytest.mark.parametrize("where", [1, 2, 4, 6])
@pytest.mark.parametrize("function", [normed, normed_one_by_one, renormed, sorted_out])
def test_what_a_function_writes_into_foreign_tensors_is_theirs(
    function: Callable[..., Tensor], where: int, device: torch.device
) -> None:
    step = two_linear(function, norm=nn.BatchNorm1d(4))
    paths = ("", "first", "norm")
    devices = {path: device if where >> i & 1 else "cpu" for i, path in enumerate(paths)}
    assert_trains_alike(*placed_at(step, devices))
