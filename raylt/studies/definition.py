"""`Definition`: what a study compares, read from YAML and checked before anything runs.

    name: aligner
    recipe: sfd/cifar10_if100_alpha0.05_k10.yaml      # or base: {...}, or both
    arms:
      fedavg: {method: fedavg}
      full: {method: sfd}
      without aligner: {method: {name: sfd, aligner: false}}
    cells: {data.imbalance: [10, 50]}                   # a product, a list of mappings, or mappings by name
    seeds: 6
    claims: [full > fedavg on few, full > without aligner]

A run is one arm in one cell with one seed, which is `seed` and `data.seed` alike: arms of one cell and seed train on
the same split, so their differences are paired.
"""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from raylt.config import Config, Section, check
from raylt.errors import ConfigError
from raylt.registry import resolve
from raylt.studies.measures import MEASURES

RECIPES = Path(__file__).parents[1] / "recipes"
# what a cell is called: the paper's letter, and nothing for a value that speaks for itself
_LETTERS = {"data.imbalance": "IF", "data.alpha": "alpha", "data.clients": "K", "data.beta": "beta",
            "federation.rounds": "R", "federation.participation": "r", "data.source": "", "data.partition": "",
            "model": ""}
_ARM = re.compile(r"[\w(][\w .,+()=/-]*")


@dataclass(frozen=True)
class Claim:
    """`better` has a higher (or lower) `measure` than `worse`."""

    better: str
    worse: str
    measure: str

    def __str__(self) -> str:
        return f"{self.better} > {self.worse} on {self.measure}"


@dataclass(frozen=True)
class Planned:
    """One run of a study.

    Attributes:
        folder: relative to the study's.
    """

    cell: str
    arm: str
    seed: int
    config: Config
    folder: str


class Definition(Section):
    """A study as its author wrote it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*$")
    about: str = ""
    recipe: str | None = None
    base: dict[str, Any] = {}
    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    cells: dict[str, list[Any]] | list[dict[str, Any]] | dict[str, dict[str, Any]] = {}
    only: dict[str, list[str]] = {}     # arms of a cell, by its label, where it has not all
    seeds: int | list[int] = 3
    measure: str = "accuracy"
    at: Literal["last", "last10", "best"] = "last"
    reference: str | None = None
    claims: list[str] = []
    paper: str | None = None            # set by raylt reproduce: whose figures the runs are held against
    scale: float = Field(default=1.0, gt=0, le=1)

    @field_validator("arms", mode="before")
    @classmethod
    def _arms(cls, value: Any) -> Any:
        """`arm: fedprox` is short for `arm: {method: fedprox}`."""
        if not isinstance(value, dict):
            return value
        return {name: {"method": arm} if isinstance(arm, str) else arm for name, arm in value.items()}

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, value: int | list[int]) -> int | list[int]:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1")
        if isinstance(value, list) and (not value or len(set(value)) < len(value) or min(value) < 0):
            raise ValueError("must be different seeds, each at least 0")
        return value

    def check_names(self) -> None:
        """Raises a ConfigError where a name is no folder, or a claim, measure or reference names what is not there."""
        for arm in self.arms:
            if not _ARM.fullmatch(arm) or " on " in arm:
                raise ConfigError(f"study.arms: {arm!r}: a name has letters, digits, spaces and .,+()=/- and no ' on '")
        if len({slug(arm) for arm in self.arms}) < len(self.arms):
            raise ConfigError("study.arms: two arms would share a folder; give names that differ in letters or digits")
        if self.reference is not None and self.reference not in self.arms:
            raise ConfigError(f"study.reference = {self.reference!r}: no such arm; there are: {', '.join(self.arms)}")
        for cell, arms in self.only.items():
            if cell not in self.all_cells or not set(arms) <= set(self.arms):
                raise ConfigError(f"study.only: {cell!r}: {arms}; there are the cells {', '.join(self.all_cells)} and the "
                                  f"arms {', '.join(self.arms)}")
        for measure in (self.measure, *(claim.measure for claim in self.parsed_claims)):
            if measure not in MEASURES:
                raise ConfigError(f"study: {measure!r}: no such measure; there are: {', '.join(MEASURES)}")

    @property
    def parsed_claims(self) -> list[Claim]:
        """The claims, "a > b", "a < b" or either with "on MEASURE".

        Raises:
            ConfigError: one cannot be read or names an arm that is not there.
        """
        claims = []
        for text in self.claims:
            parts = re.fullmatch(r"(.+?)\s*([<>])\s*(.+?)(?:\s+on\s+(\w+))?", text.strip())
            if parts is None:
                raise ConfigError(f"study.claims: {text!r}: is written ARM > ARM, or ARM > ARM on few")
            left, sign, right, measure = parts.groups()
            for arm in (left, right):
                if arm not in self.arms:
                    raise ConfigError(f"study.claims: {text!r}: {arm!r} is no arm; there are: "
                                      f"{', '.join(self.arms)}")
            better, worse = (left, right) if sign == ">" else (right, left)
            claims.append(Claim(better, worse, measure or self.measure))
        return claims

    @property
    def compared_to(self) -> str:
        """The arm that all others are compared to: the first, unless one is named."""
        return self.reference or next(iter(self.arms))

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @cached_property
    def all_cells(self) -> dict[str, dict[str, Any]]:
        """Settings of each cell by its label, in the order of the file; one cell without a name where none is asked."""
        if isinstance(self.cells, list):
            return {label(each): each for each in self.cells or [{}]}
        named = {name: each for name, each in self.cells.items() if isinstance(each, dict)}
        if named:
            return named
        lists = {key: each for key, each in self.cells.items() if isinstance(each, list)}
        product = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
        return {label(each): each for each in product}

    def runs(self) -> list[Planned]:
        """Every run, cell by cell, seed by seed, arm by arm.

        Raises:
            ConfigError: a setting does not exist or does not fit.
        """
        base: dict[str, Any] = {}
        if self.recipe is not None:
            base = _read_yaml(recipe_path(self.recipe))
        base = merge(base, self.base)
        planned = []
        for cell, settings in self.all_cells.items():
            here = {key: value for key, value in settings.items() if key != "recipe"}
            ground = merge(_read_yaml(recipe_path(settings["recipe"])), self.base) if "recipe" in settings else base
            for seed in self.all_seeds:
                for arm in self.only.get(cell, self.arms):
                    tree = merge(merge(ground, here), self.arms[arm])
                    tree = merge(tree, {"seed": seed, "data.seed": seed})
                    folder = "/".join(part for part in (slug(cell), slug(arm), f"seed-{seed}") if part)
                    planned.append(Planned(cell, arm, seed, resolved(tree, f"arm {arm!r}"), folder))
        return planned


def read_definition(path: Path) -> Definition:
    """The study in a YAML file; its name is the file's where it gives none.

    Raises:
        ConfigError: unreadable, or something in it is wrong; names the value and the remedy.
    """
    tree = _read_yaml(path)
    return define({"name": path.stem} | tree)


def define(tree: Mapping[str, Any]) -> Definition:
    """A study from a mapping, checked to the settings of its last run."""
    definition: Definition = check(Definition, dict(tree), prefix="study.")
    definition.check_names()
    definition.runs()
    return definition


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others laid over them; keys may be nested or dotted. A method that is named replaces the one before
    with its fields, fields alone are added to it."""
    merged = dict(tree)
    for key, value in changes.items():
        first, dot, rest = str(key).partition(".")
        if first == "method" and not dot:
            value = {"name": value} if isinstance(value, str) else dict(value)
            merged["method"] = value if "name" in value else {**_as_method(merged.get("method")), **value}
        elif dot:
            below = _as_method(merged.get(first)) if first == "method" else merged.get(first, {})
            merged[first] = merge(below, {rest: value})
        elif isinstance(value, Mapping) and isinstance(merged.get(first), Mapping):
            merged[first] = merge(merged[first], value)
        else:
            merged[first] = value
    return merged


def resolved(tree: Mapping[str, Any], who: str = "") -> Config:
    """The configuration of a run with all fields of its method, as a run folder records it."""
    try:
        config: Config = check(Config, dict(tree))
        method = resolve(config).method
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}" if who else str(error)) from None
    return config.model_copy(update={"method": {"name": method.name, **method.model_dump(mode="json")}})


def label(settings: Mapping[str, Any]) -> str:
    """What people call a cell: IF 100, alpha 0.5."""
    words = []
    for key, value in settings.items():
        letter = _LETTERS.get(key, key.rpartition(".")[2])
        text = f"{value:g}" if isinstance(value, float) else str(value)
        words.append(f"{letter} {text}".strip())
    return ", ".join(words)


def slug(text: str) -> str:
    """A name as a folder: IF 100, alpha 0.5 is if100_alpha0.5."""
    joined = re.sub(r"([A-Za-z]) (?=[\d.])", r"\1", text.lower()).replace(", ", "_")
    return re.sub(r"[^\w.+=-]+", "-", joined).strip("-")


def recipe_path(name: str) -> Path:
    """A recipe of the package by its name under raylt/recipes, or a file."""
    return RECIPES / name if (RECIPES / name).is_file() else Path(name)


def _as_method(value: Any) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else dict(value or {})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a YAML file that exists") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping, is a {type(tree).__name__}")
    return tree
