"""`Point`: one judgement of a trial. `Record`: a trial as its search knows it."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from raylt.config import Config
from tune.halving import Outcome

Metric = Literal["accuracy", "many", "medium", "few", "owned", "matched", "miou"]


@dataclass(frozen=True)
class Point:
    """One judgement of a trial on the validation set.

    Args:
        kind: "round"; for a method with a last phase "proxy" before it, "rehearsal" at a rung, where the phase is gone
            through on a copy; "final" for what is deployed in the end. Proxies decide nothing.
        score: the metric that is searched for.
        steps: client-steps until here.
        validation, test: figures by name; the test set's are for the record, there are none of a rehearsal.
    """

    step: int
    kind: Literal["round", "proxy", "rehearsal", "final"]
    score: float
    steps: int
    validation: dict[str, float | None]
    test: dict[str, float | None]


@dataclass
class Record:
    """A trial as the search knows it."""

    id: str
    method: str
    values: dict[str, Any]
    config: Config
    cost: int                                           # client-steps of all its rounds
    points: dict[int, Point] = field(default_factory=dict)
    failed: str | None = None
    closed: bool = False                                # whether nothing more will come of it
    outcome: Outcome | None = None

    def line(self) -> str:
        """Its line in trials.jsonl."""
        return json.dumps({"trial": self.id, "values": self.values, "failed": self.failed,
                           "points": [asdict(point) for point in self.points.values()]})

    @property
    def spent(self) -> int:
        """Client-steps that count; all, while or because it is not known."""
        if self.outcome is None or self.outcome.state == "failed":
            return self.cost
        return self.cost * self.outcome.step // self.config.federation.rounds

    @property
    def counted(self) -> list[Point]:
        """The points that count: a stopped trial may have gone on while it was not known yet."""
        last = self.outcome.step if self.outcome is not None and self.outcome.state == "stopped" else math.inf
        return [point for point in self.points.values() if point.step <= last]

    @property
    def judged(self) -> Point | None:
        """The point whose score is the outcome's."""
        if self.outcome is None or self.outcome.score is None:
            return None
        kinds = ("final",) if self.outcome.state == "done" else ("round", "rehearsal")
        return next((p for p in self.points.values() if p.kind in kinds and p.score == self.outcome.score
                     and (self.outcome.state == "done" or p.step == self.outcome.step)), None)
