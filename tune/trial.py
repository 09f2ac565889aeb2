"""`Trial`: one federated run inside a search. Its folder is a run folder, and its steps are judged on validation too.

    scores.jsonl     one line per judgement, see `Point`; beside what every run folder holds

A trial takes itself up where its last checkpoint left it, so whoever starts it again need not know how far it was.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raylt.config import Config
from raylt.core.device import open_device
from raylt.core.experiment import Experiment
from raylt.core.fleet import Fleet
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.report import Report
from raylt.core.setup import Setup
from raylt.core.validation import has_own_models, validate
from raylt.data.hashes import hash_data
from raylt.data.outline import outline_of
from raylt.data.split_source import complete
from raylt.data.task import Task, build_task
from raylt.errors import CheckpointError, FolderHeld
from raylt.registry import Guest, adopt, origins, resolve
from raylt.runs import provenance
from raylt.runs.journal import Journal
from raylt.runs.run import Run
from raylt.runs.summary import summarise
from raylt.store import Folder, folder_for
from tune.halving import rungs
from tune.kinds import Metric
from tune.record import SCORES, Point, figures_of, read_points

LOCK_TIMEOUT_S = 60
OpenFleet = Callable[[Setup, Task, str, torch.device], Fleet]


@dataclass(frozen=True)
class Job:
    """What a trial needs to know of its search.

    Args:
        folder: of the search.
        cwd: what relative paths of the configuration are relative to.
        rungs: whether trials are compared on the way.
        guests: what the configurations of trials may name beside raylt's own.
    """

    folder: Path
    cwd: str
    metric: Metric
    rungs: bool
    grace: int | None
    guests: tuple[Guest, ...] = ()


class Trial:
    """A run that can be stepped; see the module's docstring.

    Args:
        cost: client-steps of all rounds.
        open_fleet: called with setup, task, a name for the actors and the device of this process.
        leased: whether Ray leased a GPU to this process, see `open_device`.
    """

    def __init__(self, job: Job, id: str, config: Config, cost: int, open_fleet: OpenFleet, leased: bool | None = None):
        self.job, self.id, self.config, self.cost = job, id, config, cost
        self.folder = job.folder / "trials" / id
        self.fleet: Fleet | None = None
        self._points: dict[int, Point] = {}
        self._experiment: Experiment | None = None
        self._journal: Journal | None = None
        if Run(self.folder).state == "done":                # it was through when it was interrupted
            _ = Run(self.folder).finished()
            self._points = self._read()
        else:
            try:
                self._open(open_fleet, leased)
            except BaseException:
                self.close()
                raise
        self._told = 0

    @property
    def done(self) -> bool:
        return self._experiment is None or self._experiment.done

    def step(self) -> list[Point]:
        """One step of the run and its judgement; first of all, once, what was there before."""
        if self._told or not self._points:
            self._advance()
        new = list(self._points.values())[self._told:]
        self._told = len(self._points)
        return new

    def close(self) -> None:
        """Frees the clients and the folder."""
        if self.fleet is not None:
            self.fleet.close()
        if self._journal is not None:
            self._journal.__exit__()

    def _open(self, open_fleet: OpenFleet, leased: bool | None) -> None:
        torch.set_num_threads(1)            # weights computed here must not depend on the machine's cores
        adopt(self.job.guests)
        there = Run(self.folder).state != "missing"
        self.task = Run(self.folder).task if there else build_task(self.config.data)
        assert self.task.validation is not None
        self.config = self.config.model_copy(update={"data": complete(self.config.data, self.task.split)})
        if not there:
            with folder_for(self.folder.parent) as trials:
                trials.remove(self.folder.name)                 # of one that was killed before it began
            Journal.create(self.folder, self.config, self.task.split, hash_data(self.task),
                           origins(self.config), outline=outline_of(self.task)).__exit__()
        self._journal = _hold(self.folder)
        if Run.open(self.folder).config != self.config:
            raise CheckpointError(f"{self.folder}: has another configuration; give the search another --name")
        setup = resolve(self.config)
        setup.method.prepare(self.task, self.config, setup.check(self.task.facts))
        saved, _ = self._journal.rewind()
        name = f"{self.job.folder.name}/{self.id}" + (f"~{os.getpid()}" if there else "")
        device = open_device(self.config, leased)
        self.fleet = open_fleet(setup, self.task, name, device)
        self._experiment = Experiment(setup, self.task, self.fleet, device, self.folder)
        self._reports, facts = self._journal.reports(), self._experiment.describe()
        provenance.check_device(self.folder, self.config, facts)
        provenance.note(self.folder, "local" if isinstance(self.fleet, LocalFleet) else "ray", len(self._reports),
                        self.config, facts)
        if saved is not None:
            self._experiment.load(saved)
            step = saved.facts["step"]
            self._points = {p.step: p for p in self._read().values() if p.step <= step}
            self._write()
            self._judge(Report(**saved.facts["report"]))        # does nothing when it was done
            if self._experiment.done:
                self._conclude()

    def _advance(self) -> None:
        assert self._experiment is not None
        assert self._journal is not None
        report = self._experiment.advance(self._journal.seal)
        point = self._judge(report)
        if point is not None:
            report = replace(report, figures=report.figures | {figures_of(point.kind): point.validation})
        self._journal.append(report)
        if self._experiment.done:
            self._conclude()

    def _conclude(self) -> None:
        assert self._experiment is not None
        assert self._journal is not None
        summary = summarise(self._journal.reports(), self.config.method["name"], self.task.split.sha256,
                            self._experiment.conclude())
        self._journal.conclude(summary | provenance.of_summary(self.folder))
        with Folder.open(self.folder) as folder:
            folder.remove("checkpoints")

    def _judge(self, report: Report) -> Point | None:
        """The judgement of a step, written down; None when it is not due or was there."""
        kind = self._kind(report)
        if kind is None or report.step in self._points:
            return None
        assert self._experiment is not None
        if kind == "rehearsal":
            with self._experiment.rehearsal():
                figures = self._validate()
        else:
            figures = report.figures.get("validation") or self._validate()
        score = figures[self.job.metric]
        assert score is not None, "the search checks that there is a class to judge"
        rounds = self.config.federation.rounds
        point = Point(report.step, kind, score, self.cost * min(report.step, rounds) // rounds, figures,
                      {} if kind == "rehearsal" else _test_figures(report))
        self._points[point.step] = point
        self._write()
        return point

    def _validate(self) -> dict[str, float | None]:
        experiment = self._experiment
        assert experiment is not None
        return validate(experiment.method, experiment.server, experiment.fleet, experiment.task)

    def _kind(self, report: Report) -> Any:
        assert self._experiment is not None
        experiment, every, rounds = self._experiment, self.config.evaluation.every, self.config.federation.rounds
        if report.step == rounds + experiment.method.finishes:
            return "final"
        if self.job.rungs and report.step in rungs(rounds, self.job.grace):
            return "rehearsal" if experiment.method.finishes else "round"
        if report.step % every or has_own_models(experiment.method, experiment.server):
            return None             # asking every client for it each round is too dear
        return "proxy" if experiment.method.finishes else "round"

    def _read(self) -> dict[int, Point]:
        with Folder.open(self.folder) as folder:
            return {point.step: point for point in read_points(folder)}

    def _write(self) -> None:
        with Folder.open(self.folder) as folder:
            folder.write(SCORES, "".join(json.dumps(asdict(point)) + "\n" for point in self._points.values()))


def local_fleet(setup: Setup, task: Task, name: str, device: torch.device) -> Fleet:
    """All clients in this process."""
    return LocalFleet(setup.config, task, Host(setup, task.facts, task.test, device))


def _test_figures(report: Report) -> dict[str, float | None]:
    figures: dict[str, float | None] = {"accuracy": report.accuracy} | (report.groups or {})
    for kind in ("owned", "matched"):
        figures[kind] = report.clients[kind]["mean"] if report.clients else None
    return figures


def _hold(folder: Path) -> Journal:
    """The run folder, once the process that held it is gone: one that was killed may take a moment to end."""
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return Journal(folder)
        except FolderHeld:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)

