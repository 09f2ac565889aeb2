"""`Point`: one judgement of a trial. `Record`: a trial as its search knows it."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raylt.config import Config, followed
from raylt.errors import CheckpointError
from raylt.runs.files import Files
from raylt.store import Folder
from raylt.typed import as_json
from tune.halving import Outcome
from tune.kinds import ENDED, POINT, Ended, Kind

SCORES, TRIALS = "scores.jsonl", "trials.jsonl"


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
    kind: Kind
    score: float
    steps: int
    validation: dict[str, float | None]
    test: dict[str, float | None]


def figures_of(kind: Kind) -> str:
    """Under which name metrics.jsonl has a judgement: a rehearsal's is of another model than the step's own."""
    return "rehearsal" if kind == "rehearsal" else "validation"


def read_points(folder: Folder) -> list[Point]:
    """The judgements of a trial, from its folder.

    Raises:
        CheckpointError: a line cannot be read; names its number.
    """
    lines = folder.read_text(SCORES).splitlines() if SCORES in folder.names() else []
    return [Point(**as_json(line, POINT, f"{folder.path / SCORES}, line {number}"))
            for number, line in enumerate(lines, 1)]


def read_ended(folder: Folder) -> dict[str, Ended]:
    """The trials of a search that ended, from its folder; what a kill cut off is removed, a failed trial has not ended.

    Raises:
        CheckpointError: a line cannot be read; names its number.
    """
    text = folder.read_text(TRIALS) if TRIALS in folder.names() else ""
    whole, _, rest = text.rpartition("\n")
    trials = [as_json(line, ENDED, f"{folder.path / TRIALS}, line {number}")
              for number, line in enumerate(whole.splitlines(), 1)]
    if rest:
        folder.write(TRIALS, f"{whole}\n" if whole else "")
    return {trial["trial"]: trial for trial in trials if trial["failed"] is None}


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

    def end(self, ended: Ended, folder: Path) -> None:
        """Takes the trial for one that ended before an interruption.

        Args:
            folder: of the trial.

        Raises:
            CheckpointError: it was run with other values, or its folder says otherwise.
        """
        if ended["values"] != self.values:
            raise CheckpointError(f"{folder}: trial {self.id} was run with {ended['values']}, the search now draws "
                                  f"{self.values}; continue it with the versions it was started with")
        files = Files(folder)
        there = files.config()
        if followed(self.config, there) != there:           # it has what the data decided
            raise CheckpointError(f"{folder}: has another configuration than the search; put the trial's own back")
        reports = files.lines().reports
        for point in ended["points"]:
            figures = reports[point["step"] - 1]["figures"] if point["step"] <= len(reports) else None
            judged = {} if figures is None else figures.get(figures_of(point["kind"]))
            if judged is not None and judged != point["validation"]:
                raise CheckpointError(f"{folder.parent.parent / TRIALS}: trial {self.id} has other figures of step "
                                      f"{point['step']} than its metrics.jsonl; put the original back")
            self.points[point["step"]] = Point(**point)
        if files.ended:
            files.summary()
        self.closed = True

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
