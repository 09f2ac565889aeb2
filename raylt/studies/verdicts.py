"""Verdicts: what recorded runs say of each printed cell, and of nothing that was not run."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from raylt.studies.expectations import Expectation, expectations, identity
from raylt.studies.measures import value_of
from raylt.studies.records import Record
from raylt.studies.statistics import Interval, Paired, mean_interval, paired

Kind = Literal["reproduced", "difference reproduced", "outside", "cannot be told", "too few seeds", "at reduced scale",
               "longer than the paper", "not run", "cannot be run"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEAST_SEEDS = 3         # below them an interval is as wide as chance makes it, and nothing is said
WIDEST = 0.05           # half of an interval: a wider one holds nearly any figure, which reproduces none


@dataclass(frozen=True)
class Verdict:
    """A printed cell and the runs of it.

    Attributes:
        ours: mean and t interval over the seeds; None where nothing was run.
        seeds: how many.
        printed_difference, difference: to FedAvg of the same setting and table, in print and here, paired by seed where
            the splits are equal; None where either has none, and for FedAvg itself.
        scale: rounds that were run over those of the paper.
        why: sentences where the kind alone does not say it.
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


def verdicts(records: Sequence[Record], cells: Sequence[Expectation] | None = None,
             mix_versions: bool = False) -> list[Verdict]:
    """A verdict for each printed cell; runs that are not done, or are of no cell, are not looked at.

    Args:
        mix_versions: whether runs of several versions of the code may be taken together; otherwise a cell's verdict is
            of those of the version that made most of them.
    """
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.state == "done":
            runs[identity(record.config)].append(record)
    return [judge(cell, runs, mix_versions) for cell in cells or expectations()]


def judge(cell: Expectation, runs: dict[str, list[Record]], mix_versions: bool) -> Verdict:
    """The verdict of one cell.

    A cell at the paper's number of rounds is reproduced when the printed value lies in the t interval over our seeds,
    its difference when the printed difference to FedAvg lies in that of ours. With another number of rounds or too few
    seeds nothing is claimed, and an interval that is too wide to tell confirms nothing.
    """
    if cell.problem is not None:
        return Verdict(cell, "cannot be run", why=cell.problem)
    found = runs.get(cell.identity(), [])
    code = None if mix_versions else _leading(found)
    taken = _made_by(code, found)
    scale, mine, twice = _values(cell, taken)
    if not mine:
        return Verdict(cell, "not run")
    ours = mean_interval([value for value, _ in mine.values()])
    base = _base(cell)
    of_base = [] if base is None else runs.get(base.identity(), [])
    base_taken = _made_by(code, of_base)
    theirs = {} if base is None else _values(base, base_taken, scale)[1]
    both = [seed for seed in mine if seed in theirs]
    alike = [seed for seed in both if _split(mine[seed][1]) == _split(theirs[seed][1])]
    difference = paired([mine[s][0] for s in alike], [theirs[s][0] for s in alike]) if alike else None
    printed = None if base is None else cell.value - base.value
    kind, why = _kind(cell.value, ours, printed, difference, len(mine), scale)
    notes = [why, *([f"several runs of seed {', '.join(map(str, twice))}: the first of each"] if twice else [])]
    for others, of in ((len(found) - len(taken), ""), (len(of_base) - len(base_taken), " of FedAvg")):
        if others:
            notes.append(f"left out, by another version of the code: {others} run{'s' if others > 1 else ''}{of}; "
                         "--mix-versions takes them too")
    if len(alike) < len(both):
        notes.append(f"{len(both) - len(alike)} of {len(both)} seeds have another split than FedAvg's, not paired")
    return Verdict(cell, kind, ours, len(mine), printed, difference, scale, "; ".join(filter(None, notes)),
                   tuple(_split(r) for _, r in mine.values()),
                   tuple(_short(r, "model_sha256") for _, r in mine.values()), _made([r for _, r in mine.values()]))


def _kind(value: float, ours: Interval, printed: float | None, difference: Paired | None, seeds: int,
          scale: float) -> tuple[Kind, str]:
    """What our interval and that of our difference say of a printed value and difference, and a sentence to it."""
    if scale != 1:
        return ("at reduced scale" if scale < 1 else "longer than the paper"), ""
    if seeds < LEAST_SEEDS:
        return "too few seeds", f"{LEAST_SEEDS} are the least; nothing is claimed"
    if ours.holds(value):
        return ("reproduced", "") if ours.half <= WIDEST else ("cannot be told", f"± {100 * ours.half:.1f} points")
    away = f"by {100 * (ours.estimate - value):+.2f} points"
    if difference is None or printed is None or difference.n < LEAST_SEEDS or not difference.difference.holds(printed):
        return "outside", away
    half = difference.difference.half
    return ("difference reproduced", "") if half <= WIDEST else (
        "cannot be told", f"the value is outside {away}, the difference is known to ± {100 * half:.1f} points")


def count(judged: Sequence[Verdict]) -> dict[Kind, int]:
    """Cells by kind of verdict."""
    counts = Counter(verdict.kind for verdict in judged)
    return {kind: counts[kind] for kind in KINDS}


def _values(cell: Expectation, records: list[Record], scale: float | None = None
            ) -> tuple[float, dict[int, tuple[float, Record]], list[int]]:
    """Values by seed of a cell's runs at a scale, by default the paper's or else the longest; that scale; and seeds
    of which there are several runs that differ, where the first one is taken."""
    full = cell.config().federation.rounds
    scales = {record.config["federation"]["rounds"] / full for record in records}
    chosen = scale if scale is not None else 1.0 if 1.0 in scales else max(scales, default=1.0)
    values, twice = dict[int, tuple[float, Record]](), set[int]()
    for record in sorted(records, key=lambda r: r.seed):
        value, seed = value_of(record, cell.measure, cell.at), record.config["seed"]
        if value is None or record.config["federation"]["rounds"] / full != chosen:
            continue
        first = values.setdefault(seed, (value, record))[1]
        if _short(first, "model_sha256") != _short(record, "model_sha256"):
            twice.add(seed)
    return chosen, values, sorted(twice)


def _base(cell: Expectation) -> Expectation | None:
    """FedAvg's cell in the same table, setting and figure; None for FedAvg itself and where a table has none."""
    def place(each: Expectation) -> tuple[Any, ...]:
        setting = {k: v for k, v in each.setting.items() if k not in ("lambda", "clusters")}
        return each.paper, each.table, each.measure, tuple(sorted(setting.items()))

    if cell.method.startswith("FedAvg"):
        return None
    return next((each for each in expectations() if each.method in ("FedAvg", "FedAvg w/o clustering")
                 and each.problem is None and place(each) == place(cell)), None)


def _code(record: Record) -> tuple[str, ...]:
    return tuple(record.made.get("codes", []))


def _leading(records: Sequence[Record]) -> tuple[str, ...] | None:
    """The version of the code that made most of the runs; None where there are none."""
    counts = Counter(map(_code, records))
    return counts.most_common(1)[0][0] if counts else None


def _made_by(code: tuple[str, ...] | None, records: list[Record]) -> list[Record]:
    """Those of one version of the code; all for None."""
    return [record for record in records if code is None or _code(record) == code]


def _split(record: Record) -> str:
    return _short(record, "split_sha256")


def _short(record: Record, key: str) -> str:
    return str((record.summary or {}).get(key, ""))[:8]


def _made(records: Sequence[Record]) -> str:
    """raylt and its commit, torch and device of the last of the runs, and how many versions of the code made them."""
    made = records[-1].made
    if not made:
        return "unknown"
    codes = {code for record in records for code in record.made.get("codes", [])}
    return (f"raylt {made.get('commit') or made.get('raylt')}, torch {made.get('torch')}, {made.get('device')}"
            f"{f', {len(codes)} versions of the code' if len(codes) > 1 else ''}")
