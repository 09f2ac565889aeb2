"""How soon a run reaches an accuracy: rounds, bytes and seconds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from raylt.studies.records import Record


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


def of_target(reaching: Sequence[Reached]) -> Table:
    table = Table("cell", "arm", "reached by", "rounds", "MiB up and down", "seconds", title=(
        f"until accuracy {100 * reaching[0].target:g} %: medians of the runs that got there" if reaching else ""),
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for each in reaching:
        table.add_row(each.cell, each.arm, f"{each.reached} of {each.runs}", *(
            "-" if value is None else f"{value:.{digits}f}" for value, digits in
            ((each.rounds, 1), (None if each.bytes is None else each.bytes / 2**20, 1), (each.seconds, 1))))
    return table


def _first(record: Record, target: float) -> int | None:
    return next((place for place, value in enumerate(record.curve["accuracy"])
                 if value is not None and value >= target), None)
