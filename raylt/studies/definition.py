"""`Definition`: a study's arms, cells and seeds, read from YAML and checked before any run starts.

    name: aligner
    recipe: sfd/cifar10_if100_alpha0.05_k10      # or base: {...}, or both
    arms:
      fedavg: {method: fedavg}
      full: {method: sfd}
      without aligner: {method: {name: sfd, aligner: false}}
    cells: {data.imbalance: [10, 50]}                   # a product, a list of mappings, or mappings by name
    seeds: 6
    claims: [full > fedavg on few, full > without aligner]

A run is one arm in one cell with one seed. The seed sets both `seed` and `data.seed`. Arms of one cell and seed
therefore train on the same split, and their differences are paired.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, ValidationInfo, field_validator

from raylt.config import Config, Section, check
from raylt.config.sections import LAST_SEED
from raylt.disk import LONGEST_NAME
from raylt.errors import ConfigError, did_you_mean
from raylt.studies.analysis.claims import Claim, read_claim
from raylt.studies.analysis.measures import At, measure_of
from raylt.studies.cells import Cells, cells_by_label, folder_of, slug
from raylt.studies.running.tuning import Metric, Outcomes, Tuning
from raylt.studies.settings import merge, read_recipe, read_yaml, resolved

# Files of raylt in a study's folder, next to the folders of its cells or arms.
_FILES = ("study.yaml", "seal.json", "results.json", "recorded.json", "tuned.json", "tuning.log", "report.html")
MAX_SEEDS = 10_000
MAX_RUNS = 100_000
RecipeReader = Callable[[str], dict[str, Any]]
_ARM = re.compile(r"[\w(][\w .,+()=/-]*")


@dataclass(frozen=True)
class Planned:
    """One planned run of a study: its cell, arm, seed, settings and folder.

    Attributes:
        folder: Path of the run, relative to the study's folder.
    """

    cell: str
    arm: str
    seed: int
    config: Config
    folder: str


class Definition(Section):
    """A study as its author wrote it: arms, cells, seeds and claims."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][\w.-]*$",
        max_length=LONGEST_NAME,
        json_schema_extra={"takes": "a name of letters, digits, _, . and -, with a letter or digit first"},
    )
    about: str = ""
    recipe: str | None = None
    base: dict[str, Any] = Field(default={})
    arms: dict[str, dict[str, Any]] = Field(
        min_length=1, json_schema_extra={"takes": "a mapping from names to methods or settings, as in {prox: fedprox}"}
    )
    cells: Cells = Field(default={})
    only: dict[str, list[str]] = Field(default={})  # arms to run, by cell label, for cells without all arms
    seeds: int | list[int] = 3
    measure: str = "accuracy"
    at: At = "last"
    reference: str | None = None
    # {CLAIM: difference printed in a paper, in points}
    claims: list[str | dict[str, float]] = Field(
        default=[], json_schema_extra={"takes": "a list of claims, as in [a > b, a > b on few, {b > c: 1.5}]"}
    )
    tune: Tuning | None = None
    paper: str | None = None  # paper to compare the runs with; set by raylt reproduce
    scale: float = Field(default=1.0, gt=0, le=1)

    @field_validator("arms", mode="before")
    @classmethod
    def _arms(cls, value: Any) -> Any:
        """Expand the short form `arm: fedprox` to `arm: {method: fedprox}`."""
        if not isinstance(value, dict):
            return value
        return {name: {"method": arm} if isinstance(arm, str) else arm for name, arm in value.items()}

    @field_validator("claims", mode="before")
    @classmethod
    def _claims(cls, value: Any) -> Any:
        """Refuse what is not a claim, since pydantic would only say that it is not text."""
        for claim in value if isinstance(value, list) else []:
            numbers = claim.values() if isinstance(claim, dict) else []
            if not isinstance(claim, str | dict) or not all(_is_finite(number) for number in numbers):
                raise ValueError("must be texts, or texts with a number")
        return value

    @field_validator("seeds", mode="before")
    @classmethod
    def _no_truth_values(cls, value: Any) -> Any:
        """Refuse true and false in a list of seeds, which would count as 1 and 0."""
        if isinstance(value, list) and any(isinstance(seed, bool) for seed in value):
            raise ValueError("must be whole numbers, not true or false")
        return value

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, value: int | list[int]) -> int | list[int]:
        if isinstance(value, int) and not 1 <= value <= MAX_SEEDS:
            raise ValueError(f"must be from 1 to {MAX_SEEDS:,}")
        if isinstance(value, list) and (not value or len(set(value)) < len(value) or min(value) < 0):
            raise ValueError("must be different seeds, each at least 0")
        if isinstance(value, list) and (len(value) > MAX_SEEDS or max(value) > LAST_SEED):
            raise ValueError(f"must be at most {MAX_SEEDS:,} seeds, each at most {LAST_SEED}")
        return value

    @field_validator("tune")
    @classmethod
    def _metric(cls, value: Tuning | None, info: ValidationInfo) -> Tuning | None:
        """Return the settings of the searches with a metric: by default the figure by which the study compares."""
        if value is None or value.metric is not None:
            return value
        measure = info.data.get("measure")
        return value.model_copy(update={"metric": measure if measure in get_args(Metric) else "accuracy"})

    @property
    def compared_to(self) -> str:
        """The reference arm: the first arm, unless `reference` names another."""
        return self.reference or next(iter(self.arms))

    @property
    def all_seeds(self) -> list[int]:
        """The seeds that every arm uses in every cell."""
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @cached_property
    def all_cells(self) -> dict[str, dict[str, Any]]:
        """A mapping from each cell's label to the settings of the cell, in the file's order.

        A study without `cells` has one cell, labelled "".

        Raises:
            ConfigError: Two cells would have the same label, or there are too many cells.
        """
        return cells_by_label(self.cells)

    @property
    def parsed_claims(self) -> list[Claim]:
        """The claims as parsed by `read_claim`.

        Raises:
            ConfigError: A claim cannot be read or names an unknown arm.
        """
        parsed = []
        for claim in self.claims:
            printed_by_text = {claim: None} if isinstance(claim, str) else claim
            for text, printed in printed_by_text.items():
                parsed.append(read_claim(text, list(self.arms), self.measure, printed))
        return parsed

    def arms_of(self, cell: str) -> Sequence[str]:
        """Return the names of the arms that run in a cell."""
        return self.only.get(cell, list(self.arms))

    def runs(self, tuned: Outcomes | None = None) -> list[Planned]:
        """Return every run of the study, ordered by cell, then seed, then arm.

        Args:
            tuned: Outcomes of tuning; without them the arms have the study's own settings.

        Raises:
            ConfigError: A setting is unknown or has a wrong value.
        """
        read = cache(read_recipe)  # read each recipe only once
        return [
            self._planned(cell, arm, seed, tuned, read)
            for cell in self.all_cells
            for seed in self.all_seeds
            for arm in self.arms_of(cell)
        ]

    def run(self, cell: str, arm: str, seed: int, tuned: Outcomes | None = None) -> Planned:
        """Return the planned run of an arm in a cell with a seed.

        The seed need not be one of the study's seeds.
        """
        return self._planned(cell, arm, seed, tuned, read_recipe)

    def _planned(self, cell: str, arm: str, seed: int, tuned: Outcomes | None, read: RecipeReader) -> Planned:
        outcome = (tuned or {}).get(cell, {}).get(arm)
        tree = self._settings(cell, arm, seed, read)
        config = resolved(merge(tree, outcome["values"]) if outcome else tree, f"arm {arm!r}")
        return Planned(cell, arm, seed, config, folder_of(cell, arm, seed))

    def bases(self) -> dict[tuple[str, str], Config]:
        """Return the settings from which tuning starts, by cell and arm; see `base_of`."""
        return {(cell, arm): self.base_of(cell, arm) for cell in self.all_cells for arm in self.arms_of(cell)}

    def base_of(self, cell: str, arm: str) -> Config:
        """Return the settings from which the tuning of an arm in a cell starts.

        They have the first seed, and only the method fields that the study sets.
        """
        return check(Config, self._settings(cell, arm, self.all_seeds[0], read_recipe))

    def check_names(self) -> None:
        """Check that names can be folder names, and that claims and references name existing arms, cells and measures.

        Raises:
            ConfigError: A name is wrong.
        """
        self._check_arms()
        self._check_cells()
        self._check_only()
        self._check_size()
        self._check_tuning()
        self._check_measures()
        self._check_claims()

    def _check_arms(self) -> None:
        for arm in self.arms:
            if not _ARM.fullmatch(arm) or " on " in arm or slug(arm) in ("", ".", ".."):
                raise ConfigError(
                    f"study.arms: not a valid arm name ({arm!r}). Use letters, digits, spaces and .,+()=/- without "
                    "' on '.",
                    code="study.bad-name",
                    key="study.arms",
                    name=arm,
                )
            _check_folder("study.arms", arm)
        folders: dict[str, str] = {}
        for arm in self.arms:
            first = folders.setdefault(slug(arm), arm)
            if first != arm:
                raise _shared_folder("study.arms", [first, arm], slug(arm))
        if self.reference is not None and self.reference not in self.arms:
            raise _unknown("study.reference", "arm", self.reference, self.arms)

    def _check_cells(self) -> None:
        if not self.all_cells:
            raise ConfigError(
                f"study.cells: no cell ({self.cells}). Give each setting at least one value.",
                code="config.out-of-range",
                key="study.cells",
                value=self.cells,
            )
        folders: dict[str, str] = {}
        for cell in self.all_cells:
            folder = slug(cell)
            if folder in (".", "..") or (not folder and len(self.all_cells) > 1):
                raise ConfigError(
                    f"study.cells: cannot be the name of a folder ({cell!r}). Give the cell a name with letters or "
                    "digits, as in cells: {NAME: {SETTING: VALUE}}.",
                    code="study.bad-name",
                    key="study.cells",
                    name=cell,
                )
            _check_folder("study.cells", cell)
            if folder in folders:
                raise _shared_folder("study.cells", [folders[folder], cell], folder)
            folders[folder] = cell

    def check_new(self) -> None:
        """Check requirements on new studies, which existing studies need not meet.

        Raises:
            ConfigError: Settings contain a seed, which the study sets itself, or no samples are held out for `at:
                validation`.
        """
        self._check_seeds()
        for planned in self.runs():
            if self.at == "validation" and not planned.config.data.validation:
                raise ConfigError(
                    f"study.at: validation needs held-out samples, and arm {planned.arm!r} has none (data.validation "
                    "= 0). Set data.validation, or leave out at.",
                    code="config.conflict",
                    key="study.at",
                    value=self.at,
                    arm=planned.arm,
                )

    def _check_seeds(self) -> None:
        parts = [("base", self.base)]
        parts += [("arms", settings) for settings in self.arms.values()]
        parts += [("cells", settings) for settings in self.all_cells.values()]
        for part, settings in parts:
            tree = merge({}, settings)
            data = tree.get("data")
            for name, section in (("seed", tree), ("data.seed", data if isinstance(data, dict) else {})):
                if "seed" in section:
                    raise ConfigError(
                        f"study.{part}: sets {name}, which the study sets itself ({section['seed']}). Leave it out, "
                        "and write the seeds as seeds: [0, 1, 2].",
                        code="config.conflict",
                        key=f"study.{part}",
                        setting=name,
                        value=section["seed"],
                    )

    def _check_only(self) -> None:
        for cell, arms in self.only.items():
            if cell not in self.all_cells:
                raise _unknown("study.only", "cell", cell, self.all_cells)
            for arm in arms:
                if arm not in self.arms:
                    raise _unknown("study.only", "arm", arm, self.arms)
            if not arms or len(set(arms)) < len(arms):
                raise ConfigError(
                    f"study.only: {cell!r} has no arm, or an arm twice ({arms}). Name at least one arm, each once.",
                    code="config.out-of-range",
                    key="study.only",
                    cell=cell,
                    value=arms,
                )

    def _check_size(self) -> None:
        count = len(self.all_seeds) * sum(len(self.arms_of(cell)) for cell in self.all_cells)
        if count > MAX_RUNS:
            raise ConfigError(
                f"study: plans more than {MAX_RUNS:,} runs, one for each arm, cell and seed ({count:,}). Give fewer "
                "seeds, cells or arms.",
                code="config.out-of-range",
                key="study",
                value=count,
            )

    def _check_tuning(self) -> None:
        if self.tune is None:
            return
        for arm in self.tune.fields:
            if arm not in self.arms:
                raise _unknown("study.tune.fields", "arm", arm, self.arms)
        for key in self.tune.ranges:
            if key == "seed" or key.partition(".")[0] in ("data", "federation", "evaluation"):
                raise ConfigError(
                    f"study.tune.ranges: arms that are compared share their splits, budgets and evaluations, so no arm "
                    f"is tuned in them ({key}). Put the setting into base or cells.",
                    code="config.conflict",
                    key="study.tune.ranges",
                    value=key,
                )
        for cell in self.all_cells:
            if self.compared_to not in self.arms_of(cell):
                raise ConfigError(
                    f"study.tune: the budget is counted in runs of the reference arm, which cell {cell!r} does not "
                    f"have ({self.compared_to}). Set reference to an arm that every cell has.",
                    code="config.conflict",
                    key="study.tune",
                    cell=cell,
                    arm=self.compared_to,
                )

    def _check_measures(self) -> None:
        measures = [("study.measure", self.measure)]
        measures += [("study.claims", name) for claim in self.parsed_claims for name in claim.measures]
        for key, measure in measures:
            try:
                measure_of(measure)
            except ConfigError as error:
                fault = str(error).removeprefix("measure: ")
                raise ConfigError(f"{key}: {fault}", code=error.code, **error.details | {"key": key}) from None
        if self.at != "last" and measure_of(self.measure).every_round is None:
            raise ConfigError(
                f"study.at: {self.measure} is computed only after the last round ({self.at}). Leave out at, or give a "
                "measure that is computed in every round, such as accuracy.",
                code="config.conflict",
                key="study.at",
                value=self.at,
                measure=self.measure,
            )

    def _check_claims(self) -> None:
        """Refuse claims that compare the same two arms on the same measure: each test enlarges Holm's family."""
        first_by_pair: dict[tuple[frozenset[tuple[str, str]], str], Claim] = {}
        for claim in self.parsed_claims:
            sides = frozenset(zip((claim.better, claim.worse), claim.measures, strict=True))
            first = first_by_pair.setdefault((sides, claim.measure), claim)
            if first is not claim:
                raise ConfigError(
                    f"study.claims: compare the same arms on the same measure twice ({first}; {claim}). Leave one of "
                    "them out; the test is two-sided.",
                    code="study.bad-claim",
                    key="study.claims",
                    value=[str(first), str(claim)],
                )

    def _settings(self, cell: str, arm: str, seed: int, read: RecipeReader) -> dict[str, Any]:
        settings = self.all_cells[cell]
        without_recipe = {key: value for key, value in settings.items() if key != "recipe"}
        recipe = settings.get("recipe", self.recipe)
        tree = merge({} if recipe is None else read(recipe), self.base)
        tree = merge(tree, without_recipe)
        tree = merge(tree, self.arms[arm])
        return merge(tree, {"seed": seed, "data.seed": seed})


def read_definition(path: Path) -> Definition:
    """Read a study from a YAML file.

    The study is named after the file, unless the file sets a name.

    Raises:
        ConfigError: The file cannot be read, or its content is invalid.
    """
    return _defined(read_yaml(path), path)


def reread_definition(path: Path) -> Definition:
    """Read the definition that raylt wrote into a study's folder.

    Earlier versions left out the metric of the searches where it was accuracy.

    Raises:
        ConfigError: As for `read_definition`.
    """
    tree = read_yaml(path)
    if isinstance(tree.get("tune"), dict):
        tree = tree | {"tune": {"metric": "accuracy"} | tree["tune"]}
    return _defined(tree, path)


def _defined(tree: dict[str, Any], path: Path) -> Definition:
    defaults = {"name": path.stem}
    recipe = tree.get("recipe")
    files = [folder / recipe for folder in (path.parent, Path()) if isinstance(recipe, str)]
    existing = [file for file in files if file.is_file()]
    if existing:
        # absolute, because the study's folder stores this path and may be opened from any working directory
        tree = tree | {"recipe": str(existing[0].absolute())}
    return define(defaults | tree)


def define(tree: Mapping[str, Any]) -> Definition:
    """Return the study that a mapping defines, after checking the settings of every run.

    Raises:
        ConfigError: The definition is invalid.
    """
    definition: Definition = check(Definition, dict(tree), prefix="study.")
    definition.check_names()
    definition.runs()
    return definition


def _is_finite(value: Any) -> bool:
    # math.isfinite would fail with an integer beyond the largest float
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check_folder(key: str, name: str) -> None:
    """Check that a name makes a folder that is short enough, and not one of raylt's files in a study's folder.

    Raises:
        ConfigError: The name is too long, or is the name of a file.
    """
    folder = slug(name)
    if folder in _FILES or len(folder.encode()) > LONGEST_NAME:
        problem = "is the name of a file of raylt" if folder in _FILES else f"is longer than {LONGEST_NAME} bytes"
        raise ConfigError(
            f"{key}: the folder of {name!r} {problem}. Give it another name.",
            code="study.bad-name",
            key=key,
            name=name,
        )


def _shared_folder(key: str, names: Sequence[str], folder: str) -> ConfigError:
    first, second = names
    return ConfigError(
        f"{key}: {first!r} and {second!r} would share a folder ({folder}). Give names that differ in letters or "
        "digits.",
        code="study.duplicate-name",
        key=key,
        names=list(names),
        folder=folder,
    )


def _unknown(key: str, kind: str, name: str, names: Iterable[str]) -> ConfigError:
    names = list(names)
    choices = ", ".join(name or repr(name) for name in names)  # a study's only cell has the name ""
    return ConfigError(
        f"{key}: unknown {kind} ({name!r}). {did_you_mean(name, names)}Choose from {choices}.",
        code="config.unknown-name",
        key=key,
        name=name,
    )
