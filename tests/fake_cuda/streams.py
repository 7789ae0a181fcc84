"""Streams as queues of work that run later, in an order as bad as CUDA allows.

CUDA promises that the work of a stream runs in order, that a stream that waits for an event runs
nothing before what the event marks is done, and that the host goes on after a synchronization when
what it waits for is done. Everything else is up to the seed: 0 runs the streams that torch
computes on as early as possible and all others as late as possible, 1 the other way round, and
others draw a pace for each stream.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

PACES: Final = (0.0, 0.3, 0.9)
"""Chances that a stream runs its next work before anything waits for it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The first ``count`` pieces of work of a stream."""

    stream: Stream
    count: int

    @property
    def is_done(self) -> bool:
        return self.stream.done >= self.count


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    run: Callable[[], object] | None
    after: Mark | None
    sleeps: bool = False
    poisons: bool = False


class Stream:
    """A queue of work of one device, with the methods of ``torch.cuda.Stream``."""

    def __init__(self, queues: Queues, device: torch.device, number: int) -> None:
        self.device = device
        self.number = number  # 0 is the one that torch computes on
        self.queues = queues
        self.pending: deque[_Work] = deque()
        self.done = 0

    def __repr__(self) -> str:
        return f"<stream {self.number} of {self.device}>"

    @property
    def end(self) -> Mark:
        """Everything issued so far."""
        return Mark(self, self.done + len(self.pending))

    @property
    def is_ready(self) -> bool:
        """Return whether the next piece of work may run."""
        return bool(self.pending) and (
            self.pending[0].after is None or self.pending[0].after.is_done
        )

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is left but to overwrite freed memory, which is no work."""
        return all(work.poisons for work in self.pending)

    @property
    def is_asleep(self) -> bool:
        """Return whether only a host that waits wakes the stream up."""
        return bool(self.pending) and self.pending[0].sleeps

    def wait_event(self, event: Event) -> None:
        if event.mark is not None and event.mark.stream is not self:
            self.queues.issue(self, None, after=event.mark)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.queues.finish(self.end)

    def query(self) -> bool:
        self.queues.pass_time()
        return self.end.is_done


class Event:
    """A point in a stream, with the methods of ``torch.cuda.Event``; unrecorded it marks nothing.

    ``stream`` is the current one if none is given; :mod:`tests.fake_cuda.machine` knows it.
    """

    def __init__(self) -> None:
        self.mark: Mark | None = None

    def record(self, stream: Stream) -> None:
        stream.queues.check(stream.device)
        self.mark = stream.end

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def query(self) -> bool:
        return self.mark is None or self.mark.is_done

    def synchronize(self) -> None:
        if self.mark is not None:
            self.mark.stream.queues.finish(self.mark)


class Queues:
    """All streams, and the seed's choice of what runs next."""

    def __init__(self, seed: int) -> None:
        self.streams: list[Stream] = []
        self.error = ""  # once work has failed, every call fails with it
        self.lost: dict[torch.device, str] = {}  # and their calls with these errors
        self.refuses_to_wait = False
        self._seed = seed
        self._random = random.Random(seed)
        self._pace: dict[Stream, float] = {}
        self._runs = False

    def new_stream(self, device: torch.device) -> Stream:
        number = sum(stream.device == device for stream in self.streams)
        stream = Stream(self, device, number)
        self.streams.append(stream)
        early = (number == 0) == (self._seed == 0)
        self._pace[stream] = float(early) if self._seed < 2 else self._random.choice(PACES)
        return stream

    def check(self, device: torch.device | None = None) -> None:
        """Raise the error of work that has failed, as every later call of CUDA does.

        Or that of a device that is lost.
        """
        if error := self.error or (self.lost.get(device, "") if device is not None else ""):
            raise torch.AcceleratorError(f"CUDA error: {error}\nSearch for `cudaError`")

    def lose(self, device: torch.device, error: str) -> None:
        """Let every later call of a device fail; what it had to do is over, and not done."""
        self.lost[device] = error
        for stream in self.streams:
            if stream.device == device:
                stream.done += len(stream.pending)
                stream.pending.clear()

    def fail(self, error: Exception) -> NoReturn:
        """Let this and every later call fail, as after an index that is out of range."""
        self.error = self.error or f"device-side assert triggered ({error})"
        raise torch.AcceleratorError(f"CUDA error: {self.error}") from error

    def issue(
        self,
        stream: Stream,
        run: Callable[[], object] | None,
        *,
        after: Mark | None = None,
        poisons: bool = False,
    ) -> None:
        """Add work to a stream; any work that may run by now may do so."""
        self.check(stream.device)
        stream.pending.append(_Work(run, after, poisons=poisons))
        self._run_early()

    def sleep(self, stream: Stream) -> None:
        """Let a stream do nothing until the host waits for it."""
        self.check(stream.device)
        stream.pending.append(_Work(None, None, sleeps=True))

    def finish(self, mark: Mark) -> None:
        """Let the host wait."""
        if self.refuses_to_wait:
            raise RuntimeError("called a synchronizing CUDA operation")
        while not mark.is_done and not self.error:
            before = self._streams_before(mark)
            ready = [s for s in self.streams if s in before and s.is_ready]  # a set has no order
            fastest = max(self._pace[stream] for stream in ready)
            self._run(self._random.choice([s for s in ready if self._pace[s] == fastest]))
            self._run_early()
        self.check(mark.stream.device)

    def pass_time(self) -> None:
        """Run one piece of work: a host that looks again and again sees streams go on."""
        ready = [s for s in self.streams if s.is_ready and not s.is_asleep]
        if ready and not self.error and not self._runs:
            self._run(self._random.choice(ready))
        self.check()

    def finish_all(self, device: torch.device) -> None:
        """Let the host wait for a device."""
        for stream in self.streams:
            if stream.device == device:
                self.finish(stream.end)
        self.check(device)

    def _run_early(self) -> None:
        while not self.error and not self._runs:
            ready = [s for s in self.streams if s.is_ready and not s.is_asleep]
            early = [s for s in ready if self._random.random() < self._pace[s]]
            if not early:
                return
            self._run(self._random.choice(early))

    def _streams_before(self, mark: Mark) -> set[Stream]:
        """Return the streams that have to go on until a mark is done."""
        found: set[Stream] = set()
        left = [mark]
        while left:
            mark = left.pop()
            if mark.is_done or mark.stream in found:
                continue
            found.add(mark.stream)
            left += [work.after for work in mark.stream.pending if work.after is not None]
        return found

    def _run(self, stream: Stream) -> None:
        work = stream.pending.popleft()
        self._runs = True  # memory that is freed meanwhile issues work, which must not run now
        try:
            if work.run is not None:
                with plainly(), torch.inference_mode():  # which may write to tensors of any mode
                    work.run()
        except IndexError as error:
            self.error = f"device-side assert triggered ({error})"
        finally:
            self._runs = False
            stream.done += 1


@contextmanager
def plainly() -> Iterator[None]:
    """Let torch compute on plain tensors, whatever modes are active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield
