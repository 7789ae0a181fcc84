"""A placed graph of modules on pinned cores: the model's own code, on the core of each module.

One thread runs the step, as in eager mode, and moves to the core of a module for each of its calls
and for their backward pass. Tensors stay where they are, since all cores share the memory. So every
model that runs at all runs placed, with the numbers that it has in eager mode; no two modules run
at once.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, Final, TypeAlias

import torch
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from envs.executors.process_settings import end_idle_threads, with_threads
from envs.executors.unplaced import UnplacedModel
from graphs.extract import Extraction, Workload
from graphs.extract.module_calls import ModuleCall, ModuleCalls, and_outer, module_paths

MOVES: Final = 100
Cores: TypeAlias = tuple[int, ...]


@cache
def moving_s() -> float:
    """Return the CPU seconds in which a thread moves to another core; 0 if it may use only one."""
    allowed = os.sched_getaffinity(0)
    times_s = []
    try:
        for core in itertools.islice(itertools.cycle(sorted(allowed)), MOVES):
            start_s = time.thread_time()
            os.sched_setaffinity(0, (core,))
            times_s.append(time.thread_time() - start_s)
    finally:
        os.sched_setaffinity(0, allowed)
    return statistics.median(times_s) if len(allowed) > 1 else 0.0


class ModulesOnCores(UnplacedModel):
    """Runs steps of a model as it is, each of its modules on the cores of a placement.

    Its interface is that of the unplaced model. Control flow may depend on the data, inputs may
    have other shapes than the example, and random numbers, buffers and attributes of modules are
    those of eager mode. Hooks are on the model until :meth:`close`, unless all of it is on one
    device.
    """

    def __init__(self, extraction: Extraction, cores: Mapping[str, Sequence[int]]) -> None:
        """Register the hooks.

        Args:
            extraction: the step that was placed.
            cores: {path of a module: its cores}. A module that is not named is where the nearest
                one around it is; "" stands for the model and the code that calls it, the loss.
        """
        own = {path: tuple(each) for path, each in cores.items()}
        home = own.get("", next(iter(own.values())))
        super().__init__(extraction, home)
        self._thread = _MovingThread(extraction.step, {"": home} | own)

    def close(self) -> None:
        """Remove the hooks."""
        self._thread.close()

    def _on_cores(self) -> AbstractContextManager[None]:
        return self._thread.placed()


class _MovingThread(ModuleCalls):
    """Moves the thread that runs a step to the cores of the module whose code it runs.

    The backward pass runs nodes of autograd in reverse of the order in which they were made, so it
    moves where the forward pass did: at the inputs and outputs of calls. A backward pass that the
    caller runs, not :meth:`ModulesOnCores.step`, and threads that the model itself starts stay
    where they begin.
    """

    def __init__(self, step: Workload, cores: Mapping[str, Cores]) -> None:
        super().__init__(step)
        self._cores = {
            path: next(cores[outer] for outer in and_outer(path) if outer in cores)
            for path in ("", *module_paths(step).values())
        }
        self._has_teams = any(len(each) > 1 for each in cores.values())
        self._moving: int | None = None  # the thread that moves at present
        self._now: Cores = ()
        self._claimed: set[Node] = set()
        self._hooks = ExitStack()
        if len(set(self._cores.values())) > 1:
            self._hooks.enter_context(self.followed())

    def __deepcopy__(self, memo: object) -> _MovingThread:
        """Return itself: the hooks of a copied model do nothing unless this one runs a step."""
        return self

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Run a forward pass, or a whole step, in this context; it may be nested."""
        if self._moving is not None:
            yield
            return
        allowed = os.sched_getaffinity(0)
        self.stack.clear()  # hooks are not called on Ctrl-C
        with with_threads(len(self._cores[""])):
            self._moving = threading.get_ident()
            try:
                self._move("")
                yield
            finally:
                self._moving, self._now = None, ()
                self._claimed.clear()
                os.sched_setaffinity(0, allowed)

    def entered(self, call: ModuleCall, inputs: Any) -> None:
        """Move to the cores of the call."""
        if self._moving == threading.get_ident():
            self._claim(inputs, self.caller.path)
            self._move(call.path)

    def left(self, call: ModuleCall, outputs: Any) -> None:
        """Move back to the cores of the caller."""
        if self._moving == threading.get_ident():
            self._claim(outputs, call.path)
            self._move(self.running.path)

    def _move(self, path: str) -> None:
        cores = self._cores[path]
        if cores != self._now:
            os.sched_setaffinity(0, cores)
            self._now = cores
            if self._has_teams:  # torch's other threads stay where they were started
                end_idle_threads()
                torch.set_num_threads(len(cores))

    def _claim(self, tensors: Any, path: str) -> None:
        """Let the backward pass move to these cores when it comes to tensors not yet claimed."""
        for leaf in tree_leaves(tensors):
            node = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
            if node is not None and node not in self._claimed:
                self._claimed.add(node)
                node.register_prehook(partial(self._differentiate, path))

    def _differentiate(self, path: str, *_: object) -> None:
        if self._moving == threading.get_ident():
            self._move(path)
