"""What parent and worker say to each other: one message each way, in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envs.executor.lists import Instruction
from graphs.extract.program import StepProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message: the step, and the file descriptors of what is shared."""

    device: int
    threads: int
    seed: int
    program: StepProgram
    arena: int
    board: int
    board_bytes: int
    counters: Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Load:
    """Compile an instruction list under a number."""

    number: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a loaded list at ``start_ns`` (monotonic clock); ``give`` copies the results out."""

    number: int
    start_ns: int
    give: bool


@dataclass(frozen=True, slots=True)
class CountMemory:
    """Give back unused memory and count its peak from here on."""


@dataclass(frozen=True, slots=True)
class TellMemory:
    """Answer with the peak of memory."""


@dataclass(frozen=True, slots=True)
class TellRandom:
    """Answer with the state of the generator of random numbers."""


@dataclass(frozen=True, slots=True)
class SetRandom:
    """Draw random numbers from this state on."""

    state: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """It worked. Of a step: its start and end, and the thread's CPU clock around instructions.

    ``peak_bytes`` is the peak of memory where it was asked for, if the kernel tells it; ``random``
    the state of the generator, where that was asked for.
    """

    start_ns: int = 0
    end_ns: int = 0
    stamps: bytes = b""
    peak_bytes: int | None = None
    random: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed:
    """An instruction raised: the last line of the traceback, and whether memory ran out."""

    reason: str
    no_memory: bool = False
