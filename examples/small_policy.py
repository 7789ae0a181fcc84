"""Train a small policy for half a minute and place with it: ``python examples/small_policy.py``.

The policy learns the weights of a list scheduler. Half a minute only shows how it works;
``trained_policies/generalist.toml`` is the training configuration of the policy that ships with
placer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import placer

HERE = Path(__file__).parent
OUT = Path("policies") / "small"


class Pyramid(nn.Module):
    """Parallel branches of growing depth."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Linear(512, 512) for _ in range(depth))) for depth in range(1, 7)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).pow(2).mean()


def main() -> None:
    policy = placer.train(OUT, HERE / "small_policy.toml", fresh=True)
    [seed] = policy.card["seeds"]
    print(f"trained: {OUT}, {seed['decodes']} decodes in {seed['spent_s']:.0f} s")
    print(f"validation, {policy.card['scores_are']}:")
    for how, score in seed["validation"].items():
        print(f"  {how}: {score:.3f}")

    torch.manual_seed(0)
    model, batch = Pyramid(), torch.randn(4096, 512)
    for name in (str(OUT), "generalist"):
        found = placer.optimize(
            model,
            batch,
            devices=HERE / "mixed.toml",
            search=placer.SearchConfig(budget="64e", placer="policy", policy=name),
            progress=False,
        )
        steps_s = {candidate.name: candidate.predicted_s for candidate in found.candidates}
        print(f"{name}: {steps_s['policy'] * 1e3:.3f} ms, HEFT: {steps_s['HEFT'] * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
