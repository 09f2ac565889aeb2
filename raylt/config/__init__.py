"""The configuration: what there is to set (sections.py), how it is read (reading.py), what comes with raylt
(recipes.py), what two of them differ in (comparing.py). Imports no torch."""

from raylt.config.comparing import differences, settled
from raylt.config.keywords import apply
from raylt.config.reading import assign, check, load, load_data, override, read
from raylt.config.recipes import DEMO, recipe, recipes
from raylt.config.sections import (
    Config,
    DataConfig,
    EvaluationConfig,
    FederationConfig,
    LocalConfig,
    OutputConfig,
    ResourcesConfig,
    Section,
    allowed,
    setting,
    settings,
)

__all__ = ["DEMO", "Config", "DataConfig", "EvaluationConfig", "FederationConfig", "LocalConfig", "OutputConfig",
           "ResourcesConfig", "Section", "allowed", "apply", "assign", "check", "differences", "load", "load_data",
           "override", "read", "recipe", "recipes", "setting", "settings", "settled"]
