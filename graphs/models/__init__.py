"""Reference models that are in no library, for examples, tests and benchmarks."""

from graphs.models.inception import InceptionConfig, InceptionV3
from graphs.models.nmt import Nmt, NmtConfig
from graphs.models.two_towers import TwoTowers, TwoTowersConfig

__all__ = ["InceptionConfig", "InceptionV3", "Nmt", "NmtConfig", "TwoTowers", "TwoTowersConfig"]
