"""The reference models: published sizes and shapes, and results compared with independent ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from graphs.models import (
    Dlrm,
    InceptionConfig,
    InceptionV3,
    Moe,
    MoeConfig,
    NasNet,
    NasNetConfig,
    Nmt,
    NmtConfig,
    ResNet,
    ResNetConfig,
    Rnnlm,
    RnnlmConfig,
    TwoTowers,
    stack_experts,
)
from graphs.models.dlrm import Interaction
from graphs.models.moe import SparseMoe
from tests.helpers.tiny_reference_models import TINY_DLRM, TINY_MOE, TINY_NASNET, parameter_count

AUXILIARY = 768 * 128 + 25 * 128 * 768 + 2 * (128 + 768) + 768 * 1000 + 1000
CELL = 4 * (2 * 512 * 512 + 2 * 512)
BOTTOM = (13 + 1) * 512 + (512 + 1) * 256 + (256 + 1) * 64 + (64 + 1) * 16
TOP = (16 + 27 * 26 // 2 + 1) * 512 + (512 + 1) * 256 + 256 + 1


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (InceptionV3, 27_161_264),
        (lambda: InceptionV3(InceptionConfig(auxiliary=False)), 27_161_264 - AUXILIARY),
        (ResNet, 25_557_032),
        (lambda: ResNet(ResNetConfig(blocks=(3, 4, 23, 3))), 44_549_160),  # ResNet-101
        (NasNet, 5_289_978),
        (lambda: NasNet(NasNetConfig(stem=96, filters=168, repeats=6)), 88_753_150),
        (Rnnlm, 19_780_400),  # "20M" in the paper
        (lambda: Rnnlm(RnnlmConfig(hidden=1500)), 66_034_000),  # "66M"
        (Dlrm, 540_201_232 + BOTTOM + TOP),
        (Nmt, 2 * (8000 * 512 + 2 * CELL) + 3 * 512 * 512 + 512 * 8000 + 8000),
        (TwoTowers, 2 * 4 * (1024 * 1024 + 1024)),
    ],
)
def test_published_parameter_counts(make: Callable[[], nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        assert parameter_count(make()) == parameters


@pytest.mark.slow_repeats
@pytest.mark.parametrize(
    ("make", "pixels", "shapes"),
    [
        (
            InceptionV3,
            299,
            {
                "mixed_5b": (256, 35),
                "mixed_5d": (288, 35),
                "mixed_6e": (768, 17),
                "mixed_7c": (2048, 8),
            },
        ),
        (ResNet, 224, {"layer1": (256, 56), "layer3": (1024, 14), "layer4": (2048, 7)}),
        (
            NasNet,
            224,
            {
                f"cells.{i}": shape
                for i, shape in enumerate(
                    [
                        *[(44, 56), (88, 28), *[(6 * 44, 28)] * 4],
                        *[(4 * 88, 14), *[(6 * 88, 14)] * 4],
                        *[(4 * 176, 7), *[(6 * 176, 7)] * 4],
                    ]
                )
            },
        ),
    ],
)
def test_stages_have_the_channels_and_pixels_of_the_paper(
    make: Callable[[], nn.Module], pixels: int, shapes: dict[str, tuple[int, int]]
) -> None:
    outputs: dict[str, tuple[int, ...]] = {}
    with torch.device("meta"):
        model = make().eval()
        for name in shapes:
            model.get_submodule(name).register_forward_hook(
                lambda _module, _inputs, output, name=name: outputs.update(
                    {name: tuple(output.shape[1:3])}
                )
            )
        assert model(torch.empty(2, 3, pixels, pixels)).shape == (2, 1000)
    assert outputs == shapes


def test_inception_gives_auxiliary_logits_only_when_it_trains() -> None:
    torch.manual_seed(0)
    model = InceptionV3(InceptionConfig(classes=5, width=1 / 32, dropout=0.0))
    images = torch.randn(2, 3, 299, 299)
    assert [tuple(logits.shape) for logits in model.train()(images)] == [(2, 5), (2, 5)]
    with torch.no_grad():
        assert model.eval()(images[:1]).shape == (1, 5)


def test_resnet_has_the_published_names() -> None:
    with torch.device("meta"):
        names = ResNet().state_dict().keys()
    assert len(names) == 320
    assert {"layer3.0.downsample.0.weight", "layer4.2.bn3.running_var"} <= names
    assert "layer1.1.downsample.0.weight" not in names


def test_nmt_decoder_cannot_see_later_target_tokens() -> None:
    torch.manual_seed(0)
    model = Nmt(NmtConfig(vocabulary=11, hidden=6)).eval()
    source, target = torch.randint(11, (2, 4)), torch.randint(11, (2, 5))
    changed = target.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    with torch.no_grad():
        before, after = model(source, target), model(source, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])


def test_nmt_attention_reaches_every_source_token() -> None:
    torch.manual_seed(0)
    model = Nmt(NmtConfig(vocabulary=11, hidden=6))
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    model.encoder.embedding.register_forward_hook(keep)
    logits = model(torch.randint(11, (2, 4)), torch.randint(11, (2, 1)))
    torch.autograd.backward(logits.square().sum())
    gradient = embedded[0].grad
    assert gradient is not None
    assert (gradient.abs().sum((0, 2)) > 0).all()


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


@pytest.mark.slow
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


@pytest.mark.parametrize("pixels", [32, 45, 48, 63])
def test_nasnet_takes_images_of_even_and_odd_sizes(pixels: int) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        logits = NasNet(TINY_NASNET).eval()(torch.randn(1, 3, pixels, pixels))
    assert logits.shape == (1, 5)
    assert torch.isfinite(logits).all()
