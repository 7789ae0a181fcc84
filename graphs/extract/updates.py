"""The optimizer in a training step: one update op per parameter that has a gradient.

An update is one call of torch's fused kernel, which changes the parameter and the optimizer state
in place, as torch.optim does with ``fused=True``. It needs no further memory, and nothing is copied
back. A tensor that changes in place must not be read afterwards, or elsewhere: an update shares its
device with all readers of the parameter (:func:`graphs.extract.dag.colocation_groups`), and workers
run it after them (:meth:`StepProgram.overwritten`). The graph has no edges for that order, because
an edge would keep the output of its source in memory until the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from graphs.extract.convert import OpFacts
from graphs.extract.program import Call, Ref, Role, Source, StepProgram, Value
from graphs.optimizer import STATE, Optimizer
from graphs.workload import StepError

LEARNING_RATE: Final = Value((), (), torch.float64, -1)
STEP_COUNT: Final = Value((), (), torch.float32, -1)


def with_optimizer(
    program: StepProgram, facts: Sequence[OpFacts], optimizer: Optimizer
) -> tuple[StepProgram, tuple[OpFacts, ...]]:
    """Append updates to a program and the facts of its ops; gradients are no longer results."""
    return _Updates(program, facts, optimizer).build()


class _Updates:
    """A program under construction, with values, calls and sources appended."""

    def __init__(
        self, program: StepProgram, facts: Sequence[OpFacts], optimizer: Optimizer
    ) -> None:
        self.program = program
        self.optimizer = optimizer
        self.facts = list(facts)
        self.values = list(program.values)
        self.calls = list(program.calls)
        self.sources = list(program.sources)
        self.current = {s.name: s.value for s in program.sources if s.role == "parameter"}
        self.current |= {
            r.name: r.value for r in program.results if r.role == "state" and r.name in self.current
        }

    def build(self) -> tuple[StepProgram, tuple[OpFacts, ...]]:
        rate = self._source("learning_rate", "", LEARNING_RATE)
        for name, gradient in self.program.gradients.items():
            self._update(name, gradient, rate)
        program = replace(
            self.program,
            values=tuple(self.values),
            calls=tuple(self.calls),
            sources=tuple(self.sources),
            results=tuple(r for r in self.program.results if r.role != "gradient"),
            op_count=len(self.facts),
        )
        return program, tuple(self.facts)

    def _update(self, name: str, gradient: int, rate: int) -> None:
        parameter = self.current[name]
        form = self.values[parameter]
        if not form.dtype.is_floating_point or not form.is_dense:
            raise StepError(
                f"parameter {name} cannot be updated in place: it has dtype {form.dtype}, shape "
                f"{form.shape} and strides {form.stride}, but must be a floating-point tensor "
                "without gaps; place the step without optimizer"
            )
        module, _, leaf = name.rpartition(".")
        if not self.values[gradient].is_laid_out_as(form):
            gradient = self._laid_out(module, parameter, gradient)
        slots = STATE[self.optimizer.kind]
        kept = [self._source("optimizer", f"{slot}.{name}", form) for slot in slots]
        counts = []
        if self.optimizer.counts_steps:
            counts = [self._source("step_count", name, STEP_COUNT)]
        kernel, numbers = self.optimizer.kernel
        lists = [kept[:1], kept[1:], [], counts] if counts else [kept]
        self._call(
            f"{self.optimizer.kind}.{leaf}",
            module,
            Call(
                op=len(self.facts),
                target=f"aten.{kernel}.tensor_lr",
                args=(
                    [Ref(parameter)],
                    [Ref(gradient)],
                    *([Ref(value) for value in state] for state in lists),
                ),
                kwargs={"lr": Ref(rate), **numbers},
                outputs=(),
                tuple_result=True,
                reads=(parameter, gradient, *kept, *counts, rate),
                writes=(parameter, *kept),
            ),
        )

    def _laid_out(self, module: str, parameter: int, gradient: int) -> int:
        """Return the gradient in the parameter's layout, which autograd keeps and kernels need."""
        result = self._value(self.values[parameter])
        self._call(
            "copy",
            module,
            Call(
                op=len(self.facts),
                target="aten.copy.default",
                args=(Ref(parameter), Ref(gradient)),
                kwargs={},
                outputs=(result,),
                tuple_result=False,
                reads=(parameter, gradient),
            ),
        )
        return result

    def _call(self, name: str, module: str, call: Call) -> None:
        self.calls.append(call)
        self.facts.append(OpFacts(name, module, module, "optimizer", 0, None, None))

    def _source(self, role: Role, name: str, form: Value) -> int:
        value = self._value(form)
        self.sources.append(Source(value, role, name))
        return value

    def _value(self, form: Value) -> int:
        self.values.append(replace(form, root=len(self.values)))
        return len(self.values) - 1
