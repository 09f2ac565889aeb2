"""Time to accuracy: the rounds, passes, bytes and seconds until a run first reaches a value of a measure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from raylt.errors import ConfigError
from raylt.studies.analysis.measures import measure_of
from raylt.studies.records.record import RunRecord
from raylt.studies.report.text_table import TextTable


@dataclass(frozen=True)
class Reached:
    """Rounds, passes, bytes and seconds until an arm reached the target in a cell, as medians over its seeds.

    Attributes:
        runs: Number of finished runs with values of the measure by round.
        reached: Number of these runs that reached the target.
        without_curve: Number of finished runs without values by round.
        passes: Number of FedAvg rounds in which a client computes as much: the rounds times the arm's passes per round,
            as a multiple of FedAvg's. None if not measured.
    """

    cell: str
    arm: str
    target: float
    runs: int
    reached: int
    rounds: float | None
    bytes: float | None
    seconds: float | None
    without_curve: int
    passes: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the medians as JSON values."""
        return asdict(self)


def reached(records: Sequence[RunRecord], target: float, measure: str = "accuracy") -> list[Reached]:
    """Return the rounds, bytes and seconds until finished runs reached the target, by arm and cell.

    Args:
        records: Runs in any state.
        target: Value of the measure, in [0, 1].
        measure: Name of a measure with a value for each round.

    Raises:
        ConfigError: The measure has no values by round.
    """
    definition = measure_of(measure)
    curve = definition.curve or definition.every_round
    if curve is None:
        raise ConfigError(
            f"target: {measure} is not computed in each round ({target:g}). Give a measure such as accuracy.",
            code="config.conflict",
            key="target",
            value=target,
            measure=measure,
        )
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        if record.state == "done":
            groups.setdefault((record.cell, record.arm), []).append(record)
    return [_reached(cell, arm, runs, target, curve) for (cell, arm), runs in groups.items()]


def with_passes(reaching: Sequence[Reached], costs: Mapping[tuple[str, str], float | None]) -> list[Reached]:
    """Return the times to the target with the passes filled in.

    Args:
        reaching: Times to the target.
        costs: Passes of a client in a run by cell and arm, as a multiple of FedAvg's.
    """
    return [
        each
        if each.rounds is None or (cost := costs.get((each.cell, each.arm))) is None
        else replace(each, passes=each.rounds * cost)
        for each in reaching
    ]


def with_target(table: TextTable, reaching: Sequence[Reached], target: float, measure: str = "accuracy") -> TextTable:
    """Append a table of the times to the target to a comparison's table; return the result."""
    costs = any(each.passes is not None for each in reaching)
    rows = []
    for each in reaching:
        mebibytes = None if each.bytes is None else each.bytes / 2**20
        figures = [each.rounds, *([each.passes] if costs else []), mebibytes, each.seconds]
        texts = ["-" if value is None else f"{value:.1f}" for value in figures]
        rows.append([each.cell, each.arm, _count_text(each), *texts])
    title = f"until {measure} {100 * target:g} %: medians of the runs that reached it"
    passes = ["passes, in rounds of FedAvg"] if costs else []
    head = ["cell", "arm", "reached by", "rounds", *passes, "MiB up and down", "seconds"]
    return replace(table, further=[*table.further, (title, head, rows)])


def _reached(cell: str, arm: str, runs: Sequence[RunRecord], target: float, curve: str) -> Reached:
    with_curve = [run for run in runs if any(value is not None for value in run.curve.get(curve, []))]
    first_steps = [(run, index) for run in with_curve if (index := _first(run, target, curve)) is not None]

    def median_of(*keys: str) -> float | None:
        if not first_steps:
            return None
        return median(sum(run.curve[key][index] for key in keys) for run, index in first_steps)

    return Reached(
        cell,
        arm,
        target,
        len(with_curve),
        len(first_steps),
        median_of("step"),
        median_of("up", "down"),
        median_of("seconds"),
        len(runs) - len(with_curve),
    )


def _count_text(each: Reached) -> str:
    """Return how many runs reached the target; a run without values by round may have reached it or not."""
    counted = [f"{each.reached} of {each.runs}"] if each.runs else []
    unknown = [f"{each.without_curve} without curve"] if each.without_curve else []
    return ", ".join(counted + unknown)


def _first(record: RunRecord, target: float, curve: str) -> int | None:
    """Return the index of the first step of a run that reaches the target."""
    values = record.curve.get(curve, [])
    return next((index for index, value in enumerate(values) if value is not None and value >= target), None)
