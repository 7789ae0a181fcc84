"""Extraction of the graph of a step from its model: :func:`extract` and what it returns.

There are three extractors, tried in this order: torch.export, a recording of the ops that a real
step dispatches, and the calls of the model's modules. Each accepts models that the one before does
not, and gives less information about them. :func:`check_step` first finds steps that no extractor
could accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

import networkx as nx
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphs.extract.constants import Constants, check_apart, check_dense
from graphs.extract.convert import OpFacts, Traced, convert
from graphs.extract.dag import build_graph, calls_of
from graphs.extract.dispatch import record
from graphs.extract.eager import check_gradients, check_runs
from graphs.extract.errors import sentences, short_reason, shown_lines
from graphs.extract.export.forward import ForwardProgram, forward_program
from graphs.extract.export.trace import trace
from graphs.extract.model_state import on_host
from graphs.extract.module_calls import Unit, module_paths
from graphs.extract.modules.trace import module_graph
from graphs.extract.program import StepProgram
from graphs.extract.reads.effects import effects_refused
from graphs.extract.updates import with_optimizer
from graphs.text import suggestion
from graphs.workload import ExtractionError, StepError, Workload

Extractor: TypeAlias = Literal["export", "dispatch", "modules"]
IN_OWN_CODE: Final = (
    "Choose with torch.where instead of `if`, mask instead of selecting, or let every expert "
    "compute every token"
)
IN_LIBRARY: Final = (
    "The lines are in an installed package: give the model the inputs and options with which it "
    "need not look (transformers: no attention_mask if nothing is padded, layerdrop=0, a "
    "dense experts_implementation, a loss of your own instead of labels; torch_geometric: "
    "add_self_loops=False and loops in the data)"
)
"""What to do about lines that read values of tensors."""
WRITTEN_CACHE: Final = "StaticCache"
"""Class of transformers whose tensors a model writes into."""
QUANTIZED: Final = (
    *("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized."),
    *("torchao.", "bitsandbytes.", "optimum.quanto.", "quanto.", "hqq.", "awq.", "auto_gptq."),
    *("gptqmodel.", "compressed_tensors.", "transformers.integrations.bitnet."),
)
"""Packages whose modules and tensors hold packed weights."""
EXTRACTORS: Final[tuple[Extractor, ...]] = get_args(Extractor)
Needs: TypeAlias = Literal["nothing", "any data", "calls"]
"""A property that devices need of an extraction: that it holds for any data, or has calls."""


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

    ``forward_program`` is the exported forward pass, and ``call_of`` gives for every op the key of
    the call in it that the op stems from, and whose device it has. A recording has neither; if an
    export has none, ``no_forward`` says why. A graph of modules has no program, and ``units`` says
    what each of its ops stands for; torch devices run it by the model's own code. A recording that
    ``depends_on_data`` holds for the example inputs only: these lines of the model read values of
    tensors, and other values may lead to other ops. Lines that are ``unchecked`` read values only
    to check or report them, which the placed step does not do. ``constants`` are what its programs
    hold of the model and the inputs.
    """

    step: Workload
    graph: nx.DiGraph[str]
    step_program: StepProgram | None
    outputs: Any
    forward_of: tuple[int | None, ...]
    extractor: Extractor = "export"
    fell_back: tuple[FallBack, ...] = ()
    depends_on_data: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    units: tuple[Unit, ...] = ()
    forward_program: ForwardProgram | None = None
    call_of: tuple[str, ...] = ()
    no_forward: str = ""
    constants: Constants | None = None

    @property
    def program(self) -> StepProgram:
        """The program that runs the step; an ExtractionError if the graph is of its modules."""
        if self.step_program is None:
            raise ExtractionError(
                f"{type(self.step.model).__name__} has no program of ops, since its graph is of "
                "its modules, which its own code runs"
            )
        return self.step_program

    @property
    def forward(self) -> ForwardProgram:
        """The forward program that torch devices run; an ExtractionError if they cannot."""
        if self.forward_program is None:
            reasons = [] if self.extractor == "modules" else self.fell_back
            raise ExtractionError(
                sentences(self.no_calls, *(tried.reason for tried in reasons)),
                remedy="modules" if self.extractor == "dispatch" else None,
            )
        return self.forward_program

    @property
    def no_calls(self) -> str:
        """Return why torch devices cannot run the step call by call."""
        reasons = {
            "dispatch": "its ops were recorded, which pinned cores (core:N) can run; what cuda:N "
            "and cpu can run is its graph of modules",
            "modules": "its graph is of modules; extractor export extracts calls, or says what in "
            "the model to change",
        }
        return (
            f"{type(self.step.model).__name__} has no forward pass of single calls, which can be "
            f"placed on cuda:N and cpu: {self.no_forward or reasons[self.extractor]}"
        )

    @property
    def core_refusal(self) -> str:
        """Return why ops cannot be placed on pinned cores and run on any data, "" if they can.

        A graph of modules can: the model's own code runs it.
        """
        if not self.depends_on_data:
            return ""
        modules = "" if self.modules_refused else "; or place whole modules (extractor modules)"
        return (
            f"the ops of {type(self.step.model).__name__} cannot be placed on pinned cores: "
            f"{self.dependence}{modules}"
        )

    @property
    def modules_refused(self) -> bool:
        """Return whether its modules were tried, and refused."""
        return any(tried.extractor == "modules" for tried in self.fell_back)

    @property
    def dependence(self) -> str:
        """Return what a recording that depends on data reads, and what to do about it."""
        in_library = all("site-packages" in line for line in self.depends_on_data)
        return (
            f"it reads values of tensors ({shown_lines(self.depends_on_data)}), so its recorded "
            f"ops hold for the example inputs only. {IN_LIBRARY if in_library else IN_OWN_CODE}"
        )

    def check_constants(self) -> None:
        """Raise ValueError if what the programs hold of model and inputs has changed since."""
        if self.constants is not None:
            self.constants.check()

    def check_any_data(self) -> None:
        """Raise ExtractionError if there is no program, or it holds for the example inputs only."""
        if self.program.op_count and self.depends_on_data:  # raises for a graph of modules
            remedy = None if self.modules_refused else "modules"
            raise ExtractionError(self.core_refusal, remedy=remedy)


def extract(step: Workload, extractor: str = "auto", *, needs: Needs = "nothing") -> Extraction:
    """Extract the graph of one step.

    ``extractor`` is one of ``EXTRACTORS``, or "auto": the first that accepts the step and gives
    what the devices need, with a recording that depends on data as the last resort where they need
    "any data". Torch traces a model on one device, so meanwhile copies of its state on the host
    replace it: a model that runs placed can be placed anew.
    """
    names = [name for name in EXTRACTORS if extractor in ("auto", name)]
    if needs == "calls" and extractor == "auto":
        names.remove("dispatch")
    if not names:
        raise ValueError(
            f"there is no extractor {extractor!r}; give auto or one of {', '.join(EXTRACTORS)}"
            f"{suggestion(extractor, EXTRACTORS)}"
        )
    check_step(step)
    with on_host(step) as here:
        return replace(_by_first(names, here, needs), step=step)


def check_step(step: Workload) -> None:
    """Raise StepError if no extractor could accept the step as it is given.

    An input is a cache of fixed size, a module is compiled to TorchScript, it or a parameter is
    quantized, or a parameter has no shape yet; or, in training, none requires a gradient, or one
    would have a sparse gradient.
    """
    name = type(step.model).__name__
    for module, path in module_paths(step).items():
        if isinstance(module, torch.jit.ScriptModule):
            raise StepError(
                f"{path or name} is a module of TorchScript ({module.original_name}), whose ops "
                "cannot be traced; give the Python module that it was made of"
            )
        if _is_quantized(type(module)):
            raise StepError(_quantized(f"{path or name} is a {_kind(type(module))}"))
    for where, value in (*enumerate(step.step_inputs), *step.keywords.items()):
        if any(cls.__name__ == WRITTEN_CACHE for cls in type(value).__mro__):
            raise StepError(
                f"input [{where!r}] is a {type(value).__name__}, into which the model writes, and "
                "a placed step only reads its inputs: give a cache that grows and is returned "
                "(DynamicCache), or none (use_cache=False)"
            )
    state = step.named_state()
    for path, tensor in state.items():
        if tensor.is_quantized or _is_quantized(type(tensor)):
            kind = tensor.dtype if tensor.is_quantized else _kind(type(tensor))
            raise StepError(_quantized(f"{path} of {name} is a {kind}"))
    if unshaped := [path for path, tensor in state.items() if is_lazy(tensor)]:
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
    for path, tensor in state.items():
        if tensor._backward_hooks:
            raise StepError(
                f"{path} of {name} has a hook on its gradient (register_hook), which a placed step "
                "would not call; remove it, and change the gradient after the step"
            )
    for module, path in module_paths(step).items():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight.requires_grad:
            raise StepError(
                f"{type(module).__name__} {path or name} has sparse gradients, which a placed "
                "step cannot hand over; make it with sparse=False"
            )


def _is_quantized(cls: type) -> bool:
    return f"{cls.__module__}.".startswith(QUANTIZED)


def _kind(cls: type) -> str:
    return f"{cls.__name__} of {cls.__module__}"


def _quantized(what: str) -> str:
    return (
        f"{what}: quantized weights cannot be placed; give the model as it was before it was "
        "quantized (transformers: load it without quantization_config)"
    )


def _by_first(extractors: Sequence[Extractor], step: Workload, needs: Needs) -> Extraction:
    """Extract by the first extractor that accepts the step and gives what is needed."""
    fell_back: list[FallBack] = []
    recording: Extraction | None = None
    for name in extractors:
        try:
            extraction = replace(_by(name, step), fell_back=tuple(fell_back))
            if needs == "calls" and len(extractors) > 1 and extraction.no_forward:
                fell_back.append(FallBack(name, sentences(extraction.no_calls)))
                continue
            if not (needs == "any data" and extraction.depends_on_data):
                return extraction
            recording = extraction
            reason = f"{type(step.model).__name__} was recorded, but {extraction.dependence}"
            fell_back.append(FallBack(name, sentences(reason)))
        except StepError:
            raise
        except ExtractionError as error:
            if not fell_back:
                check_runs(step)
            if len(extractors) == 1:
                raise
            fell_back.append(FallBack(name, sentences(str(error))))
    if recording is not None:
        others = (tried for tried in fell_back if tried.extractor != recording.extractor)
        return replace(recording, fell_back=tuple(others))
    reasons = by_reason(fell_back)
    raise ExtractionError(sentences(f"no extractor takes {type(step.model).__name__}", *reasons))


def by_reason(fell_back: Sequence[FallBack]) -> list[str]:
    """Return every reason once, with the extractors that gave it."""
    reasons: dict[str, list[FallBack]] = {}
    for tried in fell_back:
        _, _, reason = tried.reason.partition(": ")  # the part before says what failed
        reasons.setdefault(reason or tried.reason, []).append(tried)
    return [
        f"{' and '.join(tried.extractor for tried in alike)}: {alike[0].reason}"
        for alike in reasons.values()
    ]


def _by(extractor: Extractor, step: Workload) -> Extraction:
    """Extract by one extractor; unforeseen errors are refusals, too."""
    try:
        if extractor == "modules":
            graph, units, forward_of = module_graph(step)
            return Extraction(step, graph, None, None, forward_of, "modules", units=units)
        check_dense(step)
        constants = Constants(step)
        with effects_refused(step):
            traced = trace(step) if extractor == "export" else record(step)
        return _of_trace(step, traced, extractor, constants)
    except ExtractionError:
        raise
    except Exception as error:
        raise ExtractionError(
            f"{type(step.model).__name__} was traced, but no graph comes out of the trace: "
            f"{type(error).__name__}: {short_reason(error)}. Another extractor may take it."
        ) from error


def _of_trace(
    step: Workload, traced: Traced, extractor: Extractor, constants: Constants
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
    held = (*program.sources, *(forward.sources if forward is not None else ()))
    tensors = [source.tensor for source in held if source.tensor is not None]
    changed = {result.name for result in program.results if result.role == "state"}
    check_apart(step, tensors, changed)
    state = step.named_state()
    if empty := sorted(name for name in changed if not state[name].numel()):
        raise ExtractionError(
            f"{empty[0]} of {type(step.model).__name__} is empty until the model has run: run the "
            "model once first, on the example inputs"
        )
    constants.hold([*tensors, *traced.steering])
    return Extraction(
        step=step,
        graph=build_graph(program, facts, name),
        step_program=program,
        outputs=traced.outputs,
        forward_of=tuple(op.forward_op for op in facts),
        extractor=extractor,
        depends_on_data=traced.depends_on_data,
        unchecked=traced.unchecked,
        forward_program=forward,
        call_of=call_of,
        no_forward=no_forward,
        constants=constants,
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
    except Exception as error:  # noqa: BLE001  # export has more in it than it documents
        return None, (), f"its forward pass has what they cannot run: {short_reason(error)}"


def ties_of(step: Workload) -> dict[str, str]:
    """Return {further name: first name} of parameters and buffers that are the same tensor."""
    first: dict[int, str] = {}
    state = step.named_state()
    names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    return {name: known for name, known in names.items() if name != known}
