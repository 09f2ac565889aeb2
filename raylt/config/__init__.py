"""The configuration: what there is to set (sections.py), how it is read (reading.py), what comes with raylt
(recipes.py), what two of them differ in (comparing.py). Imports no torch."""

from raylt.config.comparing import DRAWN, completed, differences, followed, settled
from raylt.config.data import BENCHMARKS, DataConfig
from raylt.config.keywords import apply
from raylt.config.reading import assign, check, load, load_data, overlay, override, read
from raylt.config.recipes import DEMO, recipe, recipes
from raylt.config.section import Section, setting
from raylt.config.sections import (
    Config,
    EvaluationConfig,
    FederationConfig,
    LocalConfig,
    OutputConfig,
    PrivacyConfig,
    ResourcesConfig,
    allowed,
    settings,
)

__all__ = ["BENCHMARKS", "DEMO", "DRAWN", "Config", "DataConfig", "EvaluationConfig", "FederationConfig",
           "LocalConfig", "OutputConfig", "PrivacyConfig", "ResourcesConfig", "Section", "allowed", "apply", "assign",
           "check", "completed", "differences", "followed", "load", "load_data", "overlay", "override", "read",
           "recipe", "recipes", "setting", "settings", "settled"]
