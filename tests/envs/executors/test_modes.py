"""Train and eval mode of models that run by their own code, however they are switched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from envs.executors.hooks.hooked_module import HookedModule
from envs.executors.unplaced import UnplacedModel
from graphs.extract import Extraction, Workload, extract

Made = HookedModule | UnplacedModel
MAKERS: dict[str, Callable[[Extraction], Made]] = {
    "hooked": lambda extraction: HookedModule(extraction, {"": "cpu"}),
    "unplaced": UnplacedModel,
}
INPUTS = (torch.randn(6, 4), torch.randn(6, 4))


def step() -> Workload:
    """Return a step with dropout, and a norm that is not trained."""
    norm = nn.BatchNorm1d(4).eval()
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), norm)
    return Workload.of(model, INPUTS, nn.functional.mse_loss)


@pytest.mark.parametrize("name", MAKERS)
def test_a_mode_is_that_of_all_modules_even_if_the_model_was_switched_directly(name: str) -> None:
    workload = step()
    model = workload.model
    norm = model.get_submodule("2")
    with MAKERS[name](extract(workload, "modules")) as placed:
        placed.step(INPUTS)
        model.eval()
        with pytest.raises(ValueError, match="the model is in eval mode, and its placed model in"):
            placed.step(INPUTS)
        placed.train()
        assert model.training
        assert not norm.training
        assert placed.step(INPUTS) != placed.step(INPUTS)  # of dropout
        placed.eval()
        model.train()
        with pytest.raises(ValueError, match="the model is in train mode, and its placed model in"):
            placed.step(INPUTS)
        placed.eval()
        torch.testing.assert_close(placed(INPUTS[0]), placed(INPUTS[0]), rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_modules_that_were_put_in_later_are_switched_too(name: str) -> None:
    workload = step()
    with MAKERS[name](extract(workload, "modules")) as placed:
        workload.model.add_module("3", nn.Dropout(0.5))
        placed.eval()
        torch.testing.assert_close(placed(INPUTS[0]), placed(INPUTS[0]), rtol=0, atol=0)
        placed.train()
        assert workload.model.get_submodule("3").training
