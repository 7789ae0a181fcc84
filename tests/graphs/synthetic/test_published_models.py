"""The published reference models: their published sizes and their results."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from graphs.models import (
    Dlrm,
    Moe,
    MoeConfig,
    NasNet,
    NasNetConfig,
    ResNet,
    ResNetConfig,
    Rnnlm,
    RnnlmConfig,
    stack_experts,
)
from graphs.models.dlrm import Interaction
from graphs.models.moe import SparseMoe
from tests.helpers.tiny_reference_models import TINY_DLRM, TINY_MOE, TINY_NASNET, parameter_count

torch.set_num_threads(1)


# --- ResNet


def test_resnet_has_the_published_parameters_and_names() -> None:
    with torch.device("meta"):
        model = ResNet()
    assert parameter_count(model) == 25_557_032
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(shapes) == 320
    assert shapes["layer1.0.conv1.weight"] == (64, 64, 1, 1)
    assert shapes["layer2.0.conv2.weight"] == (128, 128, 3, 3)
    assert shapes["layer3.0.downsample.0.weight"] == (1024, 512, 1, 1)
    assert shapes["layer4.2.bn3.running_var"] == (2048,)
    assert "layer1.1.downsample.0.weight" not in shapes


def test_resnet_with_more_blocks_is_the_published_resnet_101() -> None:
    with torch.device("meta"):
        assert parameter_count(ResNet(ResNetConfig(blocks=(3, 4, 23, 3)))) == 44_549_160


@pytest.mark.parametrize(
    ("stage", "shape"),
    [("layer1", (256, 56, 56)), ("layer3", (1024, 14, 14)), ("layer4", (2048, 7, 7))],
)
def test_resnet_stages_have_the_shapes_of_the_paper(stage: str, shape: tuple[int, ...]) -> None:
    seen: list[tuple[int, ...]] = []
    with torch.device("meta"):
        model = ResNet().eval()
        model.get_submodule(stage).register_forward_hook(
            lambda _module, _inputs, output: seen.append(tuple(output.shape))
        )
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert seen == [(2, *shape)]


# --- recurrent language model


@pytest.mark.parametrize(("hidden", "published_millions"), [(650, 20), (1500, 66)])
def test_rnnlm_has_the_published_parameter_count(hidden: int, published_millions: int) -> None:
    v, h = 10_000, hidden
    with torch.device("meta"):
        count = parameter_count(Rnnlm(RnnlmConfig(hidden=hidden)))
    assert count == v * h + 2 * 4 * (2 * h * h + 2 * h) + h * v + v
    assert round(count / 1e6) == published_millions


def test_rnnlm_computes_what_a_fused_lstm_computes() -> None:
    torch.manual_seed(0)
    model = Rnnlm(RnnlmConfig(vocabulary=11, hidden=4, layers=3)).eval()
    fused = nn.LSTM(4, 4, 3, batch_first=True)
    for number, cell in enumerate(model.layers):
        for name, weight in cell.named_parameters():
            fused.get_parameter(f"{name}_l{number}").data.copy_(weight)
    tokens = torch.randint(11, (2, 5))
    with torch.no_grad():
        expected = model.projection(fused(model.embedding(tokens))[0])
        torch.testing.assert_close(model(tokens), expected)


def test_rnnlm_drops_out_between_layers_but_not_between_steps() -> None:
    model = Rnnlm(RnnlmConfig(vocabulary=11, hidden=4, layers=2, dropout=1.0)).train()
    inputs: list[Tensor] = []
    states: list[Tensor] = []

    def keep(_module: nn.Module, given: tuple[Tensor, tuple[Tensor, Tensor]]) -> None:
        inputs.append(given[0])
        states.append(given[1][0])

    for cell in model.layers:
        cell.register_forward_pre_hook(keep)
    with torch.no_grad():
        model(torch.randint(11, (2, 3)))
    assert len(inputs) == 6
    assert not any(x.any() for x in inputs)
    assert all(state.any() for state in states[2:])


# --- mixture of experts


def small_moe(seed: int = 0, **sizes: int) -> tuple[Moe, Moe]:
    """Return the same model with separate and with stacked experts."""
    torch.manual_seed(seed)
    config = replace(TINY_MOE, **sizes)  # type: ignore[arg-type]  # mypy takes sizes for any field
    separate, stacked = Moe(config), Moe(replace(config, stacked=True))
    stacked.load_state_dict(stack_experts(separate.state_dict()))
    return separate, stacked


@pytest.mark.parametrize("stacked", [False, True])
def test_moe_has_the_published_parameter_count(stacked: bool) -> None:
    with torch.device("meta"):
        model = Moe(MoeConfig(layers=1, stacked=stacked))
        layer = parameter_count(model.layers[0])
    assert parameter_count(model) + 31 * layer == 46_702_792_704


@given(
    seed=st.integers(0, 1000),
    experts=st.integers(1, 5),
    key_value_heads=st.sampled_from([1, 2]),
    data=st.data(),
)
@settings(max_examples=20)
def test_stacked_experts_compute_what_separate_ones_compute(
    seed: int, experts: int, key_value_heads: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(1, experts))
    separate, stacked = small_moe(
        seed, experts=experts, chosen=chosen, key_value_heads=key_value_heads
    )
    tokens = torch.randint(11, (2, 5))
    outputs = separate(tokens), stacked(tokens)
    torch.testing.assert_close(*outputs)
    for output in outputs:
        torch.autograd.backward(output.square().mean())
    gradients = {name: p.grad for name, p in separate.named_parameters() if p.grad is not None}
    for name, gradient in stack_experts(gradients).items():
        torch.testing.assert_close(stacked.get_parameter(name).grad, gradient)


def test_stacking_goes_by_the_number_of_an_expert_not_by_its_name() -> None:
    separate, stacked = small_moe(experts=11)
    moved = stacked.get_parameter("layers.0.block_sparse_moe.experts.w2")[10]
    assert torch.equal(
        moved, separate.get_parameter("layers.0.block_sparse_moe.experts.10.w2.weight")
    )


def test_moe_computes_what_only_the_chosen_experts_would() -> None:
    torch.manual_seed(0)
    layer = SparseMoe(TINY_MOE)
    x = torch.randn(2, 3, 8)
    rows = []
    for token in x.flatten(0, 1):
        probability = layer.gate(token).softmax(0)
        best = probability.argsort(descending=True)[: TINY_MOE.chosen].tolist()
        parts = [probability[e] * layer.experts.get_submodule(str(e))(token) for e in best]
        rows.append(torch.stack(parts).sum(0) / probability[best].sum())
    torch.testing.assert_close(layer(x), torch.stack(rows).view(2, 3, 8))


def test_a_token_is_routed_to_as_many_experts_as_are_chosen() -> None:
    torch.manual_seed(0)
    layer = SparseMoe(replace(TINY_MOE, chosen=3))
    weights = layer.route(torch.randn(7, 8))
    assert weights.shape == (7, 4)
    assert weights.count_nonzero(1).tolist() == [3] * 7
    torch.testing.assert_close(weights.sum(1), torch.ones(7))


def test_moe_cannot_see_later_tokens() -> None:
    separate, _ = small_moe()
    tokens = torch.randint(11, (2, 5))
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    with torch.no_grad():
        before, after = separate(tokens), separate(changed)
    torch.testing.assert_close(before[:, :3], after[:, :3], rtol=0, atol=0)
    assert not torch.equal(before[:, 3], after[:, 3])


def test_attention_depends_on_the_distance_of_tokens_only() -> None:
    """Shifted by two positions, rotary angles change, but products of queries and keys do not."""
    torch.manual_seed(0)
    attention = Moe(TINY_MOE).layers[0].get_submodule("self_attn")
    x = torch.randn(1, 5, 8)
    angle = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.01])).repeat(1, 2)
    start, shifted = (attention(x, a.cos(), a.sin()) for a in (angle[:5], angle[2:7]))
    spread = attention(x, angle[::2].cos(), angle[::2].sin())
    torch.testing.assert_close(start, shifted)
    assert not torch.allclose(start, spread)


# --- recommendation


def test_dlrm_has_the_published_540_million_parameters() -> None:
    with torch.device("meta"):
        model = Dlrm()
    assert parameter_count(model.tables) == 16 * 33_762_577
    bottom = (13 + 1) * 512 + (512 + 1) * 256 + (256 + 1) * 64 + (64 + 1) * 16
    pairs = 27 * 26 // 2
    top = (16 + pairs + 1) * 512 + (512 + 1) * 256 + 256 + 1
    assert parameter_count(model) == 540_201_232 + bottom + top


@given(seed=st.integers(0, 1000), count=st.integers(1, 6))
def test_interaction_takes_the_product_of_every_pair_once(seed: int, count: int) -> None:
    vectors = torch.randn(2, count, 3, generator=torch.Generator().manual_seed(seed))
    pairs = [vectors[:, i] * vectors[:, j] for i in range(count) for j in range(i)]
    expected = torch.stack([p.sum(1) for p in pairs], 1) if pairs else torch.empty(2, 0)
    torch.testing.assert_close(Interaction()(vectors), expected)


def test_dlrm_adds_up_the_rows_of_a_bag_whatever_their_order() -> None:
    torch.manual_seed(0)
    model = Dlrm(TINY_DLRM)
    dense, indices = torch.randn(4, 3), torch.randint(4, (4, 3, 2))
    with torch.no_grad():
        logits = model(dense, indices)
        assert logits.shape == (4,)
        torch.testing.assert_close(logits, model(dense, indices.flip(2)))
        for table in model.tables:
            table.get_parameter("weight").zero_()
        assert not torch.equal(logits, model(dense, indices))


# --- NASNet


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (NasNetConfig(), 5_289_978),
        (NasNetConfig(stem=96, filters=168, repeats=6), 88_753_150),
    ],
    ids=["mobile", "large"],
)
def test_nasnet_has_the_published_parameter_count(config: NasNetConfig, published: int) -> None:
    with torch.device("meta"):
        assert parameter_count(NasNet(config)) == published


def test_nasnet_cells_have_the_shapes_of_the_paper() -> None:
    seen: list[tuple[int, ...]] = []
    with torch.device("meta"):
        model = NasNet().eval()
        for cell in model.cells:
            cell.register_forward_hook(
                lambda _module, _inputs, output: seen.append(tuple(output.shape[1:3]))
            )
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    stem = [(44, 56), (88, 28)]
    middle = [*[(6 * 44, 28)] * 4, (4 * 88, 14), *[(6 * 88, 14)] * 4]
    assert seen == [*stem, *middle, (4 * 176, 7), *[(6 * 176, 7)] * 4]


@pytest.mark.parametrize("pixels", [32, 45, 48, 63])
def test_nasnet_takes_images_of_even_and_odd_sizes(pixels: int) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        logits = NasNet(TINY_NASNET).eval()(torch.randn(1, 3, pixels, pixels))
    assert logits.shape == (1, 5)
    assert torch.isfinite(logits).all()
