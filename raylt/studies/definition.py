"""`Definition`: what a study compares, read from YAML and checked before anything runs.

    name: aligner
    recipe: sfd/cifar10_if100_alpha0.05_k10      # or base: {...}, or both
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from raylt.config import Config, Section, check
from raylt.errors import ConfigError
from raylt.studies.claims import Claim, read_claim
from raylt.studies.measures import At, measure_of
from raylt.studies.settings import label, merge, read_recipe, read_yaml, resolved, slug
from raylt.studies.tuning import Outcomes, Tuning

_ARM = re.compile(r"[\w(][\w .,+()=/-]*")


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
    base: dict[str, Any] = Field(default={})
    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    cells: dict[str, list[Any]] | list[dict[str, Any]] | dict[str, dict[str, Any]] = Field(default={})
    only: dict[str, list[str]] = Field(default={})      # arms of a cell, by its label, where it has not all
    seeds: int | list[int] = 3
    measure: str = "accuracy"
    at: At = "last"
    reference: str | None = None
    claims: list[str | dict[str, float]] = Field(default=[])     # {CLAIM: how far a paper has it, in points}
    tune: Tuning | None = None
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
            if not _ARM.fullmatch(arm) or " on " in arm or slug(arm) in ("", ".", ".."):
                raise ConfigError(f"study.arms: {arm!r}: a name has letters, digits, spaces and .,+()=/- and no ' on '")
        if len({slug(arm) for arm in self.arms}) < len(self.arms):
            raise ConfigError("study.arms: two arms would share a folder; give names that differ in letters or digits")
        self._check_cells()
        if self.reference is not None and self.reference not in self.arms:
            raise ConfigError(f"study.reference = {self.reference!r}: no such arm; there are: {', '.join(self.arms)}")
        for cell, arms in self.only.items():
            if cell not in self.all_cells or not set(arms) <= set(self.arms):
                raise ConfigError(f"study.only: {cell!r}: {arms}; there are the cells {', '.join(self.all_cells)} and "
                                  f"the arms {', '.join(self.arms)}")
            if not arms or len(set(arms)) < len(arms):
                raise ConfigError(f"study.only: {cell!r}: {arms}; give at least one arm, and each once")
        for arm in self.tune.fields if self.tune else ():
            if arm not in self.arms:
                raise ConfigError(f"study.tune.fields: {arm!r} is no arm; there are: {', '.join(self.arms)}")
        for cell in self.all_cells if self.tune else ():
            if self.compared_to not in self.only.get(cell, self.arms):
                raise ConfigError(f"study.tune: the budget is counted in runs of {self.compared_to!r}, which cell "
                                  f"{cell!r} has not; set reference to an arm that every cell has")
        for measure in (self.measure, *(name for claim in self.parsed_claims for name in claim.measures)):
            try:
                measure_of(measure)
            except ConfigError as error:
                raise ConfigError(f"study: {error}") from None
        if self.at != "last" and measure_of(self.measure).every_round is None:
            raise ConfigError(f"study.at = {self.at}: {self.measure} is known after the last round only; leave it out, "
                              "or give a measure that every round has, as accuracy")

    def _check_cells(self) -> None:
        """Raises a ConfigError where cells would share a folder, or one would not have its own in the study's."""
        folders: dict[str, str] = {}
        if not self.all_cells:
            raise ConfigError(f"study.cells: {self.cells}: no cell; give each setting at least one value")
        for cell in self.all_cells:
            folder = slug(cell)
            if folder in (".", "..") or (not folder and len(self.all_cells) > 1):
                raise ConfigError(f"study.cells: {cell!r}: cannot be a folder; give a name with letters or digits, "
                                  "as in cells: {NAME: {SETTING: VALUE}}")
            if folder in folders:
                raise ConfigError(f"study.cells: {folders[folder]!r} and {cell!r} would share the folder {folder}; "
                                  "give names that differ in letters or digits, as in cells: {NAME: {SETTING: VALUE}}")
            folders[folder] = cell

    @property
    def parsed_claims(self) -> list[Claim]:
        """The claims, as `read_claim` reads them.

        Raises:
            ConfigError: one cannot be read or names an arm that is not there.
        """
        claims = [{claim: None} if isinstance(claim, str) else claim for claim in self.claims]
        return [read_claim(text, list(self.arms), self.measure, printed)
                for claim in claims for text, printed in claim.items()]

    @property
    def compared_to(self) -> str:
        """The arm that all others are compared to: the first, unless one is named."""
        return self.reference or next(iter(self.arms))

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @cached_property
    def all_cells(self) -> dict[str, dict[str, Any]]:
        """Settings of each cell by its label, in the order of the file; one cell without a name where none is asked.

        Raises:
            ConfigError: two would have the same label.
        """
        if isinstance(self.cells, list):
            return _labelled(self.cells or [{}])
        named = {name: each for name, each in self.cells.items() if isinstance(each, dict)}
        if named:
            return named
        lists = {key: each for key, each in self.cells.items() if isinstance(each, list)}
        return _labelled([dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())])

    def runs(self, tuned: Outcomes | None = None) -> list[Planned]:
        """Every run, cell by cell, seed by seed, arm by arm.

        Args:
            tuned: what came of tuning; without it arms have the settings that the study gives.

        Raises:
            ConfigError: a setting does not exist or does not fit.
        """
        return [self.run(cell, arm, seed, tuned) for cell in self.all_cells for seed in self.all_seeds
                for arm in self.only.get(cell, self.arms)]

    def run(self, cell: str, arm: str, seed: int, tuned: Outcomes | None = None) -> Planned:
        """One run of an arm in a cell, also with a seed that the study has not; see `runs`."""
        outcome = (tuned or {}).get(cell, {}).get(arm)
        tree = self._settings(cell, arm, seed)
        config = resolved(merge(tree, outcome["values"]) if outcome else tree, f"arm {arm!r}")
        folder = "/".join(part for part in (slug(cell), slug(arm), f"seed-{seed}") if part)
        return Planned(cell, arm, seed, config, folder)

    def bases(self) -> dict[tuple[str, str], Config]:
        """Of each cell and arm the settings that it is tuned from: those of the first seed, with only those fields of
        the method that the study gives."""
        return {(cell, arm): self.base_of(cell, arm) for cell in self.all_cells
                for arm in self.only.get(cell, self.arms)}

    def base_of(self, cell: str, arm: str) -> Config:
        return check(Config, self._settings(cell, arm, self.all_seeds[0]))

    def _settings(self, cell: str, arm: str, seed: int) -> dict[str, Any]:
        settings = self.all_cells[cell]
        here = {key: value for key, value in settings.items() if key != "recipe"}
        recipe = settings.get("recipe", self.recipe)
        ground = merge({} if recipe is None else read_recipe(recipe), self.base)
        return merge(merge(merge(ground, here), self.arms[arm]), {"seed": seed, "data.seed": seed})


def _labelled(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    named: dict[str, dict[str, Any]] = {}
    for cell in cells:
        other = named.setdefault(label(cell), cell)
        if other is not cell:
            raise ConfigError(f"study.cells: {other} and {cell} would both be called {label(cell)!r}; give each a "
                              "name, as in cells: {NAME: {SETTING: VALUE}}, or leave one out")
    return named


def read_definition(path: Path) -> Definition:
    """The study in a YAML file; its name is the file's where it gives none.

    Raises:
        ConfigError: unreadable, or something in it is wrong; names the value and the remedy.
    """
    tree = read_yaml(path)
    named = tree.get("recipe")
    files = [file for place in (path.parent, Path()) if isinstance(named, str) and (file := place / named).is_file()]
    # by its whole name: the study's folder will name it too, and is read from anywhere
    return define({"name": path.stem} | tree | ({"recipe": str(files[0].absolute())} if files else {}))


def define(tree: Mapping[str, Any]) -> Definition:
    """A study from a mapping, checked to the settings of its last run."""
    definition: Definition = check(Definition, dict(tree), prefix="study.")
    definition.check_names()
    definition.runs()
    return definition
