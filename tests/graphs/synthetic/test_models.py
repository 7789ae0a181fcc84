"""The reference models: published sizes, and output shapes in both modes."""

import pytest
import torch
from torch import Tensor, nn

from graphs.models import InceptionConfig, InceptionV3, Nmt, NmtConfig, TwoTowers, TwoTowersConfig

torch.set_num_threads(1)

TINY_INCEPTION = InceptionConfig(classes=5, width=1 / 32, dropout=0.0)


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_inception_has_the_published_parameter_count() -> None:
    with torch.device("meta"):
        assert parameter_count(InceptionV3()) == 27_161_264
        classifier = 768 * 128 + 25 * 128 * 768 + 2 * (128 + 768) + 768 * 1000 + 1000
        without = InceptionV3(InceptionConfig(auxiliary=False))
        assert parameter_count(without) == 27_161_264 - classifier


def test_inception_gives_auxiliary_logits_only_when_it_trains() -> None:
    torch.manual_seed(0)
    model = InceptionV3(TINY_INCEPTION)
    images = torch.randn(2, 3, 299, 299)
    trained = model.train()(images)
    assert [tuple(logits.shape) for logits in trained] == [(2, 5), (2, 5)]
    with torch.no_grad():
        assert model.eval()(images[:1]).shape == (1, 5)


def test_inception_without_auxiliary_classifier_gives_plain_logits_in_training() -> None:
    config = InceptionConfig(classes=5, width=1 / 32, auxiliary=False)
    assert InceptionV3(config).train()(torch.randn(2, 3, 299, 299)).shape == (2, 5)


@pytest.mark.parametrize(
    ("grid", "channels", "block"),
    [(35, 256, "mixed_5b"), (35, 288, "mixed_5d"), (17, 768, "mixed_6e"), (8, 2048, "mixed_7c")],
)
def test_inception_blocks_have_the_shapes_of_the_paper(
    grid: int, channels: int, block: str
) -> None:
    seen: dict[str, tuple[int, ...]] = {}
    with torch.device("meta"):
        model = InceptionV3().eval()
        model.get_submodule(block).register_forward_hook(
            lambda _module, _inputs, output: seen.update({block: tuple(output.shape)})
        )
        model(torch.empty(1, 3, 299, 299))
    assert seen == {block: (1, channels, grid, grid)}


def test_nmt_gives_a_logit_per_step_and_word() -> None:
    config = NmtConfig(vocabulary=11, hidden=6, layers=3)
    model = Nmt(config)
    source, target = torch.randint(11, (4, 5)), torch.randint(11, (4, 7))
    assert model.train()(source, target).shape == (4, 7, 11)
    assert model.eval()(source, target).shape == (4, 7, 11)


def test_nmt_has_as_many_parameters_as_its_parts() -> None:
    v, h = 8000, 512
    cell = 4 * (2 * h * h + 2 * h)
    with torch.device("meta"):
        model = Nmt()
    assert parameter_count(model) == 2 * (v * h + 2 * cell) + 3 * h * h + h * v + v


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


def test_two_towers_share_no_parameters() -> None:
    with torch.device("meta"):
        model = TwoTowers()
    assert parameter_count(model) == 2 * 4 * (1024 * 1024 + 1024)


def test_two_towers_give_one_logit_per_pair() -> None:
    model = TwoTowers(TwoTowersConfig(features=8, layers=2))
    assert model(torch.randn(3, 8), torch.randn(3, 8)).shape == (3,)
