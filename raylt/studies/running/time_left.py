"""`Pace`: predicts how long runs take, from timed steps or, before any, in proportion to the work."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from raylt.config import Config
from raylt.registry import resolve
from raylt.studies.definition import Planned
from raylt.studies.records.record import RunRecord

FINISH = 0  # key for the method's step after the last round
StepSeconds = dict[int, list[float]]  # durations by round number, or FINISH


class Pace:
    """The measured durations of rounds and of the phase after training, by arm and cell.

    Attributes:
        measured: Whether a round was timed. Until then, `left` is in client epochs instead of seconds.
    """

    def __init__(self, records: Sequence[RunRecord]):
        self._seconds: dict[tuple[str, str], StepSeconds] = defaultdict(dict)
        self._expected: dict[tuple[str, str], float] = {}  # expected durations of final phases
        # cached, since each step of a run renews the predictions of all runs
        self._means: dict[tuple[str | None, str | None], dict[int, float]] = {}
        self._finishes: dict[tuple[str, str], bool] = {}
        for record in records:
            for step, (before, after) in enumerate(pairwise([0.0, *record.curve.get("seconds", [])]), 1):
                self._note(record.arm, record.cell, step, record.planned_steps, after - before)

    @property
    def measured(self) -> bool:
        return any(step != FINISH for steps in self._seconds.values() for step in steps)

    def lacks_finish(self, planned: Planned, steps: int) -> bool:
        """Return whether `left` omits the phase after training because its duration is unknown.

        Args:
            planned: The run.
            steps: Number of completed steps, as in `left`.
        """
        if steps > planned.config.federation.rounds or not self._has_finish(planned):
            return False
        return not self.measured or self._finish(planned) is None

    def learn(self, planned: Planned, step: int, seconds: float) -> None:
        """Add the measured duration of a run's step."""
        self._note(planned.arm, planned.cell, step, planned.config.federation.rounds, seconds)

    def expect(self, planned: Planned, seconds: float) -> None:
        """Set the expected duration of a run's final phase, used until a run of the same arm has been timed."""
        self._expected[planned.arm, planned.cell] = seconds

    def left(self, planned: Planned, steps: int) -> float:
        """Predict the remaining time of a run after its first `steps` steps."""
        rounds = planned.config.federation.rounds
        if not self.measured:
            return max(0, rounds - steps) * _work(planned.config)
        means = self._nearest(planned)
        # leave out final phases, which say nothing about rounds; methods without rounds have only these
        usual = fmean(_of_rounds(means) or _of_rounds(self._mean(None, None)))
        finish = (self._finish(planned) or 0.0) if steps <= rounds else 0.0
        return sum(means.get(step, usual) for step in range(steps + 1, rounds + 1)) + finish

    def _finish(self, planned: Planned) -> float | None:
        """Return the duration of an arm's final phase, measured or expected, from this cell if possible, or None."""
        for cell in (planned.cell, None):
            if (seconds := self._mean(planned.arm, cell).get(FINISH)) is not None:
                return seconds
        of_arm = [seconds for (arm, _), seconds in self._expected.items() if arm == planned.arm]
        return self._expected.get((planned.arm, planned.cell), of_arm[0] if of_arm else None)

    def _has_finish(self, planned: Planned) -> bool:
        key = planned.arm, planned.cell
        if key not in self._finishes:
            self._finishes[key] = resolve(planned.config).method.finishes
        return self._finishes[key]

    def _nearest(self, planned: Planned) -> dict[int, float]:
        """Return mean durations by step, over the run's arm and cell, or otherwise its arm, or otherwise all runs."""
        return self._mean(planned.arm, planned.cell) or self._mean(planned.arm, None) or self._mean(None, None)

    def _mean(self, arm: str | None, cell: str | None) -> dict[int, float]:
        """Return mean durations by step over runs of one arm and cell; None stands for all of them."""
        key = arm, cell
        if key not in self._means:
            chosen = [
                seconds
                for (of_arm, of_cell), seconds in self._seconds.items()
                if arm in (None, of_arm) and cell in (None, of_cell)
            ]
            self._means[key] = {step: fmean(values) for step, values in _joined(chosen).items()}
        return self._means[key]

    def _note(self, arm: str, cell: str, step: int, rounds: int, seconds: float) -> None:
        self._seconds[arm, cell].setdefault(FINISH if step > rounds else step, []).append(seconds)
        self._means.clear()


def _joined(several: Sequence[StepSeconds]) -> StepSeconds:
    steps = {step for seconds in several for step in seconds}
    return {step: [value for seconds in several for value in seconds.get(step, [])] for step in steps}


def _of_rounds(means: dict[int, float]) -> list[float]:
    return [seconds for step, seconds in means.items() if step != FINISH]


def _work(config: Config) -> float:
    """Return the work of one round: epochs times the share of participating clients.

    The clients' numbers of samples are unknown, so each step counts as one epoch if `local.steps` sets the work.
    """
    return config.federation.participation * (config.local.steps or config.local.epochs)
