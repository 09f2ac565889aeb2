"""`Pace`: how long runs take, from those that have taken steps; before any has, in proportion to their work."""

from collections import defaultdict
from collections.abc import Sequence

from raylt.config import Config
from raylt.studies.definition import Planned
from raylt.studies.records import Record


class Pace:
    """Seconds per step by arm and cell.

    Attributes:
        measured: whether any run has taken a step, so that `left` is in seconds; else it is in client epochs.
    """

    def __init__(self, records: Sequence[Record]):
        self._seconds: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for record in records:
            if record.steps and record.curve.get("seconds"):
                self._seconds[record.arm, record.cell].append((record.seconds, record.steps))
        self._now: dict[tuple[str, str, int], tuple[float, float]] = {}

    @property
    def measured(self) -> bool:
        return bool(self._seconds) or bool(self._now)

    def learn(self, planned: Planned, steps: int, seconds: float) -> None:
        """A run that is under way has taken so many steps."""
        self._now[planned.arm, planned.cell, planned.seed] = seconds, steps

    def left(self, planned: Planned, steps: int) -> float:
        """What a run that has taken `steps` still needs: of its arm in its cell, else of its arm, else of all."""
        remaining = max(0, planned.config.federation.rounds - steps)
        if not self.measured:
            return remaining * _work(planned.config)
        known = [(arm, cell, pair) for (arm, cell), pairs in self._seconds.items() for pair in pairs]
        known += [(arm, cell, pair) for (arm, cell, _), pair in self._now.items()]
        for near in ([p for a, c, p in known if (a, c) == (planned.arm, planned.cell)],
                     [p for a, _, p in known if a == planned.arm], [p for _, _, p in known]):
            if near:
                return remaining * sum(seconds for seconds, _ in near) / max(1e-9, sum(taken for _, taken in near))
        raise AssertionError("unreachable")


def _work(config: Config) -> float:
    """Passes over a share of the data in one round."""
    return config.federation.participation * config.local.epochs
