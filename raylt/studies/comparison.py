"""`Comparison`: arms side by side, cell by cell, with what the seeds allow one to claim."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from raylt.errors import ConfigError
from raylt.studies.claims import Claim, Judged, Sides, Values, difference, judge
from raylt.studies.comparable import check_comparable, versions_of
from raylt.studies.measures import At, measure_of, value_of
from raylt.studies.records import Record
from raylt.studies.statistics import Interval, Paired, improvement, mean_interval, over_cells


@dataclass(frozen=True)
class Row:
    """One arm in one cell.

    Attributes:
        values: by seed, of the runs that are done.
        sd: over seeds; None of one.
        difference: to the reference arm over the seeds that both have; None for the reference itself.
        optimism: mean of best minus last round on the test set; None where the measure has no curve.
    """

    cell: str
    arm: str
    values: dict[int, float]
    mean: Interval
    sd: float | None
    difference: Paired | None
    optimism: float | None


@dataclass(frozen=True)
class Overall:
    """One arm over all cells: the interquartile mean, and the probability to beat the reference arm."""

    arm: str
    iqm: Interval
    improvement: Interval | None


@dataclass(frozen=True)
class Comparison:
    """Everything that a table of a study shows; equal records give an equal comparison.

    Attributes:
        whole: the cells that `overall` is over: those in which all arms have the same seeds.
        left_out: one line for each run that is not averaged in and each claim that is not judged, with why.
        apart: one line for each arm that has settings of its own beside its method, on purpose.
        tuned: one line for each arm and cell that was tuned: to what, by how much.
        versions: one line for each version of the code, where runs of several stand beside each other.
    """

    measure: str
    at: At
    reference: str
    level: float
    rows: list[Row]
    claims: list[Judged]
    overall: list[Overall]
    whole: list[str]
    left_out: list[str]
    apart: list[str]
    tuned: list[str]
    versions: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}

    def frame(self) -> Any:
        """The rows as a pandas frame, one line per arm, cell and seed."""
        import pandas as pd
        return pd.DataFrame([{"cell": row.cell, "arm": row.arm, "seed": seed, self.measure: value}
                             for row in self.rows for seed, value in row.values.items()])


def compare(records: Sequence[Record], reference: str, claims: Sequence[Claim] = (), measure: str = "accuracy",
            at: At = "last", level: float = 0.95, own: Mapping[str, Mapping[str, Any]] | None = None,
            searched: Mapping[str, Collection[str]] | None = None, tuned: Sequence[str] = (),
            mix_versions: bool = False) -> Comparison:
    """Compares the finished runs; the others are named and left out.

    Args:
        reference: the arm that the others are compared to.
        own: settings by arm that are not its method's, by dotted key: what they say may differ from the other arms'.
        searched: settings by arm that it was tuned in, by dotted key: as for `own`, and `tuned` says what they are.
        tuned: lines of what the arms were tuned to.
        mix_versions: whether runs of several versions of the code may stand beside each other.

    Raises:
        ConfigError: no such measure, no finished run has it, or it is known of the last round only.
        CheckpointError: runs of one cell and seed differ in split, budget, evaluation or code.
    """
    if at != "last" and measure_of(measure).every_round is None:
        raise ConfigError(f"{measure} at {at}: it is known after the last round only; give --at last")
    done = [record for record in records if record.state == "done"]
    own = {arm: settings for arm, settings in (own or {}).items() if settings}
    searched = searched or {}
    differing = {arm: {*own.get(arm, ()), *searched.get(arm, ())} for arm in {*own, *searched}}
    check_comparable(done, differing, mix_versions)
    left_out = [_why(record) for record in records if record.state != "done"]
    mine, without = _values(done, measure, at)
    left_out += without
    cells, arms = _in_order(r.cell for r in records), _in_order(r.arm for r in records)
    if reference not in arms:
        raise ConfigError(f"reference {reference}: no such arm; there are: {', '.join(arms)}")
    if done and not mine:
        raise ConfigError(_nobody(done, measure, at))
    rows = []
    for cell in cells:
        for arm in arms:
            if seeds := mine.get((arm, cell)):
                rows.append(Row(cell, arm, seeds, mean_interval(list(seeds.values()), level),
                                stdev(seeds.values()) if len(seeds) > 1 else None,
                                None if arm == reference else difference(seeds, mine.get((reference, cell), {}), level),
                                _optimism(done, arm, cell, measure)))
    shown = {row.arm for row in rows}
    sides, finished = [_sides(done, claim, at) for claim in claims], {(r.arm, r.cell) for r in done}
    left_out += [line for each in sides for cell in cells for line in each.unjudged(cell, finished)]
    whole = _whole(mine, arms, cells)
    return Comparison(measure, at, reference, level, rows, judge(sides, cells, level),
                      _overall(mine, arms, whole, reference, level, measure_of(measure).higher), whole, left_out,
                      [f"{arm}: {', '.join(f'{key} {value}' for key, value in settings.items())}"
                       for arm, settings in own.items() if arm in shown], list(tuned), versions_of(done))


def _sides(done: Sequence[Record], claim: Claim, at: At) -> Sides:
    """The figures of both sides of a claim: of the last round, unless both are known of others."""
    both = at if all(measure_of(name).every_round for name in claim.measures) else "last"
    better, worse = (_values(done, name, both)[0] for name in claim.measures)
    return Sides(claim, both, better, worse)


def _values(done: Sequence[Record], measure: str, at: At) -> tuple[Values, list[str]]:
    values: Values = {}
    without: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(done, key=lambda r: r.seed):
        value = value_of(record, measure, at)
        if value is None:
            without.setdefault((record.cell, record.arm), []).append(record)
        else:
            values.setdefault((record.arm, record.cell), {})[record.seed] = value
    missing = measure + (" of a round chosen on validation samples; set data.validation" if at == "validation" else "")
    return values, [_without(runs, missing) for runs in without.values()]


def _without(runs: Sequence[Record], missing: str) -> str:
    """One line for the runs of an arm in a cell that lack the same thing."""
    first, others = runs[0].folder, len(runs) - 1
    return f"{first} (and {others} more of this arm): no {missing}" if others else f"{first}: no {missing}"


def _nobody(done: Sequence[Record], measure: str, at: At) -> str:
    """Why there is nothing to compare: no finished run has the measure."""
    word, _, model = measure.partition("@")
    if model:
        models = _in_order(name for record in done for name in (record.summary or {}).get("others", {}))
        return (f"measure {measure}: no finished run has figures of a model {model!r}; " +
                (f"there are: {', '.join(f'{word}@{each}' for each in models)}" if models else
                 f"their methods judge one model of a client: give {word}"))
    if at == "validation":
        return f"{measure} at validation: no finished run has a round chosen on validation samples; set data.validation"
    return f"measure {measure}: no finished run has it; give another"


def _optimism(done: Sequence[Record], arm: str, cell: str, measure: str) -> float | None:
    if measure_of(measure).every_round is None:
        return None
    gaps = []
    for record in done:
        if (record.arm, record.cell) == (arm, cell):
            best, last = value_of(record, measure, "best"), value_of(record, measure, "last")
            if best is not None and last is not None:
                gaps.append(best - last)
    return fmean(gaps) if gaps else None


def _whole(values: Values, arms: Sequence[str], cells: Sequence[str]) -> list[str]:
    """The cells in which every arm has the same seeds."""
    return [cell for cell in cells if (first := values.get((arms[0], cell)))
            and all(values.get((arm, cell), {}).keys() == first.keys() for arm in arms)]


def _overall(values: Values, arms: Sequence[str], whole: Sequence[str], reference: str, level: float,
             higher: bool) -> list[Overall]:
    """Over those cells; none where there are fewer than two.

    Args:
        higher: whether more is better.
    """
    if len(whole) < 2:
        return []
    lists = {arm: [list(values[arm, cell].values()) for cell in whole] for arm in arms}
    other = lists[reference]
    return [Overall(arm, over_cells(mine, level), None if arm == reference else
                    improvement(mine, other, level) if higher else improvement(other, mine, level))
            for arm, mine in lists.items()]


def _why(record: Record) -> str:
    problem = f": {record.problem}" if record.problem else ""
    steps = f" after step {record.steps} of {record.planned_steps}" if record.state in ("stopped", "running") else ""
    return f"{record.folder}: {record.state}{steps}{problem}"


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
