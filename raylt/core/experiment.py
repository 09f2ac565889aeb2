"""`Experiment`: a run that can be stepped, saved and loaded; by this process, the server actor or a Tune trial."""

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raylt import metrics, tree
from raylt.core import checkpoint
from raylt.core.checkpoint import Checkpoint, Seal
from raylt.core.cohort import Ledger, Traffic
from raylt.core.evaluation import confusion_of
from raylt.core.fleet import Fleet
from raylt.core.judging import Judge, counts_on, judged_entries
from raylt.core.parts import replace_tensors
from raylt.core.reductions import Reduction
from raylt.core.report import Report
from raylt.core.server import Server, Stages
from raylt.core.setup import Setup
from raylt.data.samples import Samples
from raylt.data.task import Task
from raylt.tree import Tree


class Experiment:
    """A method, a task and a fleet, taken step by step.

    Args:
        folder: the run folder, where checkpoints and the final model go.
    """

    def __init__(self, setup: Setup, task: Task, fleet: Fleet, device: torch.device, folder: Path):
        self.config, self.method, self.task, self.fleet, self.folder = setup.config, setup.method, task, fleet, folder
        model = setup.check(task.facts).to(device)
        self.server = Server(setup.config, task.facts, model, device, setup.method.server_optimiser())
        self._test: Samples | None = None
        self._saved: Checkpoint | None = None
        self._step = 0

    @property
    def done(self) -> bool:
        return self._step >= self.server.rounds + self.method.finishes

    def step(self) -> Report:
        """One round, or the finish; then an evaluation when it is due."""
        assert not self.done
        start = time.perf_counter()
        server, fleet, joined = self.server, self.fleet, Ledger()
        server.figures, server.stages = {}, Stages()
        if self._step == 0:
            fleet.begin(0)
            self.method.start(server, fleet)
            joined = fleet.ledger
        self._step += 1
        server.round = self._step
        fleet.begin(self._step)
        last = self._step >= server.rounds
        phase = "round" if self._step <= server.rounds else "finish"
        if phase == "round":
            self.method.round(server, fleet)
        else:
            self.method.finish(server, fleet)
        ledger, trained = fleet.ledger, time.perf_counter()
        stages = Stages(joined.stages)
        for more in (ledger.stages, server.stages):         # before anybody is judged, which calls clients too
            stages.add(more)
        judged = self._evaluate(last)
        evaluation = time.perf_counter() - trained
        return Report(
            step=self._step, phase=phase, seconds=trained - start, evaluation_seconds=evaluation,
            stages={**stages, "evaluation": evaluation},
            traffic={name: asdict(t) for name, t in _merge(joined.traffic, ledger.traffic).items()},
            participants=sorted(ledger.participants),
            lost=joined.lost + ledger.lost, retried=joined.retried + ledger.retried,
            rejected=joined.rejected | ledger.rejected, figures=server.figures, **judged)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside the block the method is finished, as if this had been the last round; after it nothing has happened.

        What it draws differs from the finish to come, whose seeds follow the last round's number.
        """
        server, fleet = self.server, self.fleet
        before = server.model, server.state, server.round, server.figures, server.stages
        server.model, server.state = copy.deepcopy(server.model), copy.deepcopy(server.state)
        try:
            with fleet.rehearsing():
                server.round, server.figures, server.stages = self._step + 1, {}, Stages()
                fleet.begin(self._step + 1)
                self.method.finish(server, fleet)
                yield
        finally:
            server.model, server.state, server.round, server.figures, server.stages = before

    def advance(self, seal: Seal | None = None) -> Report:
        """A step, then a checkpoint when it is due.

        Args:
            seal: what binds the checkpoint to its run; None without a run folder.
        """
        report = self.step()
        if (self._step % self.config.output.checkpoint_every == 0 or self._step >= self.server.rounds
                or self._step in self._forks):
            start = time.perf_counter()
            self.save(report, seal)
            report.stages["checkpoint"] = time.perf_counter() - start
        return report

    @property
    def _forks(self) -> set[int]:
        """The steps after which a run can be branched: their checkpoints stay."""
        return set(self.method.stages(self.server.rounds).values())

    def judged_again(self) -> dict[str, Any]:
        """What the report of the last step says of accuracies, of another of the models that clients have."""
        assert self.done
        return self._evaluate(last=True)

    def conclude(self) -> dict[str, str]:
        """Writes the deployed model and returns what a summary says of it."""
        model = {name: value.detach().cpu().contiguous()
                 for name, value in self.method.global_model(self.server).state_dict().items()}
        replace_tensors(self.folder, "model.safetensors", model)
        return {"model_sha256": checkpoint.hash_tensors(model), "task": self.task.kind}

    def save(self, report: Report, seal: Seal | None = None) -> None:
        """Commits a checkpoint of everything that the next step depends on, with the report of the step before."""
        facts = {"step": self._step, "report": asdict(report), "seal": None if seal is None else asdict(seal)}
        self._saved = checkpoint.write(self.folder / "checkpoints", self._step, self._parts(), facts, self._saved,
                                       self.config.output.keep, self._forks)
        self.fleet.changed.clear()

    def load(self, saved: Checkpoint) -> None:
        """Takes up a run where a checkpoint left it."""
        part = saved.read("server")
        self.server.receive(part["model"])
        self.server.state = part["state"]
        self._step = self.server.round = saved.facts["step"]
        for id in self._clients_in(saved):
            self.fleet.restore(id, saved.read(_part_of(id)))
        self.fleet.changed.clear()
        self._saved = saved

    def _parts(self) -> Iterator[tuple[str, Tree | None]]:
        yield "server", {"model": tree.snapshot(self.server.model.state_dict()),
                         "state": tree.snapshot(self.server.state)}
        for id in self._clients_in(self._saved):
            if id not in self.fleet.changed:
                yield _part_of(id), None
        for id, private in self.fleet.private_states(sorted(self.fleet.changed)):
            yield _part_of(id), private

    def _clients_in(self, saved: Checkpoint | None) -> list[int]:
        return [] if saved is None else [id for id in self.fleet.ids if _part_of(id) in saved.parts]

    def _evaluate(self, last: bool) -> dict[str, Any]:
        every = self.config.evaluation
        judged: dict[str, Any] = dict.fromkeys(("accuracy", "global_accuracy", "global_macro", "global_miou", "macro",
                                                "miou", "groups", "clients", "by_client", "others"))
        personal = self.method.personal or bool(self.server.model.stays)
        matrices: Tensor | dict[int, Tensor] | None = None
        # a global model without running statistics (federation.batchnorm = local) cannot be judged
        if (last or self._step % every.every == 0) and not self.server.model.stays:
            matrices = self._judge_global()
            judged["global_accuracy"] = metrics.accuracy(matrices)
            judged["global_macro"], judged["global_miou"] = metrics.macro(matrices), metrics.mean_iou(matrices)
        if personal:
            due = last or (every.personal > 0 and self._step % every.personal == 0)
            matrices = self._judge_clients() if due else None
        if matrices is not None:
            judged |= self._figures(matrices)
            if not (personal or last):
                judged["by_client"] = None
        if personal and self.done:
            judged["others"] = {name: self._figures(self._judge_clients(name)) for name in self.method.other_models}
        return judged

    def _figures(self, matrices: Tensor | dict[int, Tensor]) -> dict[str, Any]:
        """What is read off the counts of each client's own model, or of one that all share, as each sees the classes.

        Of clients' own models the overall figures are those of their counts put together.
        """
        seen = metrics.seen_by_each(matrices, torch.from_numpy(self.task.views), self.fleet.ids)
        pooled = sum(seen.values(), start=torch.zeros_like(next(iter(seen.values()))))
        by_client = metrics.by_client(seen, torch.from_numpy(self.task.client_counts))
        return {"accuracy": metrics.accuracy(pooled), "macro": metrics.macro(pooled),
                "miou": metrics.mean_iou(pooled), "groups": metrics.group_accuracy(pooled, self.task.groups),
                "clients": metrics.client_figures(by_client), "by_client": by_client}

    def _judge_global(self) -> Tensor:
        if self._test is None:
            self._test = Samples(self.task.test, self.task.facts, self.server.device)
        model = self.method.global_model(self.server).eval()
        with _all_threads():
            return confusion_of(lambda x: self.method.predict(model, x), self._test, self.task.classes,
                                self.config.evaluation.batch)

    @cached_property
    def _counts(self) -> Reduction:
        return counts_on(self.task.test, self.task.classes)

    def _judge_clients(self, other: str | None = None) -> dict[int, Tensor]:
        message = {"model": judged_entries(self.server, self.method)}
        with self.fleet.rehearsing():               # judging leaves private states as they were
            got = self.fleet.ask(Judge(self.method, other).judge, self.fleet.everyone, message,
                                 confusion=self._counts)
        del self.fleet.ledger.traffic["judge"]      # no federation would send these: they are for our eyes
        return got["confusion"]


def _part_of(client: int) -> str:
    """The part of a checkpoint that holds a client's private state."""
    return f"client-{client:03d}"


def _merge(first: dict[str, Traffic], second: dict[str, Traffic]) -> dict[str, Traffic]:
    none = Traffic()
    return {name: Traffic(a.down + b.down, a.up + b.up, a.replies + b.replies) for name in first | second
            for a, b in [(first.get(name, none), second.get(name, none))]}


@contextmanager
def _all_threads() -> Iterator[None]:
    """All cores: clients are idle during an evaluation, and it decides counts, not weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
