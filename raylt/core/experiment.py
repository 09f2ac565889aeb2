"""`Experiment`: a run that can be stepped, saved and loaded, in this process, a server actor or a Tune trial."""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from raylt import tree
from raylt.core.checkpoint import checkpoint, client_states
from raylt.core.checkpoint.checkpoint import Checkpoint, ClientStates, Seal
from raylt.core.checkpoint.client_states import SavedStates
from raylt.core.checkpoint.frozen import check_frozen, hash_frozen
from raylt.core.device import describe, is_full
from raylt.core.evaluation import counts
from raylt.core.evaluation.counts import Matrices
from raylt.core.evaluation.evaluator import Evaluator
from raylt.core.fleet.fleet import Fleet, check_finite
from raylt.core.fleet.quorum import MAY_DIVERGE, ROBUST_REMEDY
from raylt.core.protection.protection import check_delta
from raylt.core.report import CHECKPOINT, EVALUATION, JUDGED, RoundReport
from raylt.core.round_stats import RoundStats, Timings, Traffic
from raylt.core.server import ENDED_EARLY, EVALUATED, Server
from raylt.core.setup import Setup, check_model
from raylt.data.samples import Samples
from raylt.data.task import Task
from raylt.errors import ConfigError, Diverged, RayltError, TooFewReplies, no_exit, one_line, spoken
from raylt.models.split import StateDict
from raylt.models.trainable import whole_model
from raylt.tree import Tree

DIVERGED_LOSS = 10  # ratio of the mean training loss to the loss of guessing above which training may have diverged


class Experiment:
    """A method, a task and a fleet, advanced step by step.

    Args:
        setup: The run's setup.
        task: The data.
        fleet: The clients.
        device: Device of the server's model.
        folder: The run folder, which receives checkpoints and the final model.
    """

    def __init__(self, setup: Setup, task: Task, fleet: Fleet, device: torch.device, folder: Path):
        self._setup = setup
        self.config = setup.config
        self.method = setup.method
        self.task = task
        self.fleet = fleet
        self.folder = folder
        model = setup.new_model(task.spec)
        setup.check(task.spec, model)
        fleet.quorum.robust_remedy = ROBUST_REMEDY if setup.allows_robust_rule(task.spec, model) else ""
        check_delta(setup.config, list(fleet.sizes.values()))
        model = model.to(device)
        auxiliary = None if task.auxiliary is None else Samples(task.auxiliary, task.spec, device)
        self.server = Server(
            setup.config, task.spec, model, device, setup.method.server_optimiser(), auxiliary, setup.schedule
        )
        self.evaluator = Evaluator(setup.method, task, self.server, fleet)
        self._matrices: Matrices | None = None
        self._saved: Checkpoint | None = None
        self._step = 0
        self._loss: float | None = None  # mean training loss of the last step, if the method logs it
        self._best: dict[str, Any] | None = None  # the step and accuracy on validation images of the best checkpoint
        self._peak: dict[str, Any] | None = None  # the same for the best evaluated round, with or without a checkpoint
        self._last_round = self.server.rounds  # an earlier round after federation.patience stopped the rounds

    @property
    def done(self) -> bool:
        """Return whether the last step has been taken."""
        return self._step >= self._last_round + self.method.finishes

    def describe(self) -> dict[str, str | None]:
        """Return the devices that clients and server compute on, as `raylt.core.device.describe` names them."""
        return {**self.fleet.describe(), "server_device": describe(self.server.device)["device"]}

    def advance(self, seal: Seal | None = None) -> RoundReport:
        """Take a step, then write a checkpoint when one is due.

        Args:
            seal: Binds the checkpoint to its run; None without a run folder.
        """
        report = self.step()
        self._write_matrices()
        if self._checkpoint_is_due():
            start = time.perf_counter()
            self.save(report, seal)
            timings = {**report.timings, CHECKPOINT: time.perf_counter() - start}
            report = report.model_copy(update={"timings": timings})
        if self._matrices is not None:
            counts.prune(self.folder, self._step, checkpoint.steps(self.folder / "checkpoints"))
        return report

    def step(self) -> RoundReport:
        """Take one round, or the phase after the last round; then evaluate the models if an evaluation is due.

        Raises:
            TooFewReplies: See `Fleet.ask`; `Diverged` also if the loss of the previous step shows divergence.
            RayltError: The server's device has no room for the server's own work.
        """
        try:
            with no_exit():
                report = self._take_step()
            self._loss = _loss_in(report.figures)
            return report
        except TooFewReplies as error:
            diverged = self._divergence(error)
            if diverged is None:
                raise
            raise diverged from error
        except RayltError:  # errors about a client's device name the client themselves
            raise
        except Exception as error:
            if is_full(error):
                raise RayltError(
                    f"step {self._step}: the server's device has too little memory for the server's own work "
                    f"({one_line(error)}). Free it, or give the server a GPU of its own, then continue with "
                    f"{spoken('raylt resume RUN', 'raylt.resume(RUN)')} (resources.device=cpu: without GPUs).",
                    code="device.full",
                    step=self._step,
                ) from error
            raise

    def _divergence(self, error: TooFewReplies) -> Diverged | None:
        """Return a `Diverged` error if replies had too large values after a step with a loss far above guessing.

        A few diverging clients are enough to end a run. Their number alone does not show divergence, since a single
        client may be hostile.
        """
        guessing = math.log(max(self.task.classes, 2))
        far_above = self._loss is not None and self._loss > DIVERGED_LOSS * guessing
        if isinstance(error, Diverged) or error.details.get("cause") not in MAY_DIVERGE or not far_above:
            return None
        rate, details = self.config.local.lr, error.details
        return Diverged(
            f"local.lr: training diverged ({rate:g}). The mean loss of round {self._step - 1} was {self._loss:.3g}; "
            f"guessing has a loss of {guessing:.2g}. In round {self._step}, {details['usable']} of {details['asked']} "
            f"clients sent usable replies. First: {error.__cause__}. Lower local.lr, or weights and rates of the "
            f"method.{self.fleet.quorum.robust_remedy}",
            **{name: detail for name, detail in details.items() if name != "round"},
            code="training.diverged",
            key="local.lr",
            value=rate,
            round=self._step - 1,
            loss=self._loss,
        )

    def _take_step(self) -> RoundReport:
        assert not self.done
        start = time.perf_counter()
        server, fleet = self.server, self.fleet
        joined = RoundStats()
        server.figures = {}
        server.timings = Timings(on_progress=fleet.on_progress)
        if self._step == 0:
            fleet.begin(0)
            self.method.start(server, fleet)
            joined = fleet.round_stats
        self._step += 1
        server.round = self._step
        fleet.begin(self._step)
        phase = "round" if self._step <= self._last_round else "finish"
        if phase == "round":
            self.method.round(server, fleet)
        else:
            with fleet.protection.finishing():
                self.method.finish(server, fleet)
        server.check_state()
        check_finite(self._result(), f"step {self._step}: the result of the server", self.config)
        round_stats, trained = fleet.round_stats, time.perf_counter()
        timings = _total_timings(joined, round_stats, server)
        if fleet.on_progress is not None:
            fleet.on_progress(EVALUATION, 0, 0)
        judged, self._matrices = self._judge()
        if phase == "round" and self._patience_is_over():
            self._last_round = self._step
            judged, self._matrices = self._judge()  # again, as for a last round
        if self._last_round < server.rounds:
            server.figures[ENDED_EARLY] = self._early_end()
        if self.done:
            self._log_zero_shot()
        check_finite(server.figures, f"step {self._step}: the figures of the server", self.config)
        evaluation = time.perf_counter() - trained
        return RoundReport(
            step=self._step,
            phase=phase,
            seconds=trained - start,
            evaluation_seconds=evaluation,
            timings={**timings, EVALUATION: evaluation},
            traffic=_total_traffic(joined, round_stats),
            participants=sorted(round_stats.participants),
            lost=joined.lost + round_stats.lost,
            retried=joined.retried + round_stats.retried,
            rejected=joined.rejected | round_stats.rejected,
            figures=server.figures | ({} if round_stats.privacy is None else {"privacy": round_stats.privacy}),
            **judged,
        )

    def _judge(self) -> tuple[dict[str, Any], Matrices | None]:
        """Evaluate the models after a step."""
        return self.evaluator.evaluate(self._step, last=self._step >= self._last_round, done=self.done)

    def _log_zero_shot(self) -> None:
        """Log the accuracy that the run's model had before training, if its classifier started from texts."""
        model = self._setup.zero_shot_model(self.task.spec)
        if model is not None:
            self.server.figures["zero_shot"] = self.evaluator.zero_shot(model.to(self.server.device).eval())

    def _patience_is_over(self) -> bool:
        """Record the accuracy on validation samples after a round, and return whether training should stop early."""
        patience = self.config.federation.patience
        accuracy = self.server.figures.get("validation", {}).get("accuracy")
        if patience is None or accuracy is None:
            return False
        if self._peak is None or accuracy > self._peak["accuracy"]:
            self._peak = {"step": self._step, "accuracy": accuracy}
        return self._step - self._peak["step"] >= patience and self._step < self._last_round

    def _early_end(self) -> str:
        """Return the text for a run's tables that says why the run stopped early."""
        assert self._peak is not None
        return (
            f"after round {self._last_round} of {self.server.rounds}: no better accuracy on validation samples since "
            f"round {self._peak['step']}"
        )

    def _result(self) -> Tree:
        """Return the state-dict entries of the global model as an exported file would contain them."""
        model = check_model(self.method, "global_model", self.method.global_model(self.server), "server.model")
        return {"model": dict(model.state_dict())}

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run the method's final phase before the block, and undo the phase's effects after the block.

        The rehearsal draws other random numbers than the final phase at the end, since seeds depend on the step.
        """
        server, fleet = self.server, self.fleet
        before = server.model, server.state, server.round, server.figures, server.timings
        server.model, server.state = copy.deepcopy(server.model), copy.deepcopy(server.state)
        try:
            with fleet.rehearsing():
                server.round = self._step + 1
                server.figures = {}
                server.timings = Timings()
                fleet.begin(self._step + 1)
                with fleet.protection.finishing():
                    self.method.finish(server, fleet)
                yield
        finally:
            server.model, server.state, server.round, server.figures, server.timings = before

    def judge_again(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Repeat the evaluation after the last step, in a branched run whose method fields differ from the parent's.

        Args:
            figures: The parent's `RoundReport.figures` of this step.

        Returns:
            All fields of `RoundReport` that depend on an evaluation, among them `figures`.
        """
        assert self.done
        self.fleet.begin(self._step)  # seeds of new clients depend on the round
        judged, self._matrices = self.evaluator.evaluate(self._step, last=True, done=True)
        self._write_matrices()
        trained = {name: value for name, value in figures.items() if name not in EVALUATED}
        return dict.fromkeys(JUDGED) | judged | {"figures": trained | self.server.figures}

    def export_model(self) -> dict[str, str]:
        """Write the deployed model into the run folder.

        Returns:
            The fields of summary.json that describe it.
        """
        model = self.deployed_model()
        checkpoint.replace_tensors(self.folder, "model.safetensors", model)
        return {"model_sha256": checkpoint.hash_tensors(model), "task": self.task.kind}

    def deployed_model(self) -> StateDict:
        """Return the entries of the deployed model on the CPU, with its frozen entries and merged adapters."""
        whole = whole_model(self.method.global_model(self.server))
        return {name: value.detach().cpu().contiguous() for name, value in whole.state_dict().items()}

    def save(self, report: RoundReport, seal: Seal | None = None) -> None:
        """Save a checkpoint with everything that the next step depends on, and the report of the last step.

        The checkpoint with the best accuracy on validation images is always kept.
        """
        facts = {"step": self._step, "report": report.record(), "seal": None if seal is None else asdict(seal)}
        accuracy = report.figures.get("validation", {}).get("accuracy")
        if accuracy is not None and (self._best is None or accuracy > self._best["accuracy"]):
            self._best = {"step": self._step, "accuracy": accuracy}
        if self._best is not None:
            facts["best"] = self._best
        if self._peak is not None:
            facts |= {"peak": self._peak, "last_round": self._last_round}
        self._saved = checkpoint.write(
            self.folder / "checkpoints",
            self._step,
            self._parts(),
            facts,
            self._saved,
            self.config.output.keep,
            {*self._branch_points, *([] if self._best is None else [self._best["step"]])},
        )
        self.fleet.changed.clear()

    def load(self, saved: Checkpoint, clients: bool = True) -> None:
        """Restore the experiment from a checkpoint, in order to continue from it.

        Args:
            saved: The checkpoint.
            clients: Whether to read the clients' private states, which the global model does not need.
        """
        server_part = saved.read("server")
        check_frozen(server_part, self.server.model, self.config)
        self.server.receive(server_part["model"])
        self.server.state = server_part["state"]
        self._step = self.server.round = saved.facts["step"]
        self._loss = _loss_in(saved.facts["report"]["figures"])
        self._best = saved.facts.get("best")
        self._peak = saved.facts.get("peak")
        self._last_round = saved.facts.get("last_round", self.server.rounds)
        states = SavedStates(saved)
        for id in sorted(states.part_of) if clients else ():
            private = states.read(id)
            assert private is not None
            self.fleet.restore(id, private)
        self.fleet.changed.clear()
        self._saved = saved

    def _parts(self) -> Iterator[tuple[str, Tree | ClientStates | None]]:
        model, state = tree.snapshot(self.server.model.state_dict()), tree.snapshot(self.server.state)
        frozen = {} if self._frozen_sha256 is None else {"frozen": self._frozen_sha256}
        yield "server", {"model": model, "state": state, **frozen}
        saved = {} if self._saved is None else self._saved.parts
        yield from client_states.parts(self._step, saved, self.fleet)

    @cached_property
    def _frozen_sha256(self) -> str | None:
        """Return the hash of what checkpoints leave out of the model, see `hash_frozen`."""
        return hash_frozen(self.server.model)

    def _checkpoint_is_due(self) -> bool:
        regular = self._step % self.config.output.checkpoint_every == 0
        return regular or self._step >= self._last_round or self._step in self._branch_points

    @property
    def _branch_points(self) -> set[int]:
        """Return the steps after which a run can be branched; their checkpoints are kept."""
        return set(self.method.stages(self._last_round).values())

    def _write_matrices(self) -> None:
        if self._matrices is not None:
            counts.write(self.folder, self._step, self._matrices)


def _total_traffic(joined: RoundStats, round_stats: RoundStats) -> dict[str, Any]:
    """Add up the traffic of joining and of a round, by client function."""
    totals: dict[str, Traffic] = {}
    for stats in (joined, round_stats):
        for name, traffic in stats.traffic.items():
            totals.setdefault(name, Traffic()).add(traffic)
    return {name: asdict(traffic) for name, traffic in totals.items()}


def _total_timings(joined: RoundStats, round_stats: RoundStats, server: Server) -> Timings:
    """Add up the seconds of joining, of a round and of the server's own work, by stage.

    Raises:
        ConfigError: A stage or a client function has the name of a stage that only the experiment may record.
    """
    totals = Timings(joined.timings)
    totals.add(round_stats.timings)
    totals.add(server.timings)
    for name in (EVALUATION, CHECKPOINT):
        if name in totals:
            raise ConfigError(
                f"server.timings: raylt times the stage {name} itself. Give the method's stage or client function "
                "another name.",
                code="method.wrong-argument",
                key="server.timings",
                value=name,
            )
    return totals


def _loss_in(figures: dict[str, Any]) -> float | None:
    """Return the mean training loss in the figures of a step, or None if the method logs none or no number."""
    loss = figures.get("loss")
    return loss if isinstance(loss, int | float) else None
