"""Reference models that are in no library, for tests and benchmarks.

Every module is a target, such as ``placer optimize graphs/models/inception.py:build``.
"""

from graphs.models.dlrm import Dlrm, DlrmConfig
from graphs.models.inception import InceptionConfig, InceptionV3
from graphs.models.moe import Moe, MoeConfig, stack_experts
from graphs.models.nasnet import NasNet, NasNetConfig
from graphs.models.nmt import Nmt, NmtConfig
from graphs.models.resnet import ResNet, ResNetConfig
from graphs.models.rnnlm import Rnnlm, RnnlmConfig
from graphs.models.two_towers import TwoTowers, TwoTowersConfig

__all__ = [
    "Dlrm",
    "DlrmConfig",
    "InceptionConfig",
    "InceptionV3",
    "Moe",
    "MoeConfig",
    "NasNet",
    "NasNetConfig",
    "Nmt",
    "NmtConfig",
    "ResNet",
    "ResNetConfig",
    "Rnnlm",
    "RnnlmConfig",
    "TwoTowers",
    "TwoTowersConfig",
    "stack_experts",
]
