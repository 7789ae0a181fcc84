"""Every form of inputs that a placement is searched with can be given to the placed step, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import GetAttrKey, register_pytree_node

from envs.executors.unplaced import UnplacedModel
from graphs.extract import Extraction, ExtractionError, StepError, Workload, extract
from tests.helpers.placed_steps import CORES, by_calls, by_modules, on_cores
from tests.helpers.tiny_models import Plain, assert_same

X, Y = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))


class Strict(nn.Module):
    """Takes just its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x)
        return out


class Lenient(Strict):
    """Takes any keyword, as models of transformers do."""

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(x)


class Form(NamedTuple):
    """A form of inputs: ``inputs(x, y)``, with the target apart if it is named."""

    inputs: Callable[[Tensor, Tensor], Any]
    names_target: bool = False

    def workload(self, model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Workload:
        return Workload.of(model, self.inputs(x, y), F.mse_loss, **self.target(y), **options)

    def target(self, y: Tensor) -> dict[str, Any]:
        return {"target": y} if self.names_target else {}


FORMS = {
    "tuple": Form(lambda x, y: (x, y)),
    "list": Form(lambda x, y: [x, y]),
    "dict": Form(lambda x, y: {"x": x, "target": y}),
    "dict, target first and called otherwise": Form(lambda x, y: {"label": y, "x": x}),
    "args and kwargs": Form(lambda x, y: ((x,), {"target": y})),
    "all in args": Form(lambda x, y: ((x, y), {})),
    "tensor and target": Form(lambda x, y: x, names_target=True),
    "tuple and target": Form(lambda x, y: (x,), names_target=True),
    "dict and target": Form(lambda x, y: {"x": x}, names_target=True),
    "args, kwargs and target": Form(lambda x, y: ((), {"x": x}), names_target=True),
}

RUNNERS: dict[str, Callable[[Extraction], Any]] = {
    "torch devices": lambda extraction: by_calls(extraction, ["cpu"]),
    "hooks": lambda extraction: by_modules(extraction, ["cpu"]),
    "unplaced": lambda extraction: UnplacedModel(extraction, CORES[:1]),
}
pytestmark = pytest.mark.slow_repeats
EXTRACTORS = {"torch devices": "auto", "hooks": "modules", "unplaced": "auto"}


def placed_by(runner: str, step: Workload, extractor: str = "auto") -> Any:
    """Place a step on torch devices or cores; a machine with one core skips the test."""
    if runner != "cores":
        return RUNNERS[runner](extract(step, EXTRACTORS[runner]))
    if len(CORES) < 2:
        pytest.skip("needs two cores")
    return on_cores(extract(step, extractor))


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


@functools.cache
def extracted(kind: type[nn.Module], form: str, extractor: str, training: bool) -> Extraction:
    return extract(FORMS[form].workload(model_of(kind), X, Y, training=training), extractor)


def placed_in(form: str, runner: str, step: Workload) -> Any:
    """Place a step whose inputs have this form."""
    kind: Any = type(step.model)  # to mypy, classes of modules have no hash
    kept = extracted(kind, form, EXTRACTORS[runner], step.training)
    return RUNNERS[runner](replace(kept, step=step))


def expected(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = F.mse_loss(model(x), y)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def assert_steps(placed: Any, form: Form, model: nn.Module) -> None:
    """Assert that a placed step takes other batches in this form."""
    x, y = X.flip(0), Y * 2
    loss, gradients = expected(model_of(type(model)), x, y)
    for parameter in model.parameters():
        parameter.grad = None
    assert_same(placed.step(form.inputs(x, y), **form.target(y)), loss)
    assert_same([parameter.grad for parameter in model.parameters()], gradients)


@pytest.mark.parametrize("kind", [Strict, Lenient])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_takes_what_it_was_extracted_with(
    kind: type[nn.Module], runner: str, form: str
) -> None:
    step = FORMS[form].workload(model_of(kind), X, Y)
    with placed_in(form, runner, step) as placed:
        assert_steps(placed, FORMS[form], step.model)
        for other in FORMS.values():
            assert_steps(placed, other, step.model)
        x, y = X.flip(0), Y * 2
        assert_same(placed.step(x, y), placed.step(x=x, target=y))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_step_on_cores_takes_every_form() -> None:
    step = FORMS["dict"].workload(model_of(Lenient), X, Y)
    with on_cores(extract(step)) as placed:
        for form in FORMS.values():
            assert_steps(placed, form, step.model)
        with pytest.raises(ValueError, match=r"holds input \['other'\]"):
            placed.step({"x": X, "target": Y, "other": X})
        with pytest.raises(ValueError, match="lacks the target"):
            placed.step({"x": X})


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("form", FORMS)
def test_inference_drops_the_target(runner: str, form: str) -> None:
    model = model_of(Strict)
    step = FORMS[form].workload(model, X, Y, training=False)
    with placed_in(form, runner, step) as placed, torch.no_grad():
        out = model(Y)
        assert_same(placed.step(FORMS[form].inputs(Y, X), **FORMS[form].target(X)), out)
        assert_same(placed.step(Y), out)
        assert_same(placed.step({"x": Y}), out)
        assert_same(placed(x=Y, target=X), out)


def test_a_keyword_that_the_model_may_take_is_not_dropped_in_inference() -> None:
    class Masked(Strict):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            out = super().forward(x)
            return out if mask is None else out * mask

    model = model_of(Masked)
    placed = placed_by("hooks", Workload.of(model, (X, Y), F.mse_loss)).eval()
    assert_same(placed(X, mask=Y), model(X, Y).detach())
    placed.close()


def test_one_argument_that_is_a_container_is_not_unpacked() -> None:
    model = Plain(lambda m, pair: m.a(pair[0]) + pair[1], a=nn.Linear(6, 6))
    step = Workload.of(model, ((X, Y),), training=False)
    placed = by_calls(extract(step), ["cpu"])
    assert_same(placed.step((Y, X)), placed.step(((Y, X),)))
    assert_same(placed.step((Y, X)), model((Y, X)).detach())


def test_the_pair_of_a_tuple_and_a_dict_is_arguments_and_keywords() -> None:
    step = Workload.of(model_of(Lenient), ((X, Y), {"x": 1}), training=False)
    assert step.inputs == (X, Y)
    assert step.keywords == {"x": 1}
    step = Workload.of(model_of(Lenient), ([X], {"x": 1}), training=False)
    assert step.inputs == ([X], {"x": 1})


def test_a_target_without_a_loss_function_is_refused() -> None:
    with pytest.raises(StepError, match="give loss, too"):
        Workload.of(model_of(Strict), X, target=Y)


@pytest.mark.parametrize(
    ("kind", "inputs", "message"),
    [
        (Strict, {"x": X, "target": Y, "weight": Y}, "which of the inputs 'target' and 'weight'"),
        (Strict, {"x": X}, "no target, since Strict.forward takes all inputs \\('x'\\)"),
        (Lenient, {"x": X, "label": Y, "weight": Y}, "which of the inputs 'label' and 'weight'"),
    ],
)
def test_an_unclear_target_is_refused(
    kind: type[nn.Module], inputs: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(StepError, match=message):
        Workload.of(model_of(kind), inputs, F.mse_loss)
    label = {name: value for name, value in inputs.items() if name == "x"}
    assert Workload.of(model_of(kind), label, F.mse_loss, target=Y).inputs == (Y,)


@pytest.mark.parametrize("runner", ["torch devices", "cores"])
def test_an_array_of_numpy_in_a_batch_is_refused(runner: str) -> None:
    model = Plain(lambda m, x, scale: m.a(x) * scale, a=nn.Linear(6, 6))
    with placed_by(runner, Workload.of(model, (X, 2.0), training=False)) as placed:
        for batch in ((X.numpy(), 2.0), (X, X.numpy())):
            with pytest.raises(ValueError, match=r"array of numpy: give torch\.from_numpy"):
                placed.step(*batch)


@dataclass
class Config:
    scale: float = 2.0
    layers: list[int] = field(default_factory=lambda: [1])


class Data:
    """Holds tensors and a configuration, as graphs of torch_geometric do."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.config = x, y, Config()


def of_data(m: Any, data: Data) -> Tensor:
    out: Tensor = m.a(data.x) * data.config.scale + data.y
    return out


RUN_PROGRAMS = pytest.mark.parametrize("runner", ["torch devices", "cores"])


@RUN_PROGRAMS
def test_new_contents_of_the_same_object_are_computed(runner: str) -> None:
    model = Plain(of_data, a=nn.Linear(6, 6))
    data = Data(X, Y)
    with placed_by(runner, Workload.of(model, (data,), training=False)) as placed:
        assert_same(placed.step(data), model(data).detach())
        data.x = X.flip(0)
        data.y.mul_(2)
        assert_same(placed.step(data), model(data).detach())
    Y.div_(2)


@RUN_PROGRAMS
@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: [c], lambda c: SimpleNamespace(c=c)])
def test_an_object_without_tensors_that_has_changed_is_refused(
    runner: str, wrap: Callable[[Config], Any]
) -> None:
    model = Plain(lambda m, x, given: m.a(x), a=nn.Linear(6, 6))
    config = Config()
    given = wrap(config)
    with placed_by(runner, Workload.of(model, (X, given), training=False)) as placed:
        expected = placed.step(X, given)
        for change, back in ((3.0, 2.0), ([1, 2], [1])):
            name = "scale" if isinstance(change, float) else "layers"
            setattr(config, name, change)
            with pytest.raises(ValueError, match=r"input \[1\].* has changed since"):
                placed.step(X, given)
            setattr(config, name, back)
            assert_same(placed.step(X, given), expected)


def test_a_model_that_changes_an_object_of_its_inputs_runs_by_its_own_code_alone() -> None:
    def counting(m: Any, x: Tensor, config: Config) -> Tensor:
        config.layers.append(1)
        out: Tensor = m.a(x) * len(config.layers)
        return out

    model = Plain(counting, a=nn.Linear(6, 6))
    extraction = extract(Workload.of(model, (X, Config()), training=False))
    assert extraction.extractor == "modules"
    assert "changes input [1], a Config" in extraction.fell_back[0].reason


def test_an_object_whose_changes_cannot_be_seen_is_left_to_the_models_own_code() -> None:
    model = Plain(lambda m, x, numbers: m.a(x), a=nn.Linear(6, 6))
    extraction = extract(Workload.of(model, (X, (n for n in range(3))), training=False))
    assert extraction.extractor == "modules"
    assert "input [1] is a generator" in extraction.fell_back[0].reason


class Masked(nn.Module):
    """Keeps tensors in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.mask = torch.ones(6)
        self.parts = {"shift": [torch.ones(6)]}
        self.unused: Any = torch.ones(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) * self.mask + self.parts["shift"][0]
        self.unused = out
        return out


CHANGES: dict[str, Callable[[Masked], Any]] = {
    "mask is replaced": lambda m: setattr(m, "mask", m.mask * 2),
    "mask is written": lambda m: m.mask.mul_(2),
    "parts is replaced": lambda m: m.parts.update(shift=[torch.zeros(6)]),
    "parts is written": lambda m: m.parts["shift"][0].zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("extractor", "runner"),
    [("export", "torch devices"), ("export", "cores"), ("dispatch", "cores")],
)
def test_a_plain_tensor_of_the_model_that_has_changed_is_refused(
    extractor: str, change: str, runner: str
) -> None:
    model: Any = model_of(Masked)
    step = Workload.of(model, (X,), training=False)
    with placed_by(runner, step, extractor) as placed:
        assert_same(placed.step(X), model(X).detach())
        CHANGES[change](model)
        name = change.partition(" ")[0]
        with pytest.raises(ValueError, match=f"^{name} of Masked has changed since"):
            placed.step(X)


@pytest.mark.parametrize("training", [True, False])
def test_modules_read_plain_tensors_of_the_model_as_they_are(training: bool) -> None:
    model: Any = model_of(Masked)
    step = Workload.of(model, (X, Y), F.mse_loss, training=training)
    placed = by_modules(extract(step, "modules"), ["cpu"])
    before = placed.step(X, Y)
    CHANGES["mask is replaced"](model)
    assert not torch.equal(placed.step(X, Y), before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("extractor", ["export", "dispatch"])
def test_a_plain_tensor_that_the_model_reads_and_replaces_is_refused(
    extractor: str, training: bool
) -> None:
    class Counting(Masked):
        def forward(self, x: Tensor) -> Tensor:
            self.mask = self.mask + 1
            return super().forward(x)

    step = Workload.of(model_of(Counting), (X, Y), F.mse_loss, training=training)
    with pytest.raises(ExtractionError, match=r"mask|FakeTensors"):
        extract(step, extractor)


def test_a_tensor_outside_the_model_that_is_written_is_refused() -> None:
    shift = torch.ones(6)
    model = Plain(lambda m, x: m.a(x) + shift, a=nn.Linear(6, 6))
    placed = by_calls(extract(Workload.of(model, (X,), training=False)), ["cpu"])
    placed.step(X)
    shift.zero_()
    with pytest.raises(ValueError, match="has changed since the step was extracted"):
        placed.step(X)


class Scaling:
    """Is registered with a number and a configuration beside its tensor."""

    def __init__(self, x: Tensor, factor: float, config: Config) -> None:
        self.x, self.factor, self.config = x, factor, config


register_pytree_node(
    Scaling,
    lambda value: ([value.x], (value.factor, value.config)),
    lambda parts, context: Scaling(next(iter(parts)), *context),
    flatten_with_keys_fn=lambda value: (
        [(GetAttrKey("x"), value.x)],
        (value.factor, value.config),
    ),
)


@RUN_PROGRAMS
def test_what_registered_classes_keep_beside_tensors_may_not_change(runner: str) -> None:
    model = Plain(lambda m, given: m.a(given.x) * given.factor, a=nn.Linear(6, 6))
    given = Scaling(X, 2.0, Config())
    with placed_by(runner, Workload.of(model, (given,), training=False)) as placed:
        given.x = Y
        assert_same(placed.step(given), model(given).detach())
        given.factor = 3.0
        with pytest.raises(ValueError, match=r"input \[0\] of the batch differs"):
            placed.step(given)
        given.factor = 2.0
        given.config.scale = 5.0
        with pytest.raises(ValueError, match=r"input \[0\], in more than its tensors, has changed"):
            placed.step(given)
