"""Time to accuracy: the rounds, passes, bytes and seconds until a run first reaches a value of a measure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from raylt.errors import ConfigError
from raylt.studies.analysis.measures import measure_of, of_rounds
from raylt.studies.records.record import RunRecord


@dataclass(frozen=True)
class Reached:
    """Rounds, passes, bytes and seconds until an arm reached the target in a cell, as medians over its seeds.

    Attributes:
        runs: Number of finished runs with values of the measure by round.
        reached: Number of these runs that reached the target.
        without_curve: Number of finished runs without values by round, such as runs of several rounds that were
            evaluated in one of them.
        passes: Number of FedAvg rounds in which a client computes as much: the rounds times the arm's passes per round,
            as a multiple of FedAvg's. None if not measured.
        diverged: Number of diverged runs, which are not among `runs`.
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
    diverged: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the medians as JSON values."""
        return asdict(self)


def reached(records: Sequence[RunRecord], target: float, measure: str = "accuracy") -> list[Reached]:
    """Return the rounds, bytes and seconds until finished runs reached the target, by arm and cell.

    Diverged runs are counted, too, since an arm may reach the target with some seeds only.

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
        runs = groups.setdefault((record.cell, record.arm), [])
        if record.state == "done" or record.diverged:
            runs.append(record)
    return [_reached(cell, arm, runs, target, curve) for (cell, arm), runs in groups.items() if runs]


def with_passes(reaching: Sequence[Reached], costs: Mapping[tuple[str, str], float | None]) -> list[Reached]:
    """Return the times to the target with the passes filled in.

    Args:
        reaching: Times to the target.
        costs: Passes of a client in a run by cell and arm, as a multiple of FedAvg's.
    """
    filled = []
    for each in reaching:
        cost = costs.get((each.cell, each.arm))
        passes = None if each.rounds is None or cost is None else each.rounds * cost
        filled.append(replace(each, passes=passes))
    return filled


def _reached(cell: str, arm: str, runs: Sequence[RunRecord], target: float, curve: str) -> Reached:
    done = [run for run in runs if run.state == "done"]
    with_curve = [run for run in done if _has_curve(run, curve)]
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
        len(done) - len(with_curve),
        diverged=len(runs) - len(done),
    )


def _has_curve(record: RunRecord, curve: str) -> bool:
    """Return whether a run was evaluated in enough rounds to tell when it reached a value.

    A run of several rounds that was evaluated in one of them, as clients' own models are by default, may have reached
    the value in any earlier round.
    """
    if record.rounds > 1:
        return len(of_rounds(record, curve)) > 1
    return any(value is not None for value in record.curve.get(curve, []))


def _first(record: RunRecord, target: float, curve: str) -> int | None:
    """Return the index of the first step of a run that reaches the target."""
    values = record.curve.get(curve, [])
    return next((index for index, value in enumerate(values) if value is not None and value >= target), None)
