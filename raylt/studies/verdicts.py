"""Verdicts: what recorded runs say of each printed cell, and of nothing that was not run."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raylt.studies.comparison import value_of
from raylt.studies.expectations import Expectation, expectations, identity
from raylt.studies.records import Record
from raylt.studies.statistics import Interval, Paired, mean_interval, paired

Kind = Literal["reproduced", "difference reproduced", "outside", "one seed", "at reduced scale", "not run",
               "cannot be run"]
KINDS: tuple[Kind, ...] = ("reproduced", "difference reproduced", "outside", "one seed", "at reduced scale", "not run",
                           "cannot be run")


@dataclass(frozen=True)
class Verdict:
    """A printed cell and the runs of it.

    Attributes:
        ours: mean and t interval over the seeds; None where nothing was run.
        seeds: how many.
        printed_difference, difference: to FedAvg of the same setting and table, in print and here, paired by seed; None
            where either has none, and for FedAvg itself.
        scale: rounds that were run over those of the paper.
        why: a sentence where the kind alone does not say it.
        splits, models: first characters of their hashes, by seed.
        made: versions and device of the last run.
    """

    cell: Expectation
    kind: Kind
    ours: Interval | None = None
    seeds: int = 0
    printed_difference: float | None = None
    difference: Paired | None = None
    scale: float | None = None
    why: str = ""
    splits: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    made: str = ""


def verdicts(records: Sequence[Record], cells: Sequence[Expectation] | None = None) -> list[Verdict]:
    """A verdict for each printed cell; runs that are not done, or are of no cell, are not looked at."""
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.state == "done":
            runs[identity(record.config)].append(record)
    return [judge(cell, runs) for cell in cells or expectations()]


def judge(cell: Expectation, runs: dict[str, list[Record]]) -> Verdict:
    """The verdict of one cell.

    A cell at the paper's number of rounds is reproduced when the printed value lies in the t interval over our seeds,
    its difference when the printed difference to FedAvg lies in that of ours. With fewer rounds nothing is claimed.
    """
    if cell.problem is not None:
        return Verdict(cell, "cannot be run", why=cell.problem)
    scale, mine = _values(cell, runs.get(cell.identity(), []))
    if not mine:
        return Verdict(cell, "not run")
    ours = mean_interval([value for value, _ in mine.values()])
    base = _base(cell)
    theirs = {} if base is None else _values(base, runs.get(base.identity(), []), scale)[1]
    both = [seed for seed in mine if seed in theirs]
    difference = paired([mine[s][0] for s in both], [theirs[s][0] for s in both]) if both else None
    printed = None if base is None else cell.value - base.value
    facts: dict[str, Any] = {
        "ours": ours, "seeds": len(mine), "printed_difference": printed, "difference": difference, "scale": scale,
        "splits": tuple(_short(r, "split_sha256") for _, r in mine.values()),
        "models": tuple(_short(r, "model_sha256") for _, r in mine.values()),
        "made": _made([r for _, r in mine.values()])}
    if scale < 1:
        return Verdict(cell, "at reduced scale", **facts)
    if ours.low is None:
        return Verdict(cell, "one seed", **facts, why="one seed has no interval; nothing is claimed")
    if ours.holds(cell.value):
        return Verdict(cell, "reproduced", **facts)
    if difference is not None and printed is not None and difference.difference.holds(printed):
        return Verdict(cell, "difference reproduced", **facts)
    return Verdict(cell, "outside", **facts, why=f"by {100 * (ours.estimate - cell.value):+.2f} points")


def count(judged: Sequence[Verdict]) -> dict[Kind, int]:
    """Cells by kind of verdict."""
    counts = Counter(verdict.kind for verdict in judged)
    return {kind: counts[kind] for kind in KINDS}


def _values(cell: Expectation, records: list[Record], scale: float | None = None
            ) -> tuple[float, dict[int, tuple[float, Record]]]:
    """Values by seed of the longest runs of a cell, or of those at a scale, and that scale."""
    full = cell.config().federation.rounds
    scales = {record.config["federation"]["rounds"] / full for record in records}
    chosen = scale if scale is not None else max(scales, default=1.0)
    values = {}
    for record in sorted(records, key=lambda r: r.seed):
        value = value_of(record, cell.measure, cell.at)
        if value is not None and record.config["federation"]["rounds"] / full == chosen:
            values[record.config["seed"]] = value, record
    return chosen, values


def _base(cell: Expectation) -> Expectation | None:
    """FedAvg's cell in the same table, setting and figure; None for FedAvg itself and where a table has none."""
    def place(each: Expectation) -> tuple[Any, ...]:
        setting = {k: v for k, v in each.setting.items() if k not in ("lambda", "clusters")}
        return each.paper, each.table, each.measure, tuple(sorted(setting.items()))

    if cell.method.startswith("FedAvg"):
        return None
    return next((each for each in expectations() if each.method in ("FedAvg", "FedAvg w/o clustering")
                 and each.problem is None and place(each) == place(cell)), None)


def _short(record: Record, key: str) -> str:
    return str((record.summary or {}).get(key, ""))[:8]


def _made(records: Sequence[Record]) -> str:
    """raylt and its commit, torch and device of the last of the runs."""
    made = records[-1].made
    if not made:
        return "unknown"
    return f"raylt {made.get('commit') or made.get('raylt')}, torch {made.get('torch')}, {made.get('device')}"
