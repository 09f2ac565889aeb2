"""`Claim`, a statement that one arm of a study is better than another, and `judge`, which tests claims on runs."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from raylt.errors import ConfigError, did_you_mean
from raylt.studies.analysis.answers import Flips
from raylt.studies.analysis.measures import At, measure_of
from raylt.studies.analysis.statistics import Paired, holm, paired

SIGNIFICANT = 0.05
Values = dict[tuple[str, str], dict[int, float]]  # by (arm, cell) and seed


@dataclass(frozen=True)
class Claim:
    """A claim that the arm `better` has a better value of `measure` than the arm `worse`.

    Attributes:
        models: Model to compare on each side, if a method judges several models of a client; "" for its main model.
        printed: Difference printed in a paper, in the unit of the tables, such as points of accuracy.
    """

    better: str
    worse: str
    measure: str
    models: tuple[str, str] = ("", "")
    printed: float | None = None

    @property
    def measures(self) -> tuple[str, str]:
        """The measures of the better and of the worse arm, in the form that `measure_of` takes."""
        better, worse = (f"{self.measure}@{model}" if model else self.measure for model in self.models)
        return better, worse

    def __str__(self) -> str:
        better, worse = (
            f"{arm}@{model}" if model else arm
            for arm, model in zip((self.better, self.worse), self.models, strict=True)
        )
        return f"{better} > {worse} on {self.measure}"


@dataclass(frozen=True)
class Judged:
    """A claim with the outcome of its test in one cell of the study.

    Attributes:
        at: Rounds whose figures are compared.
        p: The p value, adjusted by Holm over all claims and cells with a p value. None with too few seeds or without
            spread.
        verdict: "holds", "refuted" (the opposite is significant), "open" or "too few seeds". If all differences are the
            same, it is "no difference" if each is 0, and "no spread" otherwise. It is "runs failed" if the claim would
            hold or be refuted, but the arm with the better figures failed with a seed that the other arm finished.
        planned: Number of seeds of the cell.
        flips: Answers that differ between the arms; None if the runs did not record answers.
    """

    claim: Claim
    cell: str
    at: At
    difference: Paired
    p: float | None
    verdict: str
    planned: int
    flips: Flips | None = None


def read_claim(text: str, arms: Sequence[str], measure: str, printed: float | None = None) -> Claim:
    """Parse a claim such as "a > b", "a < b" or "a > b on MEASURE", where a and b are arms.

    "a@MODEL" selects the model with this name of the clients of a.

    Args:
        text: The claim.
        arms: Names of the study's arms.
        measure: Measure to use if the claim names none.
        printed: Difference printed in a paper.

    Raises:
        ConfigError: The claim cannot be parsed or names an unknown arm.
    """
    parts = re.fullmatch(r"(.+?)\s*([<>])\s*(.+?)(?:\s+on\s+([\w@]+))?", text.strip())
    if parts is None:
        raise ConfigError(
            f"study.claims: cannot be read ({text!r}). Write ARM > ARM, or ARM > ARM on few.",
            code="study.bad-claim",
            key="study.claims",
            value=text,
        )
    left, sign, right, named = parts.groups()
    sides = (left, right) if sign == ">" else (right, left)
    (better, _, better_model), (worse, _, worse_model) = (side.partition("@") for side in sides)
    for arm in (better, worse):
        if arm not in arms:
            raise ConfigError(
                f"study.claims: unknown arm in {text!r} ({arm}). {did_you_mean(arm, arms)}"
                f"Choose from {', '.join(arms)}.",
                code="config.unknown-name",
                key="study.claims",
                value=text,
                name=arm,
            )
    if (better_model or worse_model) and "@" in (named or measure):
        raise ConfigError(
            f"study.claims: both an arm and the measure name a model ({text!r}). Leave one of them out.",
            code="study.bad-claim",
            key="study.claims",
            value=text,
        )
    if (better, better_model) == (worse, worse_model):
        raise ConfigError(
            f"study.claims: compares an arm with itself ({text!r}). Name two arms.",
            code="study.bad-claim",
            key="study.claims",
            value=text,
        )
    return Claim(better, worse, named or measure, (better_model, worse_model), printed)


@dataclass(frozen=True)
class ClaimFigures:
    """A claim with the measured figures of both its arms, by cell and seed.

    Attributes:
        failed: Seeds of failed runs, by arm and cell.
        planned: Number of seeds by cell.
        flips: Answers that differ between the arms, by cell, for a claim on the accuracy after the last round.
    """

    claim: Claim
    at: At
    better: Values
    worse: Values
    failed: Mapping[tuple[str, str], Collection[int]]
    planned: Mapping[str, int]
    flips: Mapping[str, Flips] = field(default_factory=dict)

    def difference(self, cell: str, level: float) -> Paired | None:
        """Return the paired difference of the two arms in a cell, or None if they have no common seed."""
        better, worse = self._by_seed(cell)
        return difference(better, worse, level)

    def unjudged(self, cell: str, finished: Mapping[tuple[str, str], bool]) -> list[str]:
        """Return the reasons why the claim is not tested in a cell.

        The list is empty if the claim is tested, or if the cell does not have both arms.

        Args:
            cell: The cell.
            finished: Whether an arm has finished runs in a cell, by arm and cell.
        """
        arms = (self.claim.better, self.claim.worse)
        if any((arm, cell) not in finished for arm in arms):
            return []
        name = f"claim {self.claim}{f' in {cell}' if cell else ''}"
        sides = list(zip(arms, self.claim.measures, (self.better, self.worse), strict=True))
        if lacking := [
            f"{name}: {arm} has no finished run"
            for arm, _, values in sides
            if not finished[arm, cell] and (arm, cell) not in values
        ]:
            return lacking
        lacking = [f"{name}: {arm} has no {measure}" for arm, measure, values in sides if (arm, cell) not in values]
        better, worse = self._by_seed(cell)
        apart = [] if better.keys() & worse.keys() else [f"{name}: its arms have no seed in common"]
        return lacking or apart

    def verdict(self, cell: str, pair: Paired, p: float | None) -> str:
        """Return the verdict on the claim in a cell; see `Judged`.

        Args:
            cell: The cell.
            pair: The difference of the arms.
            p: The p value, adjusted by Holm; None if there is none.
        """
        if p is None:
            return pair.untested
        if p >= SIGNIFICANT:
            return "open"
        estimate = pair.difference.estimate
        holds = estimate > 0 if measure_of(self.claim.measure).higher else estimate < 0
        better, worse = self._by_seed(cell)
        favoured, other = (self.claim.better, worse) if holds else (self.claim.worse, better)
        if any(seed in other for seed in self.failed.get((favoured, cell), ())):
            return "runs failed"
        return "holds" if holds else "refuted"

    def _by_seed(self, cell: str) -> tuple[dict[int, float], dict[int, float]]:
        return self.better.get((self.claim.better, cell), {}), self.worse.get((self.claim.worse, cell), {})


def judge(claims: Sequence[ClaimFigures], cells: Sequence[str], level: float) -> list[Judged]:
    """Test every claim in each cell that has both arms.

    All tests form one family, for which the p values are adjusted.

    Args:
        claims: The claims with their figures.
        cells: Names of the cells.
        level: Confidence of the intervals.
    """
    pairs: list[tuple[ClaimFigures, str, Paired]] = []
    for figures in claims:
        for cell in cells:
            pair = figures.difference(cell, level)
            if pair is not None:
                pairs.append((figures, cell, pair))
    p_values = {index: pair.p for index, (_, _, pair) in enumerate(pairs) if pair.p is not None}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return [
        Judged(
            figures.claim,
            cell,
            figures.at,
            pair,
            adjusted.get(index),
            figures.verdict(cell, pair, adjusted.get(index)),
            figures.planned[cell],
            figures.flips.get(cell),
        )
        for index, (figures, cell, pair) in enumerate(pairs)
    ]


def difference(values: Mapping[int, float], reference: Mapping[int, float], level: float) -> Paired | None:
    """Return the mean difference to a reference, paired by seed, or None without a common seed."""
    both = [seed for seed in values if seed in reference]
    return paired([values[seed] for seed in both], [reference[seed] for seed in both], level) if both else None
