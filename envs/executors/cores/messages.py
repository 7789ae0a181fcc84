"""Messages between parent and worker: one each way, in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from envs.executors.cores.lists import Instruction
from graphs.extract.program import StepProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message: the program of the step, and file descriptors of shared resources."""

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
    """Release unused memory and count its peak from here on."""


@dataclass(frozen=True, slots=True)
class TellMemory:
    """Answer with the peak memory."""


@dataclass(frozen=True, slots=True)
class TellRandom:
    """Answer with the state of the random number generator."""


@dataclass(frozen=True, slots=True)
class SetRandom:
    """Set the state of the random number generator."""

    state: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """Success. Of a step: its start and end, and the clock around its instructions.

    The clock is the thread's CPU time, on several cores the wall clock. ``peak_bytes`` is the peak
    memory if requested and if the kernel can count it; ``random`` the generator's state if
    requested.
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
