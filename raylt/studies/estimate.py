"""`Pace`: how long runs take, from those that have taken steps; before any has, in proportion to their work."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from raylt.config import Config
from raylt.studies.definition import Planned
from raylt.studies.records import Record

FINISH = 0                              # in the place of a round's number: what a method does after the last round
Steps = dict[int, list[float]]          # seconds that each took, by round


class Pace:
    """Seconds of every round and of the finish, by arm and cell.

    Attributes:
        measured: whether any run has taken a step, so that `left` is in seconds; else it is in client epochs.
    """

    def __init__(self, records: Sequence[Record]):
        self._taken: dict[tuple[str, str], Steps] = defaultdict(dict)
        for record in records:
            for step, (before, after) in enumerate(pairwise([0.0, *record.curve.get("seconds", [])]), 1):
                self._note(record.arm, record.cell, step, record.planned_steps, after - before)

    @property
    def measured(self) -> bool:
        return bool(self._taken)

    def learn(self, planned: Planned, step: int, seconds: float) -> None:
        """A run has taken a step, in so many seconds."""
        self._note(planned.arm, planned.cell, step, planned.config.federation.rounds, seconds)

    def left(self, planned: Planned, steps: int) -> float:
        """What a run still needs that has taken `steps`, or takes them over from another."""
        rounds = planned.config.federation.rounds
        if not self.measured:
            return max(0, rounds - steps) * _work(planned.config)
        known = {step: fmean(seconds) for step, seconds in self._near(planned).items()}
        usual = fmean([seconds for step, seconds in known.items() if step != FINISH] or known.values())
        finish = known.get(FINISH, 0.0) if steps <= rounds else 0.0
        return sum(known.get(step, usual) for step in range(steps + 1, rounds + 1)) + finish

    def _near(self, planned: Planned) -> Steps:
        """Of its arm in its cell, else of its arm, else of all."""
        own = self._taken.get((planned.arm, planned.cell))
        return own or _joined([each for (arm, _), each in self._taken.items() if arm == planned.arm]) or _joined(
            list(self._taken.values()))

    def _note(self, arm: str, cell: str, step: int, rounds: int, seconds: float) -> None:
        self._taken[arm, cell].setdefault(FINISH if step > rounds else step, []).append(seconds)


def _joined(each: Sequence[Steps]) -> Steps:
    steps = {step for taken in each for step in taken}
    return {step: [seconds for taken in each for seconds in taken.get(step, [])] for step in steps}


def _work(config: Config) -> float:
    """Passes over a share of the data in one round."""
    return config.federation.participation * config.local.epochs
