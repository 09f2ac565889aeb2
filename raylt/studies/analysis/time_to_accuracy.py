"""Time to accuracy: the rounds, bytes and seconds until a run first reaches an accuracy."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from raylt.studies.records.record import RunRecord
from raylt.studies.report.text_table import TextTable


@dataclass(frozen=True)
class Reached:
    """Rounds, bytes and seconds until an arm reached the target in a cell, as medians over its seeds.

    Attributes:
        runs: number of finished runs.
        reached: number of those that reached the target.
    """

    cell: str
    arm: str
    target: float
    runs: int
    reached: int
    rounds: float | None
    bytes: float | None
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the medians as JSON values."""
        return asdict(self)


def reached(records: Sequence[RunRecord], target: float) -> list[Reached]:
    """Return the rounds, bytes and seconds until finished runs reached the target accuracy, by arm and cell."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        if record.state == "done":
            groups.setdefault((record.cell, record.arm), []).append(record)
    return [_reached(cell, arm, runs, target) for (cell, arm), runs in groups.items()]


def with_target(table: TextTable, reaching: Sequence[Reached], target: float) -> TextTable:
    """Append a table of the times to the target accuracy to a comparison's table; return the result."""
    rows = []
    for each in reaching:
        mebibytes = None if each.bytes is None else each.bytes / 2**20
        figures = ["-" if value is None else f"{value:.1f}" for value in (each.rounds, mebibytes, each.seconds)]
        rows.append([each.cell, each.arm, f"{each.reached} of {each.runs}", *figures])
    title = f"until accuracy {100 * target:g} %: medians of the runs that got there"
    head = ["cell", "arm", "reached by", "rounds", "MiB up and down", "seconds"]
    return replace(table, further=[*table.further, (title, head, rows)])


def _reached(cell: str, arm: str, runs: Sequence[RunRecord], target: float) -> Reached:
    first_steps = [(run, index) for run in runs if (index := _first(run, target)) is not None]

    def median_of(*keys: str) -> float | None:
        if not first_steps:
            return None
        return median(sum(run.curve[key][index] for key in keys) for run, index in first_steps)

    return Reached(
        cell,
        arm,
        target,
        len(runs),
        len(first_steps),
        median_of("step"),
        median_of("up", "down"),
        median_of("seconds"),
    )


def _first(record: RunRecord, target: float) -> int | None:
    """Return the index of the first step of a run that reaches the target accuracy."""
    accuracies = record.curve["accuracy"]
    return next((index for index, value in enumerate(accuracies) if value is not None and value >= target), None)
