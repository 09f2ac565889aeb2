"""`Experiment`: a run that can be stepped, saved and loaded; by this process, the server actor or a Tune trial."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from raylt import tree
from raylt.core import checkpoint, confusions, states
from raylt.core.checkpoint import Checkpoint, Seal
from raylt.core.cohort import Ledger, Traffic
from raylt.core.confusions import Matrices
from raylt.core.device import describe
from raylt.core.evaluator import Evaluator
from raylt.core.fleet import Fleet
from raylt.core.full import is_full
from raylt.core.parts import States, replace_tensors
from raylt.core.report import Report
from raylt.core.server import Server, Stages
from raylt.core.setup import Setup
from raylt.core.states import SavedStates
from raylt.data.samples import Samples
from raylt.data.task import Task
from raylt.errors import RayltError, one_line
from raylt.tree import Tree


class Experiment:
    """A method, a task and a fleet, taken step by step.

    Args:
        folder: the run folder, where checkpoints and the final model go.
    """

    def __init__(self, setup: Setup, task: Task, fleet: Fleet, device: torch.device, folder: Path):
        self.config, self.method, self.task, self.fleet, self.folder = setup.config, setup.method, task, fleet, folder
        model = setup.check(task.facts).to(device)
        extra = None if task.auxiliary is None else Samples(task.auxiliary, task.facts, device)
        self.server = Server(setup.config, task.facts, model, device, setup.method.server_optimiser(), extra)
        self.evaluator = Evaluator(setup.method, task, self.server, fleet)
        self._matrices: Matrices | None = None
        self._saved: Checkpoint | None = None
        self._step = 0

    @property
    def done(self) -> bool:
        return self._step >= self.server.rounds + self.method.finishes

    def describe(self) -> dict[str, str | None]:
        """What clients and server compute on, see `raylt.core.device.describe`."""
        return {**self.fleet.describe(), "server_device": describe(self.server.device)["device"]}

    def step(self) -> Report:
        """One round, or the finish; then an evaluation when it is due.

        Raises:
            RayltError: the server's device has no room for its own work.
        """
        try:
            return self._take_step()
        except RayltError:                  # one that tells of a client's device says so itself
            raise
        except Exception as error:
            if is_full(error):
                raise RayltError(f"step {self._step}: the server's device has no room for what the server computes "
                                 f"itself ({one_line(error)}); free it, or give the server a GPU of its own, and go on "
                                 "with raylt resume RUN (resources.device=cpu: without GPUs)") from error
            raise

    def _take_step(self) -> Report:
        assert not self.done
        start = time.perf_counter()
        server, fleet, joined = self.server, self.fleet, Ledger()
        server.figures, server.stages = {}, Stages(watch=fleet.watch)
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
        if fleet.watch is not None:
            fleet.watch("evaluation", 0, 0)
        judged, self._matrices = self.evaluator.evaluate(self._step, last, self.done)
        evaluation = time.perf_counter() - trained
        return Report(
            step=self._step, phase=phase, seconds=trained - start, evaluation_seconds=evaluation,
            stages={**stages, "evaluation": evaluation},
            traffic={name: asdict(t) for name, t in _merge(joined.traffic, ledger.traffic).items()},
            participants=sorted(ledger.participants),
            lost=joined.lost + ledger.lost, retried=joined.retried + ledger.retried,
            rejected=joined.rejected | ledger.rejected, figures=server.figures | ({} if ledger.privacy is None else
                                                                          {"privacy": ledger.privacy}), **judged)

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
        self._keep_matrices()
        if (self._step % self.config.output.checkpoint_every == 0 or self._step >= self.server.rounds
                or self._step in self._forks):
            start = time.perf_counter()
            self.save(report, seal)
            report.stages["checkpoint"] = time.perf_counter() - start
        return report

    def _keep_matrices(self) -> None:
        if self._matrices is not None:
            confusions.write(self.folder, self._step, self._matrices)

    @property
    def _forks(self) -> set[int]:
        """The steps after which a run can be branched: their checkpoints stay."""
        return set(self.method.stages(self.server.rounds).values())

    def judged_again(self) -> dict[str, Any]:
        """What the report of the last step says of accuracies, of another of the models that clients have."""
        assert self.done
        judged, self._matrices = self.evaluator.evaluate(self._step, last=True, done=True)
        self._keep_matrices()
        return judged

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

    def load(self, saved: Checkpoint, clients: bool = True) -> None:
        """Takes up a run where a checkpoint left it.

        Args:
            clients: whether what they keep is read too, which to look at models is not needed.
        """
        part = saved.read("server")
        self.server.receive(part["model"])
        self.server.state = part["state"]
        self._step = self.server.round = saved.facts["step"]
        kept = SavedStates(saved)
        for id in sorted(kept.places) if clients else ():
            private = kept.read(id)
            assert private is not None
            self.fleet.restore(id, private)
        self.fleet.changed.clear()
        self._saved = saved

    def _parts(self) -> Iterator[tuple[str, Tree | States | None]]:
        yield "server", {"model": tree.snapshot(self.server.model.state_dict()),
                         "state": tree.snapshot(self.server.state)}
        yield from states.parts(self._step, {} if self._saved is None else self._saved.parts, self.fleet)


def _merge(first: dict[str, Traffic], second: dict[str, Traffic]) -> dict[str, Traffic]:
    none = Traffic()
    return {name: Traffic(a.down + b.down, a.up + b.up, a.replies + b.replies) for name in first | second
            for a, b in [(first.get(name, none), second.get(name, none))]}
