"""Reads of values while torch traces a model on tensors that have none.

Torch.export cannot read values. Those that no data decides are known. A check that holds is the
same as no check, so that its reads can be answered by what they returned when the model ran on the
example inputs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.utils import rnn

from graphs.extract.errors import is_skipped, running_line
from graphs.extract.reads.checks import Check, is_decided, running_check
from graphs.extract.reads.known_values import computing, drawn_from, known_value_of
from graphs.extract.reads.value_reads import PACK
from graphs.workload import ExtractionError

METHODS: Final = (
    *("__bool__", "__float__", "__format__", "__index__", "__int__", "allclose", "equal"),
    *("is_nonzero", "item", "tolist"),
)
"""Ways in which Python reads values, as methods of a tensor ..."""
READING: Final = frozenset(METHODS) - {"allclose", "equal"}
"""... of those the ones that read no other tensor ..."""
FUNCTIONS: Final = (
    *("_check", "_check_index", "_check_is_size", "_check_not_implemented", "_check_tensor_all"),
    *("_check_tensor_all_with", "_check_type", "_check_value", "_check_with"),
    *("allclose", "equal", "is_nonzero"),
)
"""... and as functions of torch, some of which check numbers that a trace has no values for."""

TRACED: Final = (FakeTensor, FunctionalTensor)
"""Classes of tensors while torch traces, which may read values in their own ways."""


class CheckReads:
    """Reads of values by the checks of a model, and what they returned.

    First a trace is watched: :meth:`watched` notes ``lines`` of checks that it meets. If there are
    any, the model runs under :meth:`kept`, and another trace is :meth:`answered`.
    """

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}
        self._values: defaultdict[tuple[Any, ...], deque[Any]] = defaultdict(deque)

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Note the checks that are met, and let them read."""
        return _intercepted(self._note, traces=True)

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """Keep what the checks read."""
        return _intercepted(self._keep)

    def answered(self) -> contextlib.AbstractContextManager[None]:
        """Let the checks read what was kept, in the same order at each place."""
        return _intercepted(self._answer, traces=True)

    def _note(self, check: Check, way: str, read: Callable[[], Any]) -> Any:
        del way
        self.lines[check.line] = None
        return read()

    def _keep(self, check: Check, way: str, read: Callable[[], Any]) -> Any:
        value = read()
        self._values[*check.place, way].append(value)
        return value

    def _answer(self, check: Check, way: str, read: Callable[[], Any]) -> Any:
        self.lines[check.line] = None
        if check.holds:
            return True
        values = self._values.get((*check.place, way))
        if not values:
            return read()
        return values.popleft() if len(values) > 1 else values[0]


@contextlib.contextmanager
def _intercepted(
    handle: Callable[[Check, str, Callable[[], Any]], Any], *, traces: bool = False
) -> Iterator[None]:
    """Let ``handle`` return what reads of checks return.

    Reads of values that are known return them; all others stay as they are. A model that goes on
    after one of these failed because torch ``traces`` it took another way than it would; and torch
    takes the sizes of packed sequences from their example.

    Raises:
        ExtractionError: a read failed, or sequences were packed, and the model went on.
    """
    failed: dict[str, None] = {}
    packed: dict[str, None] = {}

    def reading(original: Callable[..., Any], way: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(original, *args, **kwargs)
            if way.startswith("_check") and is_skipped(sys._getframe(1)):
                return compute()  # torch checks its own
            known = known_value_of(args[0]) if way in READING and args else None
            if known is not None:
                with computing():
                    return getattr(known, way)(*args[1:], **kwargs)
            drawn = drawn_from(args[0]) if way in READING and args else None
            if drawn is not None and is_decided(drawn):
                return drawn.low
            check = running_check()
            if check is not None:
                return handle(check, way, compute)
            try:
                return compute()
            except Exception:
                failed[running_line()] = None
                raise

        return read

    def packing(*args: Any) -> Any:
        packed[running_line()] = None
        return pack(*args)

    kernels: Any = rnn._VF  # type: ignore[attr-defined]  # where torch looks its own kernel up
    pack = getattr(kernels, PACK)

    # A mode for torch functions would do, but layers take other ways under one.
    with contextlib.ExitStack() as restored:
        own = [(kind, [n for n in METHODS if n in vars(kind)]) for kind in TRACED]
        for owner, names in ((torch.Tensor, METHODS), (torch, FUNCTIONS), *own):
            for name in names:
                if name in vars(owner):
                    restored.callback(setattr, owner, name, vars(owner)[name])
                else:
                    restored.callback(delattr, owner, name)
                setattr(owner, name, reading(getattr(owner, name), name))
        if traces:
            restored.callback(setattr, kernels, PACK, pack)
            setattr(kernels, PACK, packing)
        try:
            yield
        except Exception as error:
            if isinstance(error, ExtractionError) or not packed:
                raise
            raise ExtractionError(_no_lengths(packed)) from error
    if packed:
        raise ExtractionError(_no_lengths(packed))
    if traces and failed:
        raise ExtractionError(
            f"the model needs values of tensors ({', '.join(failed)}), which torch.export lacks, "
            "and goes on without them"
        )


def _no_lengths(lines: Iterable[str]) -> str:
    return (
        f"the model packs sequences ({', '.join(lines)}), whose lengths torch.export lacks; padded "
        "ones, masked after the layer, have no such limit"
    )
