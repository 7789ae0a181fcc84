"""Forward passes that read values of tensors: in checks, which steer nothing, and otherwise.

They are no test module, since pytest rewrites the assert statements of those.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

logger = logging.getLogger(__name__)

# --- reads that only check or report; x holds positive numbers


def raising(m: Any, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("x is not finite")
    return relu(m.linear(x))


def warning(m: Any, x: Tensor) -> Tensor:
    if (x == 0).any():
        warnings.warn("x has zeros", stacklevel=2)
    return relu(m.linear(x))


def warned(m: Any, x: Tensor) -> Tensor:
    if (x > 0).any():
        share = (x > 0).float().mean().item()
        text = f"x has {share:.0%} positive numbers"
        text += f", at most {x.max():.2f}"
        logger.warning(text)
    return relu(m.linear(x))


def asserting(m: Any, x: Tensor) -> Tensor:
    assert (x >= 0).all(), f"the least is {x.min().item()}"
    return relu(m.linear(x))


def checking(m: Any, x: Tensor) -> Tensor:
    torch._check(bool((x >= 0).all()), lambda: f"the least is {x.min()}")  # type: ignore[no-untyped-call]  # torch's own
    return relu(m.linear(x))


def checking_all(m: Any, x: Tensor) -> Tensor:
    torch._check_tensor_all(x >= 0)  # type: ignore[no-untyped-call]  # torch's own
    return relu(m.linear(x))


def checking_a_number(m: Any, x: Tensor) -> Tensor:
    torch._check((x >= 0).sum().item() == x.numel())  # type: ignore[no-untyped-call]  # torch's own
    return relu(m.linear(x))


def checking_a_size(m: Any, x: Tensor) -> Tensor:
    torch._check(x[x >= 0].numel() == x.numel())  # type: ignore[no-untyped-call]  # torch's own
    return relu(m.linear(x))


def comparing(m: Any, x: Tensor) -> Tensor:
    if x.min().item() < 0 or not math.isfinite(float(x.max())):
        raise ValueError("x is out of range")
    return relu(m.linear(x))


def comparing_all(m: Any, x: Tensor) -> Tensor:
    if any(row.isnan().any() for row in x) or not torch.equal(x, x.abs()):
        raise ValueError("x is out of range")
    return relu(m.linear(x))


def listing(m: Any, x: Tensor) -> Tensor:
    if x[0].tolist()[0] < 0 or int(x.sum()) < 0 or f"{x[0, 0]:.1f}" == "nan":
        raise ValueError("x is out of range")
    return relu(m.linear(x))


def searching(m: Any, x: Tensor) -> Tensor:
    if -1.0 in x[:, [0, -1]]:
        logger.warning("x has padding")
    return relu(m.linear(x))


def printing(m: Any, x: Tensor) -> Tensor:
    logger.info(f"mean {x.mean().item():.2f}")
    return relu(m.linear(x))


def helped(m: Any, x: Tensor) -> Tensor:
    _check_positive(x)
    with torch.no_grad():
        _check_positive(x + 1)
    return relu(m.linear(x))


def _check_positive(x: Tensor) -> None:
    for row in x:
        if (row < 0).any():
            raise ValueError("a row has negative numbers")


def reraising(m: Any, x: Tensor) -> Tensor:
    try:
        _check_positive(x)
    except ValueError as error:
        raise RuntimeError("x is bad") from error
    return relu(m.linear(x))


def checking_by_transformers(m: Any, x: Tensor) -> Tensor:
    from transformers.utils.import_utils import torch_compilable_check

    torch_compilable_check(x >= 0, f"the least is {x.min()}")
    torch_compilable_check(x[x >= 0].numel() == x.numel(), lambda: f"the least is {x.min()}")
    return relu(m.linear(x))


def warning_by_transformers(m: Any, x: Tensor) -> Tensor:
    from transformers import PreTrainedModel

    m.config = SimpleNamespace(pad_token_id=0, bos_token_id=1, eos_token_id=0)
    warn: Any = PreTrainedModel.warn_if_padding_and_no_attention_mask
    warn(m, x.long(), None)
    return relu(m.linear(x))


CHECKS = (
    *(raising, warning, warned, asserting, checking, checking_all, checking_a_number),
    *(checking_a_size, comparing, comparing_all, listing, searching, printing, helped, reraising),
)

# --- reads that steer


def choosing(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    if x.sum() > 0:
        y = y * 2
    return relu(y)


def clamping(m: Any, x: Tensor) -> Tensor:
    if (x > 1).any():
        x = x.clamp(max=1)
    return relu(m.linear(x))


def returning(m: Any, x: Tensor) -> Tensor:
    if (x > 1).any():
        y: Tensor = m.linear(x)
        return y
    return relu(m.linear(x))


def otherwise(m: Any, x: Tensor) -> Tensor:
    if (x < 0).any():
        logger.warning("x has negative numbers")
    else:
        x = x + 1
    return relu(m.linear(x))


def chained(m: Any, x: Tensor) -> Tensor:
    if (x < 0).any():
        logger.warning("negative")
    elif (x > 1).any():
        x = x + 1
    return relu(m.linear(x))


def looping(m: Any, x: Tensor) -> Tensor:
    while (x > 1).any():
        x = x / 2
    return relu(m.linear(x))


def ending_a_loop(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        if (x < 1).all():
            logger.info("done")
            break
        x = x / 2
    return relu(m.linear(x))


def _has_large(x: Tensor) -> bool:
    return bool((x > 1).any())


def asking_a_helper(m: Any, x: Tensor) -> Tensor:
    if _has_large(x):
        x = x / 2
    return relu(m.linear(x))


def checking_by_a_helper(m: Any, x: Tensor) -> Tensor:
    large = _has_large(x)
    if large and x.numel() < 0:
        raise ValueError("x is large")
    return relu(m.linear(x)) * (2 if large else 1)


def naming(m: Any, x: Tensor) -> Tensor:
    if (most := x.max().item()) < 0:
        raise ValueError(f"at most {most}")
    return relu(m.linear(x)) * most


def keeping_a_text(m: Any, x: Tensor) -> Tensor:
    factor = 1
    if (x > 1).any():
        factor = 2
        logger.warning("large")
    return relu(m.linear(x)) * factor


def telling_itself(m: Any, x: Tensor) -> Tensor:
    if (x > 1).any():
        m.large = True
    return relu(m.linear(x)) * (2 if getattr(m, "large", False) else 1)


def _noted(numbers: list[float], number: float) -> bool:
    numbers.append(number)
    return number < 0


def handing_on(m: Any, x: Tensor) -> Tensor:
    numbers: list[float] = []
    if _noted(numbers, x.max().item()):
        raise ValueError("negative")
    return relu(m.linear(x)) * numbers[0]


def shortcut(m: Any, x: Tensor) -> Tensor:
    numbers: list[float] = []
    if (x > 1).any() and _noted(numbers, 1.0):
        raise ValueError("never")
    return relu(m.linear(x)) * (len(numbers) + 1)


def adding(m: Any, x: Tensor) -> Tensor:
    found: set[int] = set()
    if (x > 1).any() and found.add(1):  # type: ignore[func-returns-value]
        raise ValueError("never")
    return relu(m.linear(x)) * (len(found) + 1)


def catching(m: Any, x: Tensor) -> Tensor:
    try:
        if (x > 1).any():
            raise ValueError("x is large")
    except ValueError:
        x = x / 2
    return relu(m.linear(x))


def catching_outside(m: Any, x: Tensor) -> Tensor:
    try:
        _check_small(x)
    except ValueError:
        x = x / 2
    return relu(m.linear(x))


def _check_small(x: Tensor) -> None:
    if (x > 1).any():
        raise ValueError("x is large")


def suppressing(m: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        _check_small(x)
        x = x * 2
    return relu(m.linear(x))


def selecting(m: Any, x: Tensor) -> Tensor:
    return relu(m.linear(x)) if (x > 1).any() else m.linear(x)


def in_place(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    if (x > 1).any() and x.mul_(2).sum() < 0:
        raise ValueError("negative")
    return relu(m.linear(x))


STEERING = (
    *(choosing, clamping, returning, otherwise, chained, looping, ending_a_loop, asking_a_helper),
    *(checking_by_a_helper, naming, keeping_a_text, telling_itself, handing_on, shortcut, adding),
    *(catching, catching_outside, suppressing, selecting, in_place),
)
