"""The configuration of a run: its settings, reading them from files, and comparing them.

This package does not import torch.
"""

from raylt.config.comparing import DRAWN, completed, differences, followed, settled
from raylt.config.paths import located, located_data
from raylt.config.reading import DEMO, apply, assign, check, load, load_data, overlay, override, read, recipe, recipes
from raylt.config.sections import (
    BENCHMARKS,
    UNLISTED,
    Config,
    DataConfig,
    EvaluationConfig,
    FederationConfig,
    LocalConfig,
    OutputConfig,
    PrivacyConfig,
    ResourcesConfig,
    Section,
    allowed,
    setting,
    settings,
)

__all__ = [
    "BENCHMARKS",
    "DEMO",
    "DRAWN",
    "UNLISTED",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "FederationConfig",
    "LocalConfig",
    "OutputConfig",
    "PrivacyConfig",
    "ResourcesConfig",
    "Section",
    "allowed",
    "apply",
    "assign",
    "check",
    "completed",
    "differences",
    "followed",
    "load",
    "load_data",
    "located",
    "located_data",
    "overlay",
    "override",
    "read",
    "recipe",
    "recipes",
    "setting",
    "settings",
    "settled",
]
