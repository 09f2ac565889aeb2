"""How soon a run reaches an accuracy: rounds, bytes and seconds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from raylt.studies.records import Record
from raylt.studies.sheet import Sheet


@dataclass(frozen=True)
class Reached:
    """Medians over the seeds of an arm in a cell that reached the target; None where no run did.

    Attributes:
        runs, reached: how many there are, and how many got there.
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
        return asdict(self)


def reached(records: Sequence[Record], target: float) -> list[Reached]:
    """For each arm and cell, when the judged accuracy was first at least the target; of finished runs."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.state == "done":
            groups.setdefault((record.cell, record.arm), []).append(record)
    found = []
    for (cell, arm), runs in groups.items():
        firsts = [(run, place) for run in runs if (place := _first(run, target)) is not None]

        def of(*keys: str, firsts: list[tuple[Record, int]] = firsts) -> float | None:
            return median(sum(run.curve[key][place] for key in keys) for run, place in firsts) if firsts else None

        found.append(Reached(cell, arm, target, len(runs), len(firsts), of("step"), of("up", "down"), of("seconds")))
    return found


def with_target(sheet: Sheet, reaching: Sequence[Reached], target: float) -> Sheet:
    """A table of a comparison with one more below it: how soon its arms reach the accuracy."""
    rows = [[each.cell, each.arm, f"{each.reached} of {each.runs}", *(
        "-" if value is None else f"{value:.1f}"
        for value in (each.rounds, None if each.bytes is None else each.bytes / 2**20, each.seconds))]
        for each in reaching]
    title = f"until accuracy {100 * target:g} %: medians of the runs that got there"
    head = ["cell", "arm", "reached by", "rounds", "MiB up and down", "seconds"]
    return replace(sheet, further=[*sheet.further, (title, head, rows)])


def _first(record: Record, target: float) -> int | None:
    return next((place for place, value in enumerate(record.curve["accuracy"])
                 if value is not None and value >= target), None)
