"""Verdicts: comparisons of recorded runs with the cells of the papers' tables."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from raylt.errors import count_of
from raylt.studies.analysis.measures import value_of
from raylt.studies.analysis.statistics import Interval, Paired, mean_interval, paired
from raylt.studies.papers.printed_tables import Expectation, base_of, expectations, identity
from raylt.studies.records.record import RunRecord

VerdictKind = Literal[
    "reproduced",
    "difference reproduced",
    "outside",
    "cannot be told",
    "too few seeds",
    "at reduced scale",
    "longer than the paper",
    "not run",
    "cannot be run",
]
KINDS: tuple[VerdictKind, ...] = get_args(VerdictKind)
MIN_SEEDS = 3  # with fewer seeds, intervals are too uncertain for a verdict
MAX_HALF_WIDTH = 0.05  # wider intervals cannot confirm a printed value


@dataclass(frozen=True)
class Verdict:
    """The verdict on whether recorded runs reproduce one cell of a paper's table.

    Attributes:
        ours: Mean and t interval over the seeds; None without runs.
        seeds: Number of seeds.
        printed_difference: Printed difference to the cell's base (`base_of`); None if the paper prints no base, and for
            FedAvg itself.
        difference: Same difference in the recorded runs, paired by seed over equal splits.
        scale: Number of rounds in the runs, relative to the paper.
        why: Reasons for the verdict, if the kind does not explain itself.
        splits: First characters of the hashes of the splits, by seed.
        models: First characters of the hashes of the models, by seed.
        made: Versions and device of the last run.
    """

    cell: Expectation
    kind: VerdictKind
    ours: Interval | None = None
    seeds: int = 0
    printed_difference: float | None = None
    difference: Paired | None = None
    scale: float | None = None
    why: str = ""
    splits: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    made: str = ""


def verdicts(
    records: Sequence[RunRecord], cells: Sequence[Expectation] | None = None, mix_versions: bool = False
) -> list[Verdict]:
    """Return a verdict on each given cell of the papers' tables.

    Unfinished runs, and runs that belong to no cell, do not count. Failed runs of a cell are reported, and prevent a
    positive verdict from runs with as many rounds by the same version of the code.

    Args:
        records: Runs in any state.
        cells: Printed cells; by default all cells.
        mix_versions: Whether runs of several versions of the code count together. Otherwise each cell uses only the
            version that made most of its runs.
    """
    runs: dict[str, list[RunRecord]] = defaultdict(list)
    failed: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.state == "done":
            runs[identity(record.config)].append(record)
            if (plain := _as_fedavg(record)) is not None:
                runs[identity(plain.config)].append(plain)
        elif record.state == "failed" and record.config:
            failed[identity(record.config)].append(record)
    return [judge(cell, runs, failed, mix_versions) for cell in cells or expectations()]


def _as_fedavg(record: RunRecord) -> RunRecord | None:
    """Return a finished run of MuPFL without modules as a run of FedAvg, evaluated with its global model.

    Both methods train in the same way, so a study of MuPFL's modules need not repeat the training. Return None for
    other runs.
    """
    method = record.config["method"]
    if method["name"] != "mupfl" or method.get("dropout"):
        return None
    assert record.summary is not None
    shared = record.summary.get("others", {}).get("global")
    if shared is None or any(method.get(module, True) for module in ("bavd", "acmu", "pkcf")):
        return None
    summary = record.summary | {
        "accuracy": {"last": shared["accuracy"]},
        "groups": shared["groups"],
        "clients": {"by": shared["clients"]},
    }
    return replace(record, config=record.config | {"method": {"name": "fedavg"}}, summary=summary, curve={})


def judge(
    cell: Expectation,
    runs: Mapping[str, list[RunRecord]],
    failed: Mapping[str, list[RunRecord]],
    mix_versions: bool,
) -> Verdict:
    """Return the verdict on one cell of a paper's table.

    With the paper's number of rounds, a cell is reproduced when the t interval over the seeds contains the printed
    value. Its difference is reproduced when the interval of the paired differences to its base (`base_of`, FedAvg for
    most cells) contains the printed difference. A row of an ablation needs the difference in either case.

    There is no verdict with another number of rounds or with too few seeds. Intervals wider than `MAX_HALF_WIDTH`
    confirm nothing.

    Args:
        cell: The printed cell.
        runs: Finished runs, by identity.
        failed: Failed runs, by identity.
        mix_versions: See `verdicts`.
    """
    if cell.problem is not None:
        return Verdict(cell, "cannot be run", why=cell.problem)
    of_cell = runs.get(cell.identity(), [])
    code = None if mix_versions else _leading_code(of_cell)
    taken = _made_by(code, of_cell)
    seeds = _by_seed(cell, taken)
    lost = _lost(cell, failed.get(cell.identity(), []), seeds, code)
    lost_note = f"{count_of(lost, 'run')} failed" if lost else ""
    if not seeds.values:
        return Verdict(cell, "not run", why=lost_note)
    base = base_of(cell)
    of_base = [] if base is None else runs.get(base.identity(), [])
    base_taken = _made_by(code, of_base)
    base_values = {} if base is None else _by_seed(base, base_taken, seeds.scale).values
    common = [seed for seed in seeds.values if seed in base_values]
    same_split = [seed for seed in common if _split(seeds.values[seed][1]) == _split(base_values[seed][1])]
    difference = None
    if same_split:
        difference = paired(
            [seeds.values[seed][0] for seed in same_split], [base_values[seed][0] for seed in same_split]
        )
    ours = mean_interval([value for value, _ in seeds.values.values()])
    printed_difference = None if base is None else cell.value - base.value
    kind, reason = _kind(cell, ours, printed_difference, difference, len(seeds.values), seeds.scale)
    if lost and kind in ("reproduced", "difference reproduced"):
        kind = "cannot be told"
    notes = [
        reason,
        lost_note,
        _repeated_note(seeds.repeated),
        _other_code_note(len(of_cell) - len(taken), ""),
        "" if base is None else _other_code_note(len(of_base) - len(base_taken), f" of {base.method}"),
        _other_split_note(len(common) - len(same_split), len(common)),
        "" if base is None or base.method.startswith("FedAvg") else f"difference to {base.method}",
    ]
    records = [record for _, record in seeds.values.values()]
    return Verdict(
        cell,
        kind,
        ours,
        len(seeds.values),
        printed_difference,
        difference,
        seeds.scale,
        "; ".join(note for note in notes if note),
        tuple(_split(record) for record in records),
        tuple(_short(record, "model_sha256") for record in records),
        _made(records),
    )


def count(judged: Sequence[Verdict]) -> dict[VerdictKind, int]:
    """Return the number of verdicts of each kind."""
    counts = Counter(verdict.kind for verdict in judged)
    return {kind: counts[kind] for kind in KINDS}


def _kind(
    cell: Expectation, ours: Interval, printed: float | None, difference: Paired | None, seeds: int, scale: float
) -> tuple[VerdictKind, str]:
    """Return the kind of verdict for a cell, and a reason if the kind alone is not clear.

    Args:
        cell: The printed cell.
        ours: Interval of the measured value.
        printed: Printed difference.
        difference: Measured difference.
        seeds: Number of seeds.
        scale: Number of rounds, relative to the paper.
    """
    if scale != 1:
        return ("at reduced scale" if scale < 1 else "longer than the paper"), ""
    if seeds < MIN_SEEDS:
        return "too few seeds", f"at least {MIN_SEEDS} are needed"
    if ours.half == 0:
        return "cannot be told", "all seeds have the same value, so there is no interval"
    if cell.ablation:
        return _kind_of_ablation(cell, ours, printed, difference)
    if ours.holds(cell.value):
        return (
            ("reproduced", "") if ours.half <= MAX_HALF_WIDTH else ("cannot be told", f"± {100 * ours.half:.1f} points")
        )
    away = f"by {100 * (ours.estimate - cell.value):+.2f} points"
    if difference is None or printed is None or difference.n < MIN_SEEDS or not difference.difference.holds(printed):
        return "outside", away
    half = difference.difference.half
    if half <= MAX_HALF_WIDTH:
        return "difference reproduced", ""
    return "cannot be told", f"the value is outside {away}, the difference is known to ± {100 * half:.1f} points"


def _kind_of_ablation(
    cell: Expectation, ours: Interval, printed: float | None, difference: Paired | None
) -> tuple[VerdictKind, str]:
    """Return the kind of verdict for an ablation, which must reproduce its difference to its base."""
    if printed is None:
        return "cannot be told", "the paper prints no base for this setting"
    if difference is None or difference.n < MIN_SEEDS:
        return "cannot be told", f"fewer than {MIN_SEEDS} runs of the base on the same splits"
    interval = difference.difference
    if interval.half == 0:
        return "cannot be told", "all seeds have the same difference, so there is no interval"
    if not interval.holds(printed):
        return "outside", f"difference off by {100 * (interval.estimate - printed):+.2f} points"
    if interval.half > MAX_HALF_WIDTH:
        return "cannot be told", f"the difference is known to ± {100 * interval.half:.1f} points"
    reproduced = ours.holds(cell.value) and ours.half <= MAX_HALF_WIDTH
    return ("reproduced" if reproduced else "difference reproduced"), ""


class _Seeds(NamedTuple):
    """The runs of one cell of a paper's table that differ in the seed only.

    Attributes:
        scale: Number of rounds, relative to the paper.
        values: Value and run by seed; the first run if a seed has several.
        repeated: Seeds that have several runs with different models.
    """

    scale: float
    values: dict[int, tuple[float, RunRecord]]
    repeated: list[int]


def _by_seed(cell: Expectation, records: list[RunRecord], scale: float | None = None) -> _Seeds:
    """Return, by seed, the runs of a cell that took `scale` times the paper's number of rounds.

    The default scale is 1, or the largest scale if no run has scale 1.
    """
    scales = {_scale(cell, record) for record in records}
    default = 1.0 if 1.0 in scales else max(scales, default=1.0)
    chosen = default if scale is None else scale
    values: dict[int, tuple[float, RunRecord]] = {}
    repeated: set[int] = set()
    for record in sorted(records, key=lambda r: r.seed):
        value = value_of(record, cell.measure, cell.at)
        if value is None or _scale(cell, record) != chosen:
            continue
        seed = record.config["seed"]
        _, first = values.setdefault(seed, (value, record))
        if _short(first, "model_sha256") != _short(record, "model_sha256"):
            repeated.add(seed)
    return _Seeds(chosen, values, sorted(repeated))


def _repeated_note(seeds: list[int]) -> str:
    return f"several runs of seed {', '.join(map(str, seeds))}; the first counts" if seeds else ""


def _other_code_note(runs: int, arm: str) -> str:
    if not runs:
        return ""
    plural = "s" if runs > 1 else ""
    return f"left out, by another version of the code: {runs} run{plural}{arm}; --mix-versions includes them"


def _other_split_note(seeds: int, of: int) -> str:
    return f"{seeds} of {of} seeds not paired, since the base has another split" if seeds else ""


def _code(record: RunRecord) -> tuple[str, ...]:
    return tuple(record.made.get("codes", []))


def _lost(cell: Expectation, failed: Sequence[RunRecord], seeds: "_Seeds", code: tuple[str, ...] | None) -> int:
    """Return the number of failed runs that belong with a cell's finished runs, or all failed runs if none finished.

    They have the same number of rounds and the same version of the code. A run that failed before its first step has no
    recorded version.
    """
    if not seeds.values:
        return len(failed)
    return sum(_scale(cell, run) == seeds.scale and (code is None or _code(run) in ((), code)) for run in failed)


def _scale(cell: Expectation, record: RunRecord) -> float:
    """Return the number of rounds of a run, relative to the paper."""
    return record.config["federation"]["rounds"] / cell.config().federation.rounds


def _leading_code(records: Sequence[RunRecord]) -> tuple[str, ...] | None:
    """Return the version of the code that made most of the runs, or None without runs."""
    counts = Counter(map(_code, records))
    return counts.most_common(1)[0][0] if counts else None


def _made_by(code: tuple[str, ...] | None, records: list[RunRecord]) -> list[RunRecord]:
    """Return the runs that one version of the code made, or all runs if `code` is None."""
    return [record for record in records if code is None or _code(record) == code]


def _split(record: RunRecord) -> str:
    return _short(record, "split_sha256")


def _short(record: RunRecord, key: str) -> str:
    return str((record.summary or {}).get(key, ""))[:8]


def _made(records: Sequence[RunRecord]) -> str:
    """Return the last run's device, precision and versions of raylt and torch, and the code versions of all runs."""
    made = records[-1].made
    if not made:
        return "unknown"
    codes = {code for record in records for code in record.made.get("codes", [])}
    several = f", {len(codes)} versions of the code" if len(codes) > 1 else ""
    precisions = sorted({str(record.made["precision"]) for record in records if "precision" in record.made})
    versions = f"raylt {made.get('commit') or made.get('raylt')}, torch {made.get('torch')}"
    return ", ".join([versions, str(made.get("device")), *precisions]) + several
