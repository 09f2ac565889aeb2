"""A federated run as a trial of a search, with evaluations on the validation set.

The folder of a trial is a run folder with one more file, scores.jsonl, which has one line per `Score`. A trial that is
started again continues from its last checkpoint.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from raylt.config import Config
from raylt.core.device import open_device
from raylt.core.evaluation.evaluator import has_own_models, validate
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.report import RoundReport
from raylt.core.setup import Setup
from raylt.data.fingerprint import hash_data
from raylt.data.splits.check import complete
from raylt.data.task import Task, build_task, judged_images_of, outline_of
from raylt.errors import CheckpointError, FolderHeld
from raylt.registry import Plugin, adopt, origins, resolve
from raylt.runs.folder import provenance
from raylt.runs.folder.summary import summarise
from raylt.runs.folder.writer import Journal
from raylt.runs.preparation import prepare
from raylt.runs.run import Run
from raylt.store import Folder, folder_for
from tune.asha import rungs
from tune.records import (
    SCORES,
    Metric,
    Score,
    ScoreKind,
    figures_of,
    kind_of,
    on_split,
    read_scores,
    score_of,
    split_folder,
)

LOCK_TIMEOUT_S = 60  # Time for a killed process to end and release the run folder.
OpenFleet = Callable[[Setup, Task, str, torch.device, Path], Fleet]


@dataclass(frozen=True)
class TrialJob:
    """The settings of a search that all its trials need.

    Args:
        folder: Folder of the search.
        cwd: Folder to which relative paths of the configuration are relative.
        metric: Metric of the search.
        rungs: Whether trials are compared before their end.
        grace: The first rung, in rounds.
        plugins: Plugins that the configurations of trials may name.
        splits: Number of splits on which a trial runs.
    """

    folder: Path
    cwd: str
    metric: Metric
    rungs: bool
    grace: int | None
    plugins: tuple[Plugin, ...] = ()
    splits: int = 1


class Trial:
    """A trial of a search on its splits, one after another.

    Only the first split has scores of rounds, by which trials are compared before their end. Each further split runs
    only if the trial has reached its end on the previous one. The final score is the worst of all splits.

    Args:
        job: Settings that all trials share.
        id: Id of the trial.
        config: Configuration of the trial.
        cost: Cost of all rounds on one split, in the unit of the search's budget.
        open_fleet: Function that opens the fleet, given setup, task, a name for the actors, the device of this process
            and the run's folder.
        leased: Whether Ray leased a GPU to this process; see `open_device`.
    """

    def __init__(
        self, job: TrialJob, id: str, config: Config, cost: int, open_fleet: OpenFleet, leased: bool | None = None
    ):
        self._splits = job.splits
        self._finals: list[Score] = []  # final scores by split

        def begin(split: int) -> TrialRun:
            own_job = replace(job, rungs=job.rungs and split == 0)
            folder = split_folder(job.folder / "trials" / id, split)
            return TrialRun(own_job, folder, on_split(config, split), cost, open_fleet, leased)

        self._begin = begin
        self._run = begin(0)

    @property
    def done(self) -> bool:
        """Return whether `step` has returned the final score."""
        return len(self._finals) == self._splits

    def step(self) -> list[Score]:
        """Run one step of the trial and return its new scores.

        The first call for a continued trial runs no step, but returns the scores from before the interruption.
        """
        split = len(self._finals)
        if split and self._run.done:
            self._run.close()
            self._run = self._begin(split)
        scores = self._run.step()
        self._finals += [score for score in scores if score.kind == "final"]
        new = [score for score in scores if score.kind != "final"] if split == 0 else []
        return [*new, self._worst()] if self.done else new

    def close(self) -> None:
        """Stop the trial's client actors and release its folder."""
        self._run.close()

    def _worst(self) -> Score:
        split = min(range(self._splits), key=lambda split: self._finals[split].value)
        spent = sum(score.client_steps for score in self._finals)
        return replace(self._finals[split], split=split, client_steps=spent)


class TrialRun:
    """The run of a trial on one split, advanced step by step.

    Args:
        folder: Folder of the run.
        job, config, cost, open_fleet, leased: As for `Trial`.
    """

    def __init__(
        self, job: TrialJob, folder: Path, config: Config, cost: int, open_fleet: OpenFleet, leased: bool | None = None
    ):
        self.job = job
        self.id = folder.name
        self.config = config
        self.cost = cost
        self.folder = folder
        self.fleet: Fleet | None = None
        self._scores: dict[int, Score] = {}
        self._experiment: Experiment | None = None
        self._journal: Journal | None = None
        if Run(self.folder).state == "done":  # the search was interrupted after the trial's end
            _ = Run(self.folder).finished()
            self._scores = self._read()
        else:
            try:
                self._open(open_fleet, leased)
            except BaseException:
                self.close()
                raise
        self._returned = 0  # number of scores that `step` has returned

    @property
    def done(self) -> bool:
        """Return whether the run has finished its last step."""
        return self._experiment is None or self._experiment.done

    def step(self) -> list[Score]:
        """Run one step and return its new scores; see `Trial.step`."""
        if self._returned or not self._scores:
            self._advance()
        new = list(self._scores.values())[self._returned :]
        self._returned = len(self._scores)
        return new

    def close(self) -> None:
        """Stop the run's client actors and release its folder."""
        if self.fleet is not None:
            self.fleet.close()
            self.fleet = None
        if self._journal is not None:
            self._journal.__exit__()
            self._journal = None

    def _open(self, open_fleet: OpenFleet, leased: bool | None) -> None:
        torch.set_num_threads(1)  # so that weights computed here do not depend on the number of cores
        adopt(self.job.plugins)
        started = Run(self.folder).state != "missing"
        self.task = Run(self.folder).task if started else build_task(self.config.data)
        assert self.task.validation is not None
        self.config = self.config.model_copy(update={"data": complete(self.config.data, self.task.split)})
        if not started:
            self._create_folder()
        self._journal = _locked_journal(self.folder)
        if Run.open(self.folder).config != self.config:
            raise CheckpointError(
                f"{self.folder}: the trial has another configuration. Give the search another --name.",
                code="search.changed",
                path=str(self.folder),
                trial=self.id,
            )
        saved, _ = self._journal.rewind()
        setup, self.task, _ = prepare(resolve(self.config), self.task, saved)
        name = f"{self.job.folder.name}/{self.id}" + (f"~{os.getpid()}" if started else "")
        device = open_device(self.config, leased)
        self.fleet = open_fleet(setup, self.task, name, device, self.folder)
        self._experiment = Experiment(setup, self.task, self.fleet, device, self.folder)
        devices = self._experiment.describe()
        fleet = "local" if isinstance(self.fleet, LocalFleet) else "ray"
        provenance.check_device(self.folder, self.config, devices)
        provenance.note(self.folder, fleet, len(self._journal.reports()), self.config, devices)
        if saved is not None:
            self._experiment.load(saved)
            step = saved.facts["step"]
            self._scores = {score.step: score for score in self._read().values() if score.step <= step}
            self._write()
            self._judge(RoundReport(**saved.facts["report"]))  # does nothing if the step was evaluated before
            if self._experiment.done:
                self._conclude()

    def _create_folder(self) -> None:
        with folder_for(self.folder.parent) as trials:
            trials.remove(self.folder.name)  # a process may have been killed before the run started
        journal = Journal.create(
            self.folder,
            self.config,
            self.task.split,
            hash_data(self.task),
            origins(self.config),
            outline=outline_of(self.task),
        )
        journal.__exit__()

    def _advance(self) -> None:
        assert self._experiment is not None
        assert self._journal is not None
        report = self._experiment.advance(self._journal.seal)
        score = self._judge(report)
        if score is not None:
            figures = report.figures | {figures_of(score.kind): score.validation}
            report = report.model_copy(update={"figures": figures})
        self._journal.append(report)
        if self._experiment.done:
            self._conclude()

    def _conclude(self) -> None:
        assert self._experiment is not None
        assert self._journal is not None
        summary = summarise(
            self._journal.reports(),
            self.config.method["name"],
            self.task.split.sha256,
            judged_images_of(self.task),
            self._experiment.export_model(),
        )
        self._journal.write_summary(summary | provenance.of_summary(self.folder))
        with Folder.open(self.folder) as folder:
            folder.remove("checkpoints")

    def _judge(self, report: RoundReport) -> Score | None:
        """Evaluate a step, record its score and return it; return None if no new evaluation is due."""
        kind = self._kind(report)
        if kind is None or report.step in self._scores:
            return None
        assert self._experiment is not None
        if kind == "rehearsal":
            with self._experiment.rehearsal():
                figures = self._validate()
        else:
            figures = report.figures.get("validation") or self._validate()
        score = score_of(report.record(), kind, figures, self.job.metric, self.config, self.cost)
        assert score is not None, "the search checks that there is a class to judge"
        self._scores[score.step] = score
        self._write()
        return score

    def _validate(self) -> dict[str, float | None]:
        experiment = self._experiment
        assert experiment is not None
        return validate(experiment.method, experiment.server, experiment.fleet, experiment.task)

    def _kind(self, report: RoundReport) -> ScoreKind | None:
        """Return the kind of evaluation that is due after a step; None if none is due."""
        assert self._experiment is not None
        experiment = self._experiment
        rung_steps = rungs(self.config.federation.rounds, self.job.grace) if self.job.rungs else []
        kind = kind_of(report.step, self.config, experiment.method.finishes, rung_steps)
        between = kind in ("round", "proxy") and report.step not in rung_steps
        if between and has_own_models(experiment.method, experiment.server):
            return None  # evaluating clients' own models would ask every client in each round
        return kind

    def _read(self) -> dict[int, Score]:
        with Folder.open(self.folder) as folder:
            return {score.step: score for score in sorted(read_scores(folder), key=lambda score: score.step)}

    def _write(self) -> None:
        with Folder.open(self.folder) as folder:
            folder.write(SCORES, "".join(json.dumps(score.to_json()) + "\n" for score in self._scores.values()))


def local_fleet(setup: Setup, task: Task, name: str, device: torch.device, folder: Path) -> Fleet:
    """Return a fleet that runs all clients in this process."""
    return LocalFleet(setup.config, task, ClientHost(setup, task.spec, task.test, device))


def _locked_journal(folder: Path) -> Journal:
    """Lock the run folder and return its journal, after a killed process has released the folder."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return Journal(folder)
        except FolderHeld:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
