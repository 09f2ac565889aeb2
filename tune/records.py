"""Scores and records of trials, and their JSON form in the files of a search.

`Score` is one evaluation of a trial, a line of scores.jsonl. `TrialRecord` is the search's record of a trial, a line of
trials.jsonl once the trial has ended.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt.config import Config, followed
from raylt.core.report import Fraction
from raylt.disk import exists
from raylt.errors import CheckpointError
from raylt.methods import make_method
from raylt.registry import check_origins
from raylt.runs.folder.reader import Files
from raylt.store import Folder
from raylt.studies.running.tuning import MOST_SPLITS, Count, Metric
from raylt.typed_json import as_json, chain, closed, hash_json, is_chained
from tune.asha import Outcome

ScoreKind = Literal["round", "proxy", "rehearsal", "final"]
Searcher = Literal["tpe", "random", "grid"]
Scheduler = Literal["asha", "none"]

SCORES = "scores.jsonl"  # In a trial's folder.
TRIALS = "trials.jsonl"  # In a search's folder.
PLAN = "search.json"  # In a search's folder.


@closed
class ScoreJson(TypedDict):
    """A score as JSON."""

    step: Annotated[int, Field(ge=1)]
    kind: ScoreKind
    score: Fraction
    steps: Annotated[int, Field(ge=0)]
    validation: dict[str, Fraction | None]
    test: dict[str, Fraction | None]
    split: NotRequired[Annotated[int, Field(ge=1)]]


@closed
class EndedTrialJson(TypedDict):
    """A line of trials.jsonl, which describes a trial that has ended.

    `sha256` is the hash of all other fields. `previous` is the hash of the previous line; on the first line, it is the
    hash of search.json.
    """

    trial: str
    values: dict[str, Any]
    failed: str | None
    points: list[ScoreJson]
    previous: str
    sha256: str


@closed
class SearchPlanJson(TypedDict):
    """The content of search.json. Settings of later versions are left out if they have their defaults."""

    base: dict[str, Any]
    spaces: dict[str, dict[str, Any]]
    samples: Annotated[int, Field(ge=1)] | None
    budget: Annotated[int, Field(ge=1)] | None
    count: NotRequired[Count]
    searcher: Searcher
    scheduler: Scheduler
    grace: int | None
    metric: Metric
    other_metrics: NotRequired[list[Metric]]
    seed: Annotated[int, Field(ge=0)]
    lag: Annotated[int, Field(ge=0)]
    retries: Annotated[int, Field(ge=0)]
    splits: NotRequired[Annotated[int, Field(ge=1, le=MOST_SPLITS)]]
    start: str | None
    sha256: str


SCORE_JSON = TypeAdapter(ScoreJson)
ENDED_TRIAL_JSON = TypeAdapter(EndedTrialJson)
SEARCH_PLAN_JSON = TypeAdapter(SearchPlanJson)


@dataclass(frozen=True)
class Score:
    """One evaluation of a trial on the validation set.

    Args:
        step: The step of the run after which the model was evaluated.
        kind: "round" after a round, and "final" for the deployed model. A method with a last phase has "proxy" before
            that phase, which is not used for decisions, and "rehearsal" at a rung, where the phase runs on a copy.
        value: The metric of the search; higher is better.
        client_steps: Number of SGD steps of all clients so far. With a budget in passes, it is the number of FedAvg
            steps with as many passes.
        validation: Metrics on the validation set, by name.
        test: Metrics on the test set, which are not used for decisions; empty for a rehearsal.
        split: The split of the metrics: 0, or the worst split for the final score of a trial on several splits.
    """

    step: int
    kind: ScoreKind
    value: float
    client_steps: int
    validation: dict[str, float | None]
    test: dict[str, float | None]
    split: int = 0

    @classmethod
    def from_json(cls, content: ScoreJson) -> "Score":
        """Read a score from a JSON object."""
        return cls(
            content["step"],
            content["kind"],
            content["score"],
            content["steps"],
            content["validation"],
            content["test"],
            content.get("split", 0),
        )

    def to_json(self) -> ScoreJson:
        """Return the score as a JSON object."""
        content: ScoreJson = {
            "step": self.step,
            "kind": self.kind,
            "score": self.value,
            "steps": self.client_steps,
            "validation": self.validation,
            "test": self.test,
        }
        if self.split:
            content["split"] = self.split
        return content


@dataclass
class TrialRecord:
    """The state of a trial as recorded by its search.

    Attributes:
        id: Method and number of the trial.
        method: Name of the method.
        values: Values of the searched settings.
        config: Configuration of the trial.
        cost: Cost of all rounds on one split, in the unit of the search's budget.
        scores: Scores by step.
        failed: Error of a failed trial.
        closed: Whether the trial gets no more scores.
        outcome: Result of the trial; None while it is unknown.
        splits: Number of splits on which the trial runs if it reaches its end.
    """

    id: str
    method: str
    values: dict[str, Any]
    config: Config
    cost: int
    scores: dict[int, Score] = field(default_factory=dict)
    failed: str | None = None
    closed: bool = False
    outcome: Outcome | None = None
    splits: int = 1

    def restore(self, ended: EndedTrialJson, folder: Path) -> None:
        """Restore the scores that this trial had before an interruption.

        Args:
            ended: The line of the trial in trials.jsonl.
            folder: Folder of the trial.

        Raises:
            CheckpointError: The trial had other values, or its folder contradicts its line.
        """
        if ended["values"] != self.values:
            raise CheckpointError(
                f"{folder}: trial {self.id} ran with other values ({ended['values']}; the search now draws "
                f"{self.values}). Continue the search with the versions that it was started with.",
                code="search.changed",
                path=str(folder),
                trial=self.id,
            )
        points = [Score.from_json(content) for content in ended["points"]]
        reports_by_split = {
            split: self._read_split(folder, split)
            for split in range(self.splits)
            if split == 0 or exists(split_folder(folder, split)) or any(point.split == split for point in points)
        }
        for score in points:
            reports = reports_by_split[score.split]
            figures = reports[score.step - 1]["figures"] if score.step <= len(reports) else None
            reported = {} if figures is None else figures.get(figures_of(score.kind))
            if reported is not None and reported != score.validation:
                file = folder.parent.parent / TRIALS
                raise CheckpointError(
                    f"{file}: the metrics of a trial differ from its metrics.jsonl (trial {self.id}, step "
                    f"{score.step}). Restore the original file.",
                    code="search.changed",
                    path=str(file),
                    trial=self.id,
                    step=score.step,
                )
            self.scores[score.step] = score
        self.closed = True

    def check_interrupted(self, folder: Path, metric: Metric, rungs: Collection[int]) -> None:
        """Check the files of this trial after an interruption: its runs are intact, and its scores match its runs.

        Args:
            folder: Folder of the trial, which need not exist.
            metric: Metric of the search.
            rungs: Steps after which the first split is compared with other trials.

        Raises:
            CheckpointError: A file was changed.
        """
        for split in range(self.splits):
            path = split_folder(folder, split)
            if exists(path) and Files(path).state != "missing":
                reports = self._read_split(folder, split)
                saved = Files(path).checkpoint()
                if saved is not None and saved.facts["step"] > len(reports):  # killed before writing the line
                    reports.append(saved.facts["report"])
                self._check_scores(path, reports, metric, rungs if split == 0 else ())

    def _check_scores(self, path: Path, reports: list[dict[str, Any]], metric: Metric, rungs: Collection[int]) -> None:
        with Folder.open(path) as folder:
            scores = {score.step: score for score in read_scores(folder)}
        method = make_method(self.config.method)
        own_models = method.personal or self.config.federation.batchnorm == "local"
        done = Files(path).ended
        for step, report in enumerate(reports, 1):
            score = scores.get(step)
            kind = kind_of(step, self.config, method.finishes, rungs)
            if score is None:
                # unless the trial is done, it computes the score of the last step again
                due = kind is not None and not (own_models and kind in ("round", "proxy") and step not in rungs)
                if not due or (step == len(reports) and not done):
                    continue
                raise _changed_scores(path, step, "is missing")
            # a line that was restored from a checkpoint does not have these metrics
            validation = report["figures"].get(figures_of(score.kind), score.validation)
            expected = kind and score_of(report, kind, validation, metric, self.config, self.cost)
            if not expected or hash_json(expected.to_json()) != hash_json(score.to_json()):
                raise _changed_scores(path, step, "does not match the step's metrics")

    def _read_split(self, folder: Path, split: int) -> list[dict[str, Any]]:
        """Check the run folder of a trial on one split and the versions of its plugins, and return its reports."""
        path = split_folder(folder, split)
        files = Files(path)
        check_origins([{**plugin} for plugin in files.plugins()], path)
        recorded = files.config()
        # `recorded` includes settings that were derived from the data
        if followed(on_split(self.config, split), recorded) != recorded:
            raise CheckpointError(
                f"{path}: the trial's configuration does not match the search (trial {self.id}). Restore the trial's "
                "files.",
                code="search.changed",
                path=str(path),
                trial=self.id,
            )
        if files.ended:
            files.summary()
        return files.lines().reports

    def line(self, previous: str) -> str:
        """Return the line of this trial for trials.jsonl.

        Args:
            previous: Hash of the previous line.
        """
        content = {
            "trial": self.id,
            "values": self.values,
            "failed": self.failed,
            "points": [score.to_json() for score in self.scores.values()],
        }
        return json.dumps(chain(content, previous))

    @property
    def spent(self) -> int:
        """Return the cost that counts towards the budget, which is the full cost while the outcome is unknown."""
        if self.outcome is None or self.outcome.state != "stopped":
            return self.whole_cost
        return self.cost * self.outcome.step // self.config.federation.rounds

    @property
    def whole_cost(self) -> int:
        """Return the cost of the trial if it reaches its end on all splits."""
        return self.cost * self.splits

    @property
    def counted_scores(self) -> list[Score]:
        """Return the scores up to the trial's outcome.

        A stopped trial may have continued while its outcome was unknown.
        """
        last = self.outcome.step if self.outcome is not None and self.outcome.state == "stopped" else math.inf
        return [score for score in self.scores.values() if score.step <= last]

    @property
    def figures(self) -> dict[str, float | None]:
        """Return the validation metrics of the deciding score; empty while there is no outcome."""
        deciding = self.deciding_score
        return {} if deciding is None else deciding.validation

    @property
    def deciding_score(self) -> Score | None:
        """The score that decided the trial's outcome; None while there is no outcome."""
        if self.outcome is None or self.outcome.score is None:
            return None
        done = self.outcome.state == "done"
        kinds = ("final",) if done else ("round", "rehearsal")
        for score in self.scores.values():
            if score.kind in kinds and score.value == self.outcome.score and (done or score.step == self.outcome.step):
                return score
        return None


def on_split(config: Config, split: int) -> Config:
    """Return a trial's configuration on one of its splits, whose seeds start at `data.seed`."""
    return config.model_copy(update={"data": config.data.model_copy(update={"seed": config.data.seed + split})})


def split_folder(folder: Path, split: int) -> Path:
    """Return the run folder of a trial on one of its splits. For the first split, it is the trial's folder."""
    return folder.with_name(f"{folder.name}-split-{split}") if split else folder


def figures_of(kind: ScoreKind) -> str:
    """Return the key of an evaluation in metrics.jsonl.

    A rehearsal has a key of its own, because it evaluates another model.
    """
    return "rehearsal" if kind == "rehearsal" else "validation"


def kind_of(step: int, config: Config, finishes: bool, rungs: Collection[int]) -> ScoreKind | None:
    """Return the kind of evaluation that is due after a step; None if none is due.

    Args:
        step: Step of the trial.
        config: Configuration of the trial.
        finishes: Whether the method has a last phase.
        rungs: Steps after which the trial is compared with other trials.
    """
    if step == config.federation.rounds + finishes:
        return "final"
    if step in rungs:
        return "rehearsal" if finishes else "round"
    if step % config.evaluation.every:
        return None
    return "proxy" if finishes else "round"


def score_of(
    report: Mapping[str, Any],
    kind: ScoreKind,
    validation: dict[str, float | None],
    metric: Metric,
    config: Config,
    cost: int,
) -> Score | None:
    """Return the score of a trial's step, or None if the metric has no value.

    Args:
        report: Report of the step, as JSON values.
        kind: Kind of the evaluation.
        validation: Metrics on the validation set.
        metric: Metric of the search.
        config: Configuration of the trial.
        cost: Cost of all rounds of the trial.
    """
    value = validation.get(metric)
    rounds = config.federation.rounds
    spent = cost * min(report["step"], rounds) // rounds if rounds else cost
    test = {} if kind == "rehearsal" else _test_figures(report)
    return None if value is None else Score(report["step"], kind, value, spent, validation, test)


def _test_figures(report: Mapping[str, Any]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {"accuracy": report["accuracy"]} | (report["groups"] or {})
    for kind in ("owned", "matched"):
        figures[kind] = report["clients"][kind]["mean"] if report["clients"] else None
    return figures


def _changed_scores(path: Path, step: int, problem: str) -> CheckpointError:
    file = path / SCORES
    return CheckpointError(
        f"{file}: the score of a step {problem} ({step}). Restore the original file, or remove the trial's folder.",
        code="search.changed",
        path=str(file),
        step=step,
    )


def read_scores(folder: Folder) -> list[Score]:
    """Read the scores of a trial from its folder.

    Raises:
        CheckpointError: A line cannot be read; the message has its number.
    """
    lines = folder.read_text(SCORES).splitlines() if SCORES in folder.names() else []
    return [
        Score.from_json(as_json(line, SCORE_JSON, f"{folder.path / SCORES}, line {number}"))
        for number, line in enumerate(lines, 1)
    ]


def read_ended(folder: Folder) -> dict[str, EndedTrialJson]:
    """Read the trials of a search that ended without an error, by id.

    An incomplete last line, left by a killed process, is removed from the file.

    Raises:
        CheckpointError: A line cannot be read, was changed or does not follow the previous line; the message has its
            number.
    """
    trials, torn = read_trials(folder)
    if torn:
        whole, _, _ = folder.read_text(TRIALS).rpartition("\n")
        folder.write(TRIALS, f"{whole}\n" if whole else "")
    return {trial["trial"]: trial for trial in trials if trial["failed"] is None}


def read_trials(folder: Folder) -> tuple[list[EndedTrialJson], bool]:
    """Read the lines of trials.jsonl; return them, and whether an incomplete line follows.

    Raises:
        CheckpointError: A line cannot be read, was changed or does not follow the previous line.
    """
    text = folder.read_text(TRIALS) if TRIALS in folder.names() else ""
    whole, _, rest = text.rpartition("\n")
    trials: list[EndedTrialJson] = []
    head = _root(folder)
    for number, line in enumerate(whole.splitlines(), 1):
        where = f"{folder.path / TRIALS}, line {number}"
        trial = as_json(line, ENDED_TRIAL_JSON, where)
        if not is_chained({**trial}, head):
            raise CheckpointError(
                f"{where}: was changed, or does not follow the line before it. Restore the original file.",
                code="search.changed",
                path=str(folder.path / TRIALS),
                line=number,
            )
        head = trial["sha256"]
        trials.append(trial)
    return trials, bool(rest)


def append_trial(folder: Folder, record: TrialRecord) -> None:
    """Append the line of an ended trial to trials.jsonl."""
    trials, _ = read_trials(folder)
    previous = trials[-1]["sha256"] if trials else _root(folder)
    folder.append(TRIALS, record.line(previous) + "\n")


def _root(folder: Folder) -> str:
    """Return the hash of the search plan, the start of the hash chain of trials.jsonl."""
    return folder.read_json(PLAN, SEARCH_PLAN_JSON)["sha256"]
