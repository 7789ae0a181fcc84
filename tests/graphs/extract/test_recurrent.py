"""Recurrent layers are traced as eager mode trains them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensorMode

from envs.executors.cores.arena import load_example
from envs.executors.cores.instruction_lists import device_lists
from envs.executors.cores.pool import WorkerPool
from graphs.extract import Extraction, Workload, extract
from graphs.extract.kernels.recurrent import WORKSPACE, layers_as_in_eager_mode, saves_workspace
from graphs.graph import attributes_of
from tests.helpers import one_process
from tests.helpers.placed_steps import two_cores
from tests.helpers.tiny_models import NO_BF16_LSTM, Plain, assert_same, eager, squared

KERNEL, BACKWARD = "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"
BF16 = pytest.param("bf16", marks=pytest.mark.skipif(bool(NO_BF16_LSTM), reason=NO_BF16_LSTM))
LAYERS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "without bias": {"bias": False},
}


def step_of(
    kind: type[nn.RNNBase], *, state: bool = False, dtype: str = "fp32", **options: Any
) -> Workload:
    """Return a step whose loss reads outputs and last states; with ``state`` these are inputs."""

    def forward(m: Any, x: Tensor, *start: Any) -> Tensor:
        out, last = m.rnn(x, *start)
        both = last if isinstance(last, tuple) else (last,)
        total: Tensor = out.sum(1) + sum(each.sum() for each in both)
        return total

    torch.manual_seed(0)
    layer = kind(4, 3, **options)  # type: ignore[arg-type]  # RNNBase itself takes the mode first
    model = Plain(forward, rnn=layer)
    x = torch.randn(5, 2, 4)
    inputs: tuple[Any, ...] = (x, torch.randn(5, 1))
    if state:
        batch = 5 if layer.batch_first else 2
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        shapes = [layer.proj_size or 3, 3][: 2 if kind is nn.LSTM else 1]
        start = tuple(torch.randn(count, batch, size) for size in shapes)
        inputs = (x, start if len(start) > 1 else start[0], inputs[1])
    return Workload.of(model, inputs, squared, dtype=dtype)


def ops(extraction: Extraction) -> Counter[str]:
    return Counter(data["op"] for _, data in extraction.graph.nodes(data=True))


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("state", "extractor"),
    [
        *((True, "export"), (False, "dispatch")),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in ((False, "export"), (True, "dispatch"))
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", BF16])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_an_lstm_trains_by_one_kernel_for_each_layer_and_direction(
    options: dict[str, Any], state: bool, dtype: str, extractor: str
) -> None:
    extraction = extract(step_of(nn.LSTM, state=state, dtype=dtype, **options), extractor)
    count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    found = ops(extraction)
    assert (found[KERNEL], found[BACKWARD], found["sigmoid"]) == (count, count, 0)
    rounded = dtype == "bf16" and torch.__version__ < "2.13"
    one_process.assert_runs_as_eager(extraction, exact=not rounded)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("extractor", ["export", pytest.param("dispatch", marks=pytest.mark.slow)])
def test_an_lstm_that_eager_mode_trains_cell_by_cell_is_traced_so(extractor: str) -> None:
    doubled = step_of(nn.LSTM)
    for tensor in (*doubled.model.parameters(), *doubled.inputs):
        tensor.data = tensor.data.double()
    for step in (doubled, step_of(nn.LSTM, state=True, proj_size=2)):
        extraction = extract(step, extractor)
        assert ops(extraction)[KERNEL] == 0
        one_process.assert_runs_as_eager(extraction)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_other_layers_train_by_the_ops_of_their_cells(
    options: dict[str, Any], state: bool, kind: type[nn.RNNBase]
) -> None:
    extraction = extract(step_of(kind, state=state, **options))
    one_process.assert_runs_as_eager(extraction, exact=True)


@pytest.mark.slow_repeats
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_a_grus_inputs_are_no_sums(bias: bool) -> None:
    found = ops(extract(step_of(nn.GRU, bias=bias)))
    cells = 2 * 5 - 1 if bias else 0  # bias of the inputs once, that of the state for each step
    others = 4  # of the outputs' and states' sums, and the loss
    assert found["sum"] <= cells + others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "extractor"),
    [
        pytest.param(nn.LSTM, "export", marks=pytest.mark.slow),
        (nn.LSTM, "dispatch"),
        pytest.param(nn.GRU, "export", marks=pytest.mark.slow),
        pytest.param(nn.RNN, "dispatch", marks=pytest.mark.slow),
    ],
)
def test_dropout_between_layers_is_traced(kind: type[nn.RNNBase], extractor: str) -> None:
    """A layer whose inputs are all dropped shows it without any randomness."""
    extraction = extract(step_of(kind, num_layers=3, dropout=1.0), extractor)
    one_process.assert_runs_as_eager(extraction)
    half = extract(step_of(kind, num_layers=3, dropout=0.5), extractor)
    without = extract(step_of(kind, num_layers=3), extractor)
    assert len(half.graph) > len(without.graph)


def test_nothing_is_dropped_in_a_layer_in_eval_mode() -> None:
    step = step_of(nn.LSTM, num_layers=2, dropout=0.5)
    step.model.get_submodule("rnn").eval()
    one_process.assert_runs_as_eager(extract(step), exact=True)


def test_a_frozen_layer_has_no_backward() -> None:
    torch.manual_seed(0)
    model = Plain(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(4, 3), head=nn.Linear(3, 3))
    model.get_submodule("rnn").requires_grad_(False)
    extraction = extract(Workload.of(model, (torch.randn(5, 2, 4), torch.randn(5, 2, 3)), squared))
    assert (ops(extraction)[KERNEL], ops(extraction)[BACKWARD]) == (1, 0)
    one_process.assert_runs_as_eager(extraction, exact=True)


@pytest.mark.slow
def test_the_workspace_has_the_size_that_the_kernel_gives_it_and_stays_on_the_device() -> None:
    extraction = extract(step_of(nn.LSTM, num_layers=2))
    graph, program = extraction.graph, extraction.program
    names = list(graph)
    layers = [call for call in program.calls if saves_workspace(call.target, call.args)]
    assert len(layers) == 2
    for call in layers:
        value = call.outputs[WORKSPACE]
        assert value is not None
        shapes = [program.values[ref.value].shape for ref in call.args[:7]]
        real = torch.ops.aten.mkldnn_rnn_layer.default(
            *(torch.randn(shape) for shape in shapes), *call.args[7:]
        )
        assert program.values[value].shape == real[WORKSPACE].shape != (0,)
        assert attributes_of(graph, names[call.op])["saved_bytes"] >= real[WORKSPACE].nbytes
        (reader,) = (other.op for other in program.calls if value in other.reads)
        groups = [attributes_of(graph, names[op])["colocate"] for op in (call.op, reader)]
        assert groups[0] == groups[1] is not None


@pytest.mark.slow
def test_a_graph_does_not_depend_on_the_cache_of_fake_tensors() -> None:
    """Cached results are distinct tensors; torch's fake kernel returns one tensor twice."""
    FakeTensorMode.cache_clear()
    first = extract(step_of(nn.LSTM, num_layers=2), "export").program
    assert extract(step_of(nn.LSTM, num_layers=2), "export").program.calls == first.calls
    assert extract(step_of(nn.LSTM, num_layers=2), "dispatch").program.values == first.values
    layers = [call for call in first.calls if BACKWARD in call.target]
    assert [call.outputs[4] for call in layers] == [None, None]
    assert None not in [call.outputs[3] for call in layers]


def test_torch_traces_as_before_afterwards() -> None:
    names = ("_rnn_helper", "select_one_layer_lstm_function", "one_layer_rnn")
    before = [getattr(decompositions, name) for name in names]
    with pytest.raises(KeyError), layers_as_in_eager_mode():
        raise KeyError
    assert [getattr(decompositions, name) for name in names] == before


@pytest.mark.slow_repeats
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_workers_train_recurrent_layers_as_eager_mode_does(kind: type[nn.RNNBase]) -> None:
    extraction = extract(step_of(kind, num_layers=2, bidirectional=True))
    program = extraction.program
    data = extraction.graph.nodes(data=True)
    home: dict[str, int] = {}
    spread = [home.setdefault(own["colocate"] or op, len(home) % 2) for op, own in data]
    expected = eager(extraction.step).gradients
    with WorkerPool(program, two_cores().devices) as pool:
        load_example(pool.arena, extraction.step)
        for devices in ([0] * len(spread), spread):
            pool.run(pool.load(device_lists(program, devices, range(program.op_count), 2)))
            gradients = {
                result.name: pool.arena.result(index).clone()
                for index, result in enumerate(program.results)
                if result.role == "gradient"
            }
            assert_same(gradients, expected)
