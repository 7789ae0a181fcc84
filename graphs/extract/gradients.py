"""A check that a traced training step computes all the gradients that torch computes."""

from __future__ import annotations

from collections.abc import Collection

from graphs.extract.refusals import explained, loss_without_gradient, quiet
from graphs.extract.substitute import in_its_mode
from graphs.extract.trial import check_differentiable, forward_of, runnable
from graphs.workload import ExtractionError, Workload


def check_gradients(step: Workload, found: Collection[str]) -> None:
    """Raise if a trace lacks gradients; ``found`` names the parameters that have one.

    The loss need not depend on every parameter; if one has no gradient, a plain run of the step
    shows whether it should have.

    Raises:
        StepError: the loss depends on no parameter that requires a gradient.
        ExtractionError: torch computes gradients that the trace lacks.
    """
    state = step.named_state()
    known = {id(state[name]) for name in found}
    trained = {id(own): name for name, own in reversed(state.items()) if own.requires_grad}
    missing = {name for identity, name in trained.items() if identity not in known}
    if not missing:
        return
    lost = sorted(missing & (computed := _computed(step)))
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ExtractionError(
            f"torch computes a gradient for {lost[0]}{more}, but the traced step of "
            f"{type(step.model).__name__} does not: some of its backward pass is hidden from "
            "tracing, as in a function that starts a backward pass of its own, or the model takes "
            "another path every time"
        )
    if not computed:
        raise loss_without_gradient(step)


def _computed(step: Workload) -> set[str]:
    """Return the names of state that torch computes gradients for; the model is left as it was."""
    try:
        with quiet(), in_its_mode(step), runnable(step) as copy:
            loss = forward_of(copy)
            check_differentiable(copy, loss)
            state = copy.named_state()
            for own in state.values():
                own.grad = None
            loss.backward()  # type: ignore[attr-defined]  # a training step returns its loss
            return {name for name, own in state.items() if own.grad is not None}
    except ExtractionError:
        raise
    except Exception as error:
        raise ExtractionError(explained(step, error, "run")) from error
