"""Placements, predictions and losses equal the golden files that golden_cases writes."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers.golden_cases import CASES, MODELS, answers, golden, loss_curve, text
from tests.helpers.in_turn import in_turn

torch.set_num_threads(1)


@pytest.mark.parametrize("case", in_turn(CASES, slow=[case for case in CASES if "unequal" in case]))
def test_every_objective_is_optimized_and_simulated_as_before(case: str) -> None:
    assert text(answers(case)).splitlines() == golden(case).read_text().splitlines()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("model", MODELS)
def test_a_placed_model_has_the_same_losses_as_before(model: str) -> None:
    curves = json.loads(golden("losses").read_text())
    assert loss_curve(model) == pytest.approx(curves[model], rel=1e-4)
