"""Extraction of the graph of a step from its model: :func:`extract` and what it returns.

There are three extractors, tried in this order: torch.export, a recording of the ops that a real
step dispatches, and the calls of the model's modules. Each accepts models that the one before does
not, and gives less information about them. :func:`check_step` first finds steps that no extractor
could accept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import networkx as nx
from torch import nn
from torch.nn.parameter import is_lazy

from graphs.extract import AUTO
from graphs.extract.calls import module_paths
from graphs.extract.convert import OpFacts, Traced, convert
from graphs.extract.dag import build_graph, calls_of
from graphs.extract.dispatch.trace import record
from graphs.extract.export.forward import ForwardProgram, forward_program
from graphs.extract.export.trace import trace
from graphs.extract.gradients import check_gradients
from graphs.extract.modules.trace import module_graph
from graphs.extract.modules.units import Unit
from graphs.extract.program import StepProgram
from graphs.extract.refusals import first_line, sentences, unforeseen
from graphs.extract.substitute import on_host
from graphs.extract.trial import check_runs
from graphs.extract.updates import with_optimizer
from graphs.workload import ExtractionError, StepError, Workload


def check_step(step: Workload) -> None:
    """Raise if the step is at fault as it is given.

    Raises:
        StepError: a parameter has no shape yet; or, in training, none requires a gradient, or one
            would have a sparse gradient.
    """
    name = type(step.model).__name__
    state = step.named_state()
    if unshaped := [own for own, tensor in state.items() if is_lazy(tensor)]:
        raise StepError(
            f"{unshaped[0]} of {name} has no shape until the model has run: run the model once "
            "first, on the example inputs"
        )
    if not step.training:
        return
    if not any(tensor.requires_grad for tensor in state.values()):
        raise StepError(
            f"{name} has no parameter that requires a gradient, so there is nothing to train; "
            "place inference"
        )
    for module, path in module_paths(step).items():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise StepError(
                f"{type(module).__name__} {path or name} has sparse gradients, which a placed "
                "step cannot hand over; make it with sparse=False"
            )


Extractor: TypeAlias = Literal["export", "dispatch", "modules"]
EXTRACTORS: Final[tuple[Extractor, ...]] = get_args(Extractor)


@dataclass(frozen=True, slots=True)
class FallBack:
    """An extractor that was tried, and why it did not accept the step."""

    extractor: Extractor
    reason: str


@dataclass(frozen=True, slots=True)
class Extraction:
    """A step, its graph (without costs) and its program; op ``i`` is the same in both.

    ``outputs`` is what the step returns, with a Position in place of every tensor. ``forward_of``
    gives for every backward op the forward op that it differentiates; it is None for forward ops,
    and for ops that add up gradients (their names end in ".gradient").

    ``forward`` is the exported forward pass, and ``call_of`` gives for every op the key of the call
    in it that the op stems from, and whose device it has. A recording has neither; if an export has
    none, ``no_forward`` says why. A graph of modules has no program, and ``units`` says what each
    of its ops stands for; torch devices run it by the model's own code. A recording that
    ``depends_on_data`` holds for the example inputs only: these lines of the model read values of
    tensors, and other values may lead to other ops.
    """

    step: Workload
    graph: nx.DiGraph[str]
    own_program: StepProgram | None
    outputs: Any
    forward_of: tuple[int | None, ...]
    extractor: Extractor = "export"
    fell_back: tuple[FallBack, ...] = ()
    depends_on_data: tuple[str, ...] = ()
    units: tuple[Unit, ...] = ()
    own_forward: ForwardProgram | None = None
    call_of: tuple[str, ...] = ()
    no_forward: str = ""

    @property
    def program(self) -> StepProgram:
        """The program that runs the step.

        Raises:
            ExtractionError: a graph of modules has none.
        """
        if self.own_program is None:
            raise ExtractionError(
                f"the graph of {type(self.step.model).__name__} is of its modules: it can be "
                "placed by simulation, but there is no program that runs the placed step on pinned "
                "cores (core:N); on cuda:N and cpu the model's own code does"
            )
        return self.own_program

    @property
    def forward(self) -> ForwardProgram:
        """The forward program that torch devices run.

        Raises:
            ExtractionError: the step was not exported, or torch devices cannot run it.
        """
        if self.own_forward is None:
            why = {
                "dispatch": "its ops were recorded, which pinned cores (core:N) can run; what "
                "cuda:N and cpu can run is its graph of modules (--extractor modules)",
                "modules": "its graph is of modules",
            }
            told = (
                f"{type(self.step.model).__name__} cannot be placed on cuda:N and cpu, which run "
                f"models as torch.export gives them: {self.no_forward or why[self.extractor]}"
            )
            raise ExtractionError(sentences(told, *(tried.reason for tried in self.fell_back)))
        return self.own_forward

    def check_any_data(self) -> None:
        """Raise if the step cannot run on other data than it was extracted on.

        Raises:
            ExtractionError: there is no program, or it holds for the example inputs only.
        """
        program = self.program  # raises for a graph of modules
        if program.op_count and self.depends_on_data:
            raise ExtractionError(
                f"{type(self.step.model).__name__} reads values of tensors "
                f"({shown_lines(self.depends_on_data)}), and what it does next was recorded for "
                "the example inputs only: on other data the placed step would be wrong. Compute "
                "all branches and choose with torch.where, mask instead of selecting, or let "
                "every expert compute every token; or place its modules on cuda:N and cpu "
                "(--extractor modules), where its own code runs"
            )


def extract(step: Workload, extractor: str = AUTO) -> Extraction:
    """Extract the graph of one step.

    Torch traces a model on one device, so meanwhile copies of its state on the host replace it: a
    model that runs placed can be placed anew.

    Args:
        step: the model and its example inputs.
        extractor: one of ``EXTRACTORS``, or "auto": the first that accepts the step.

    Raises:
        StepError: the step itself is at fault: the model fails on these inputs, has nothing to
            train, no scalar loss or no ops.
        ExtractionError: no extractor accepts it, or the one asked for does not.
        ValueError: there is no such extractor.
    """
    if extractor != AUTO and extractor not in _BY_NAME:
        raise ValueError(
            f"there is no extractor {extractor!r}; give {AUTO} or one of {', '.join(EXTRACTORS)}"
        )
    check_step(step)
    with on_host(step) as here:
        return replace(_extracted(here, extractor), step=step)


def _extracted(step: Workload, extractor: str) -> Extraction:
    if extractor != AUTO:
        return _by(extractor, step, ())
    fell_back: list[FallBack] = []
    for name in EXTRACTORS:
        try:
            return _by(name, step, tuple(fell_back))
        except StepError:
            raise
        except ExtractionError as error:
            if not fell_back:
                check_runs(step)
            fell_back.append(FallBack(name, sentences(str(error))))
    refusal = f"no extractor takes {type(step.model).__name__}"
    raise ExtractionError(sentences(refusal, *_told(fell_back)))


def _told(fell_back: Sequence[FallBack]) -> list[str]:
    """Return every reason once, with the extractors that gave it."""
    by_reason: dict[str, list[FallBack]] = {}
    for tried in fell_back:
        _, _, reason = tried.reason.partition(": ")  # the part before says what failed
        by_reason.setdefault(reason or tried.reason, []).append(tried)
    told = []
    for alike in by_reason.values():
        *others, last = (tried.extractor for tried in alike)
        who = f"{', '.join(others)} and {last}" if others else last
        told.append(f"{who}: {alike[0].reason}")
    return told


def _by(extractor: str, step: Workload, fell_back: tuple[FallBack, ...]) -> Extraction:
    """Extract by one extractor; unforeseen errors are refusals, too."""
    try:
        return _BY_NAME[extractor](step, fell_back)
    except ExtractionError:
        raise
    except Exception as error:
        raise ExtractionError(unforeseen(step, error)) from error


def _exported(step: Workload, fell_back: tuple[FallBack, ...]) -> Extraction:
    return _of_trace(step, trace(step), "export", fell_back)


def _recorded(step: Workload, fell_back: tuple[FallBack, ...]) -> Extraction:
    return _of_trace(step, record(step), "dispatch", fell_back)


def _of_trace(
    step: Workload, traced: Traced, extractor: Extractor, fell_back: tuple[FallBack, ...]
) -> Extraction:
    name = type(step.model).__name__
    program, facts = convert(traced, ties_of(step))
    if program.op_count == 0:
        raise StepError(
            f"{name} runs no ops on these inputs, so there is nothing to place; give the model "
            "that does the work"
        )
    if step.training:
        check_gradients(step, program.gradients)
    if step.optimizer is not None:
        program, facts = with_optimizer(program, facts, step.optimizer)
    forward, call_of, no_forward = _forward(step, traced, program, facts)
    return Extraction(
        step=step,
        graph=build_graph(program, facts, name),
        own_program=program,
        outputs=traced.outputs,
        forward_of=tuple(op.forward_op for op in facts),
        extractor=extractor,
        fell_back=fell_back,
        depends_on_data=traced.depends_on_data,
        own_forward=forward,
        call_of=call_of,
        no_forward=no_forward,
    )


def _forward(
    step: Workload, traced: Traced, program: StepProgram, facts: Sequence[OpFacts]
) -> tuple[ForwardProgram | None, tuple[str, ...], str]:
    """Return the exported forward pass and the call key of every op, or why there is none.

    Cores can run a step even if torch devices cannot run its forward pass.
    """
    if traced.exported is None:
        return None, (), ""
    try:
        forward = forward_program(
            traced.exported,
            step.named_state(),
            prefix=traced.prefix,
            mutated={result.name for result in program.results if result.role == "state"},
            counted={op.stems_from for op in facts if op.stems_from is not None},
        )
        return forward, calls_of(program, facts, forward), ""
    except Exception as error:  # noqa: BLE001  # export has more in it than it tells
        return None, (), f"its forward pass has what they cannot run: {first_line(error)}"


def _of_modules(step: Workload, fell_back: tuple[FallBack, ...]) -> Extraction:
    found = module_graph(step)
    return Extraction(
        step=step,
        graph=found.graph,
        own_program=None,
        outputs=None,
        forward_of=found.forward_of,
        extractor="modules",
        fell_back=fell_back,
        units=found.units,
    )


_BY_NAME: Final[Mapping[str, Callable[[Workload, tuple[FallBack, ...]], Extraction]]] = {
    "export": _exported,
    "dispatch": _recorded,
    "modules": _of_modules,
}


def shown_lines(lines: tuple[str, ...], most: int = 3) -> str:
    """Return the first lines of code for people to read, and how many more there are.

    >>> shown_lines(("a", "b", "c", "d", "e"))
    'a; b; c; and 2 more'
    """
    more = len(lines) - most
    return "; ".join([*lines[:most], *([f"and {more} more"] if more > 0 else [])])


def ties_of(step: Workload) -> dict[str, str]:
    """Return {further name: first name} of parameters and buffers that are the same tensor."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in step.named_state().items():
        if (known := first.setdefault(id(tensor), name)) != name:
            ties[name] = known
    return ties
