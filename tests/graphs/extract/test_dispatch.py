"""Recorded steps: values that they read, state that they assign, tensors of subclasses."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

from envs.executors.cores.placed_model import PlacedModel
from envs.hardware.discover import discover
from graphs.extract import ExtractionError, Workload, extract
from tests.helpers import one_process
from tests.helpers.tiny_models import Plain, assert_same, squared

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def linear_step(
    function: Callable[..., Any], training: bool = True, **modules: nn.Module
) -> Workload:
    torch.manual_seed(0)
    return Workload.of(Plain(function, linear=nn.Linear(8, 8), **modules), X, training=training)


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f'File "{__file__}", line {function.__code__.co_firstlineno + offset}'


def test_dropout_draws_the_numbers_that_an_exported_step_draws() -> None:
    step = Workload.of(
        nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), (X, torch.ones(4, 64)), squared
    )
    recording, export = extract(step, "dispatch"), extract(step, "export")
    outcomes = []
    for extraction, seed in ((recording, 1), (export, 1), (recording, 2)):
        torch.manual_seed(seed)
        outcomes.append(one_process.run_placed(extraction))
    assert_same(outcomes[0].gradients, outcomes[1].gradients)
    assert not torch.equal(outcomes[0].output, outcomes[2].output)


class Experts(nn.Module):
    """Every expert computes only the tokens that the router sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            out.index_add_(0, rows, self.experts[number](x[rows]))
        return out


def experts_step() -> Workload:
    torch.manual_seed(3)
    return Workload.of(Experts(), (X, X.flip(0)), squared)


@pytest.mark.slow
def test_a_loop_over_the_experts_that_were_hit_is_recorded_and_says_what_it_reads() -> None:
    step = experts_step()
    extraction = extract(step)
    assert extraction.extractor == "dispatch"
    assert [tried.extractor for tried in extraction.fell_back] == ["export"]
    assert "depends on the values in a tensor" in extraction.fell_back[0].reason
    one_process.assert_runs_as_eager(extraction)
    first = Experts.forward.__code__.co_firstlineno
    lines = [line.partition("line ")[2].partition(",")[0] for line in extraction.depends_on_data]
    assert set(map(int, lines)) == {first + 3, first + 4}
    assert all(__file__ in line for line in extraction.depends_on_data)
    hit = set(step.model.get_submodule("router")(X).argmax(1).tolist())
    modules = {module for _, module in extraction.graph.nodes(data="module")}
    assert {f"experts.{i}" for i in range(3)} & modules == {f"experts.{i}" for i in hit}


def branching(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).sum() if x.sum() > 0 else m.linear(x).mean()
    return out


def listing(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).sum() * x.tolist()[1][2]
    return out


def masking(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x)[x[:, 0] > 0].sum()
    return out


def weighing(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x).sum() * m.linear.bias[0].item()
    return out


@pytest.mark.slow_repeats
@pytest.mark.parametrize("function", [branching, listing, masking, weighing])
def test_a_line_that_reads_values_is_named(function: Callable[..., Tensor]) -> None:
    extraction = extract(linear_step(function), "dispatch")
    assert [line.startswith(line_of(function, 1)) for line in extraction.depends_on_data] == [True]
    one_process.assert_runs_as_eager(extraction)


def test_reading_what_does_not_come_from_data_makes_nothing_depend_on_it() -> None:
    def constant(m: Any, x: Tensor) -> Tensor:
        number = torch.arange(3)[2].item() + torch.zeros_like(x).sum().item()
        out: Tensor = m.linear(x)[:, torch.tensor([0, 2])].sum() * number
        return out

    extraction = extract(linear_step(constant), "dispatch")
    assert extraction.depends_on_data == ()
    one_process.assert_runs_as_eager(extraction)


def test_a_placed_model_refuses_a_recording_that_depends_on_data() -> None:
    extraction = extract(experts_step())
    cluster = discover(f"core:{min(os.sched_getaffinity(0))}")
    count = extraction.program.op_count
    with pytest.raises(ExtractionError, match="reads values of tensors") as refused:
        PlacedModel(extraction, cluster, [0] * count, range(count))
    assert __file__ in str(refused.value)
    assert "torch.where" in str(refused.value)


class Average(nn.Module):
    """A running mean that is reassigned, and two buffers that are swapped."""

    mean: Tensor
    odd: Tensor
    even: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("odd", torch.ones(8))
        self.register_buffer("even", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.odd, self.even = self.even, self.odd
        out: Tensor = self.linear(x - self.mean + self.odd)
        return out


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("extractor", ["export", "dispatch"])
@pytest.mark.parametrize("nested", [False, True], ids=["its own", "of a submodule"])
def test_a_buffer_that_is_assigned_is_updated(nested: bool, extractor: str, training: bool) -> None:
    model = nn.Sequential(Average(), nn.Linear(8, 8)) if nested else Average()
    before = list(model.named_buffers())
    extraction = extract(Workload.of(model, (X, X), squared, training=training), extractor)
    after = list(model.named_buffers())
    assert all(now[1] is then[1] for now, then in zip(after, before, strict=True))
    written = {result.name for result in extraction.program.results if result.role == "state"}
    assert written == {name for name, _ in before}
    one_process.assert_runs_as_eager(extraction)
    assert "forward" not in vars(model)


class Stateful(nn.Module):
    """A layer whose code uses ``state``: a buffer, or a tensor in a plain attribute."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor], state: Any) -> None:
        super().__init__()
        self.code = code
        self.linear = nn.Linear(8, 8)
        self.last: Tensor | None = None
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        self.last = x  # never read, so it may be kept
        out: Tensor = self.linear(self.code(self, x)).sum()
        return out


def growing(m: Any, x: Tensor) -> Tensor:
    m.state = torch.cat([m.state, x])
    return x


def counting(m: Any, x: Tensor) -> Tensor:
    m.state.add_(1)
    return x


@pytest.mark.parametrize("extractor", ["export", "dispatch"])
def test_a_buffer_that_grows_is_refused(extractor: str) -> None:
    model = nn.Sequential(Stateful(growing, nn.Buffer(torch.zeros(1, 8))))
    with pytest.raises(ExtractionError, match=r"0\.state the shape"):
        extract(Workload.of(model, X), extractor)


def test_a_tensor_that_is_no_buffer_is_not_written_but_refused() -> None:
    model = Stateful(counting, torch.zeros(()))
    with pytest.raises(ExtractionError, match="make it one with register_buffer") as refused:
        extract(Workload.of(model, X), "dispatch")
    assert line_of(counting, 1) in str(refused.value)
    extract(Workload.of(model, X), "modules")
    assert model.state == 0


@pytest.mark.parametrize("nest", [lambda tensor: tensor, lambda tensor: {"last": [tensor]}])
def test_a_tensor_that_is_no_buffer_is_not_replaced_but_refused(nest: Callable[..., Any]) -> None:
    def averaging(m: Any, x: Tensor) -> Tensor:
        mean: Tensor
        (mean,) = tree_leaves(m.state)
        m.state = nest(0.9 * mean + 0.1 * x.mean(0))
        return x - mean

    model = nn.Sequential(Stateful(averaging, nest(torch.zeros(8))))
    with pytest.raises(ExtractionError, match=r"assigns 0\.state"):
        extract(Workload.of(model, X), "dispatch")
    assert torch.equal(tree_leaves(model[0].state)[0], torch.zeros(8))
    assert model[0].last is None


class Logged(torch.Tensor):
    """A tensor that forwards every op to another one."""

    own: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Logged:
        made: Logged = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.own = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_map_only(Logged, lambda t: t.own, (args, kwargs or {}))
        return tree_map_only(Tensor, Logged, func(*given[0], **given[1]))


class Wrap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Logged(x)


class Unwrap(nn.Module):
    def forward(self, x: Logged) -> Tensor:
        return x.own


def test_tensors_of_a_subclass_are_followed() -> None:
    step = linear_step(
        lambda m, x: m.unwrap(m.linear(m.wrap(x))), training=False, wrap=Wrap(), unwrap=Unwrap()
    )
    recording = extract(step)
    assert recording.extractor == "dispatch"
    one_process.assert_runs_as_eager(recording)
    graph = extract(step, "modules").graph
    assert nx.has_path(graph, "linear:Linear", "unwrap:Unwrap")


# --- values that Python reads without an op


def keyed(m: Any, x: Tensor) -> Tensor:
    names = {f"expert_{i}": i for i in range(4)}
    chosen = [names[f"expert_{row.argmax() % 4}"] for row in x]
    out: Tensor = m.linear(x)[chosen].sum()
    return out


def aligned(m: Any, x: Tensor) -> Tensor:
    widths = [f"{value:+.1f}" for value in x[0]]
    out: Tensor = m.linear(x).sum() * len("".join(widths))
    return out


@pytest.mark.slow_repeats
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("function", [keyed, aligned])
def test_texts_of_values_are_recorded(function: Callable[..., Tensor], training: bool) -> None:
    extraction = extract(linear_step(function, training), "dispatch")
    one_process.assert_runs_as_eager(extraction)
    assert any(__file__ in line for line in extraction.depends_on_data)


@pytest.mark.parametrize("read", [lambda x: x.detach().numpy(), lambda x: np.asarray(x.detach())])
def test_what_is_computed_outside_of_torch_is_refused_with_its_line(read: Any) -> None:
    step = linear_step(lambda m, x: m.linear(x).sum() * read(x).sum())
    with pytest.raises(ExtractionError, match=rf"calls \.numpy\(\) .*{__file__}.*by torch"):
        extract(step, "dispatch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "total_length", "batch_first"),
    [(True, None, True), (True, 7, False), (False, None, False), (False, 7, True)],
)
def test_packed_sequences_are_padded_again(
    training: bool, total_length: int | None, batch_first: bool
) -> None:
    def forward(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
        out, again = pad_packed_sequence(m.rnn(packed)[0], batch_first, -2.0, total_length)
        found: Tensor = (m.linear(out) * again.sum()).sum()
        return found

    torch.manual_seed(0)
    model = Plain(forward, rnn=nn.GRU(8, 8, 2, batch_first=batch_first), linear=nn.Linear(8, 8))
    x = torch.randn(5, 4, 8) if not batch_first else torch.randn(4, 5, 8)
    step = Workload.of(model, (x, torch.tensor([2, 5, 1, 4])), training=training)
    extraction = extract(step)
    assert extraction.extractor == "dispatch"
    one_process.assert_runs_as_eager(extraction)
    assert extraction.depends_on_data


def packing(m: Any, x: Tensor, lengths: Tensor) -> Any:
    return m.rnn(pack_padded_sequence(x, lengths, enforce_sorted=False))[0]


def padding(m: Any, packed: Any) -> Any:
    return pad_packed_sequence(m.rnn(packed)[0])[0].sum()


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_packed_sequences_are_inputs_and_outputs(training: bool, bidirectional: bool) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(8, 8, 2, bidirectional=bidirectional)
    x, lengths = torch.randn(5, 4, 8), torch.tensor([2, 5, 1, 4])
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    taking = Workload.of(Plain(padding, rnn=layer), packed, training=training)
    one_process.assert_runs_as_eager(extract(taking, "dispatch"))
    if not training:
        giving = Workload.of(Plain(packing, rnn=layer), (x, lengths), training=False)
        one_process.assert_runs_as_eager(extract(giving, "dispatch"))


def test_why_packed_sequences_cannot_be_exported_is_told_with_the_line() -> None:
    inputs = torch.randn(5, 4, 8), torch.tensor([2, 5, 1, 4])
    step = Workload.of(Plain(packing, rnn=nn.LSTM(8, 8)), inputs, training=False)
    with pytest.raises(ExtractionError, match=rf"packs sequences \(.*{__file__}.* padded ones, "):
        extract(step, "export")


@pytest.mark.parametrize("wanted", [torch.preserve_format, torch.channels_last])
def test_memory_formats_are_sent_without_the_name_of_a_module_that_imports_torch(
    wanted: torch.memory_format,
) -> None:
    sent = pickle.dumps(wanted)
    assert b"torch." not in sent
    assert pickle.loads(sent) is wanted
