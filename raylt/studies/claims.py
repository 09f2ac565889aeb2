"""`Claim`: that one arm of a study is better than another, as its author writes it; `judge` says what the runs say."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raylt.errors import ConfigError
from raylt.studies.measures import At, measure_of
from raylt.studies.statistics import Paired, holm, paired

SIGNIFICANT = 0.05
Values = dict[tuple[str, str], dict[int, float]]        # by (arm, cell) and seed


@dataclass(frozen=True)
class Claim:
    """`better` has a higher (or lower) `measure` than `worse`.

    Attributes:
        models: whose figure counts on either side, of a method that judges several models of a client; "" for the one
            that it judges first.
        printed: the difference that a paper prints, in the unit that tables show, as in points of accuracy.
    """

    better: str
    worse: str
    measure: str
    models: tuple[str, str] = ("", "")
    printed: float | None = None

    @property
    def measures(self) -> tuple[str, str]:
        """The measure of either side, as `measure_of` takes it."""
        better, worse = (f"{self.measure}@{model}" if model else self.measure for model in self.models)
        return better, worse

    def __str__(self) -> str:
        better, worse = (f"{arm}@{model}" if model else arm
                         for arm, model in zip((self.better, self.worse), self.models, strict=True))
        return f"{better} > {worse} on {self.measure}"


@dataclass(frozen=True)
class Judged:
    """A claim in a cell.

    Attributes:
        at: the rounds that its figures are of.
        p: adjusted by Holm over all claims and cells that have a p value; None: too few seeds for one, or no spread.
        verdict: "holds", "refuted" (the opposite is significant), "open", "too few seeds", or where all differences
            are the same "no difference" (each is 0) or "no spread".
    """

    claim: Claim
    cell: str
    at: At
    difference: Paired
    p: float | None
    verdict: str


def read_claim(text: str, arms: Sequence[str], measure: str, printed: float | None = None) -> Claim:
    """Reads "a > b", "a < b" or either with "on MEASURE"; "a@MODEL" is that model of a's clients.

    Args:
        arms: those that there are.
        measure: where none is given.
        printed: how far a paper has it.

    Raises:
        ConfigError: it cannot be read or names an arm that is not there.
    """
    parts = re.fullmatch(r"(.+?)\s*([<>])\s*(.+?)(?:\s+on\s+([\w@]+))?", text.strip())
    if parts is None:
        raise ConfigError(f"study.claims: {text!r}: is written ARM > ARM, or ARM > ARM on few")
    left, sign, right, named = parts.groups()
    (better, _, better_model), (worse, _, worse_model) = (
        side.partition("@") for side in ((left, right) if sign == ">" else (right, left)))
    for arm in (better, worse):
        if arm not in arms:
            raise ConfigError(f"study.claims: {text!r}: {arm!r} is no arm; there are: {', '.join(arms)}")
    if (better_model or worse_model) and "@" in (named or measure):
        raise ConfigError(f"study.claims: {text!r}: names a model both of an arm and of the measure; leave one out")
    return Claim(better, worse, named or measure, (better_model, worse_model), printed)


@dataclass(frozen=True)
class Sides:
    """A claim with the figures of both its arms, of the rounds `at`."""

    claim: Claim
    at: At
    better: Values
    worse: Values

    def difference(self, cell: str, level: float) -> Paired | None:
        """In one cell; None where the arms have no seed in common there."""
        return difference(*self._figures(cell), level)

    def unjudged(self, cell: str, finished: Collection[tuple[str, str]]) -> list[str]:
        """Why it is not judged in a cell; nothing where it is, or where an arm has no finished run, which is named.

        Args:
            finished: arms and cells that have finished runs.
        """
        if (self.claim.better, cell) not in finished or (self.claim.worse, cell) not in finished:
            return []
        what = f"claim {self.claim}{f' in {cell}' if cell else ''}"
        arms = zip((self.claim.better, self.claim.worse), self.claim.measures, (self.better, self.worse), strict=True)
        lacking = [f"{what}: {arm} has no {measure}" for arm, measure, values in arms if (arm, cell) not in values]
        better, worse = self._figures(cell)
        apart = [] if better.keys() & worse.keys() else [f"{what}: its arms have no seed in common"]
        return lacking or apart

    def _figures(self, cell: str) -> tuple[dict[int, float], dict[int, float]]:
        """Of both arms in a cell, by seed."""
        return self.better.get((self.claim.better, cell), {}), self.worse.get((self.claim.worse, cell), {})


def judge(claims: Sequence[Sides], cells: Sequence[str], level: float) -> list[Judged]:
    """Every claim in each cell that has both its arms; all of them are one family."""
    pairs = [(each, cell, pair) for each in claims for cell in cells
             if (pair := each.difference(cell, level)) is not None]
    tested = [index for index, (_, _, pair) in enumerate(pairs) if pair.p is not None]
    adjusted = dict(zip(tested, holm([p for i in tested if (p := pairs[i][2].p) is not None]), strict=True))
    judged = []
    for index, (each, cell, pair) in enumerate(pairs):
        p = adjusted.get(index)
        higher = measure_of(each.claim.measure).higher
        right = pair.difference.estimate > 0 if higher else pair.difference.estimate < 0
        if p is None:
            verdict = pair.untested
        elif p >= SIGNIFICANT:
            verdict = "open"
        else:
            verdict = "holds" if right else "refuted"
        judged.append(Judged(each.claim, cell, each.at, pair, p, verdict))
    return judged


def difference(ours: Mapping[int, float], theirs: Mapping[int, float], level: float) -> Paired | None:
    """The difference over the seeds that both have; None where they have none in common."""
    both = [seed for seed in ours if seed in theirs]
    return paired([ours[s] for s in both], [theirs[s] for s in both], level) if both else None
