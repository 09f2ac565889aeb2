"""Runs that take over the first steps of another run and continue in a folder of their own.

`branch` repeats the last stages of a run with changed fields of its method. The steps before these stages are copied
from the parent run. The result equals that of a complete run with the new fields.

`raylt resume RUN federation.rounds=300` continues a run beyond its last round. The shorter run's folder stays as it is,
and the longer run gets a folder next to it. The result is the same as if the run had started with the larger number of
rounds, so no shared round may depend on this number.

Both copy the lines and the confusion counts of the shared steps, the checkpoint after the last shared step, and the
checkpoint with the best accuracy on validation images. The identity of the new run contains the parent's SHA-256.
"""

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from raylt.config import Config, check, differences, followed, load, override, settled
from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.branch_points import Fork, fork
from raylt.core.checkpoint.checkpoint import Checkpoint
from raylt.core.checkpoint.frozen import check_frozen
from raylt.core.device import one_thread
from raylt.core.evaluation import counts
from raylt.core.evaluation.counts import Matrices
from raylt.core.evaluation.evaluator import listed_by_client
from raylt.core.method import Method
from raylt.core.report import POOLED, SHARED, ReportDict, best_validated
from raylt.core.setup import Setup
from raylt.data.fingerprint import hash_data
from raylt.data.task import outline_of
from raylt.disk import folder_path, named
from raylt.errors import CheckpointError, ConfigError
from raylt.registry import origins, resolve
from raylt.runs.callbacks.base import Callback, Callbacks, checked
from raylt.runs.callbacks.notebook_progress import progress_display
from raylt.runs.folder import provenance
from raylt.runs.folder.writer import Journal
from raylt.runs.in_process import open_in_process
from raylt.runs.run import Run
from raylt.runs.runner import FleetKind, carry_out, check_fleet

FILE_KEYS = ("schema", "previous", "date")  # keys of a line that are specific to the file
ROUNDS = "federation.rounds"
ROUNDS_STAGE = "rounds"  # stage in the parent record of a longer run


def branch(
    run: Run | Path | str,
    overrides: Sequence[str],
    folder: Path | str | None = None,
    *,
    fleet: FleetKind = "ray",
    address: str | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Repeat the last stages of a run with changed fields of its method, in a new run folder.

    Args:
        run: A run or its folder. It need not be finished, but must have committed the shared steps.
        overrides: Fields of the method's later stages as `key=value`, or `method=NAME` for another method that trains
            in the same way.
        folder: Folder of the new run; by default next to the run's folder, with a name from run, stage and time.
        fleet: See `raylt.run`.
        address: See `raylt.run`.
        quiet: See `raylt.run`.
        callbacks: See `raylt.run`.

    Raises:
        ConfigError: The fields affect an earlier stage, or nothing differs.
        CheckpointError: The run has not reached the stage, the checkpoint was not kept, or the folder exists.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    tree = run.config.model_dump()
    override(tree, overrides)
    config: Config = check(Config, tree)
    method = resolve(config).method
    config = config.model_copy(update={"method": {"name": method.name, **method.model_dump()}})
    if folder is None:
        stage = fork(run.config, run.method, config, method).stage
        folder = named(run.folder).parent / f"{run.name}-{stage}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]
    return branch_to(
        run, config, folder_path(folder, "folder"), fleet=fleet, address=address, quiet=quiet, callbacks=callbacks
    )


def can_branch(run: Run, config: Config) -> bool:
    """Return whether a new run with this configuration can continue from the committed steps of a run."""
    try:
        _shared_steps(run, followed(config, run.config))
    except (ConfigError, CheckpointError):
        return False
    return True


def branch_to(
    run: Run,
    config: Config,
    folder: Path,
    *,
    fleet: FleetKind = "ray",
    address: str | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Branch a run with a complete new configuration, in a new folder; see `branch`."""
    config = followed(config, run.config)
    stage, step = _shared_steps(run, config)
    run.check_weights()
    setup = run.resolve(config)
    setup.check(run.task.spec, setup.new_model(run.task.spec))
    saved = run.checkpoint_after(step)

    def judge_again(report: ReportDict) -> None:
        with one_thread():
            end = open_in_process(setup, run.task, folder, saved)
            if end.done:  # the last shared step ends this run, so evaluate it as the last step
                report |= end.judge_again(report["figures"])

    continuation = _Continuation(run, config, setup, folder, stage, saved, judge_again)
    return continuation.run_rest(fleet, address, quiet, callbacks)


def _shared_steps(run: Run, config: Config) -> Fork:
    """Return the stage at which a configuration diverges from a run, and the last step that both share.

    Raises:
        CheckpointError: The run has not committed that step, or did not keep its checkpoint.
    """
    shared = fork(run.config, run.method, config, resolve(config).method)
    committed = len(run.reports)
    if committed < shared.step:
        raise CheckpointError(
            f"{run.folder}: the stage {shared.stage} begins after step {shared.step}, but only {committed} steps are "
            "committed. Resume the run first.",
            code="run.not-finished",
            path=str(run.folder),
            step=shared.step,
            committed=committed,
        )
    if shared.step not in checkpoint.steps(run.folder / "checkpoints"):
        if shared.step in run.method.stages(run.config.federation.rounds).values():  # a run always keeps these
            raise CheckpointError(
                f"{run.folder}: the checkpoint before the stage {shared.stage} is missing (step {shared.step}). Put it "
                "back, or start a new run.",
                code="checkpoint.not-found",
                path=str(run.folder),
                step=shared.step,
            )
        raise CheckpointError(
            f"{run.folder}: the checkpoint before the stage {shared.stage} was not kept (step {shared.step}). Run it "
            f"again with output.keep={run.config.federation.rounds}.",
            code="checkpoint.not-kept",
            path=str(run.folder),
            step=shared.step,
        )
    return shared


def resume(
    run: Run | Path | str,
    overrides: Sequence[str] = (),
    *,
    fleet: FleetKind = "ray",
    address: str | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Continue a run with `Run.resume`, or with `extend` if only the number of rounds is changed.

    Raises:
        CheckpointError: See `Run.resume`.
        ConfigError: The run cannot be extended, see `extend`.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    config = load(run.folder / "config.yaml", overrides)
    changed = [key for key, *_ in differences(settled(run.config), settled(config))]
    if changed != [ROUNDS]:
        return run.resume(overrides, fleet=fleet, address=address, quiet=quiet, callbacks=callbacks)
    folder = named(run.folder).parent / f"{run.name}-{config.federation.rounds}"
    return extend(run, config, folder, fleet=fleet, address=address, quiet=quiet, callbacks=callbacks)


def extend(
    run: Run,
    config: Config,
    folder: Path,
    *,
    fleet: FleetKind = "ray",
    address: str | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Continue a run to a larger number of rounds, in a new folder.

    Args:
        config: The run's configuration with more rounds.

    Raises:
        ConfigError: The number of rounds is not larger, the shared steps depended on it, or a setting excludes it.
        CheckpointError: The run has no checkpoint, or the folder exists.
    """
    rounds = config.federation.rounds
    check_extension(run, rounds)
    run.check_weights()
    setup = run.resolve(config)
    setup.check(run.task.spec, setup.new_model(run.task.spec))
    saved = run.checkpoint()
    if saved is None:
        raise CheckpointError(
            f"{run.folder}: has no checkpoint that can be read. Run it again with {ROUNDS}={rounds}.",
            code="checkpoint.not-found",
            path=str(run.folder),
        )

    def judge_again(report: ReportDict) -> None:
        if report["step"] == run.config.federation.rounds:  # it was evaluated as a last round
            _as_any_round(report, config, setup.method, run, folder)

    continuation = _Continuation(run, config, setup, folder, ROUNDS_STAGE, saved, judge_again)
    return continuation.run_rest(fleet, address, quiet, callbacks)


def check_extension(run: Run, rounds: int) -> None:
    """Check that a run can continue to a larger number of rounds.

    Raises:
        ConfigError: It cannot. The message gives the reason.
    """
    before = run.config.federation.rounds
    method = run.method
    local = run.config.local
    early = [name for name, after in method.stages(before).items() if after < before]
    reason = None
    if rounds < before:
        raise ConfigError(
            f"{ROUNDS}: a run cannot become shorter ({rounds}; {run.folder} has {before}). Give more rounds.",
            code="config.out-of-range",
            key=ROUNDS,
            value=rounds,
            least=before,
        )
    if method.finishes:
        reason = f"{method.name} has a phase after the last round, which is round {before}"
    elif early:
        reason = f"the stage {early[0]} of {method.name} begins before the last round, which is round {before}"
    elif run.config.federation.patience is not None:
        reason = "federation.patience ends a run by the accuracy on validation samples"
    elif local.schedule != "step":
        reason = f"with local.schedule = {local.schedule} every learning rate depends on the number of rounds"
    elif _reads_rounds(method):
        reason = f"rounds of {method.name} depend on the number of rounds"
    if reason is not None:
        raise ConfigError(
            f"{ROUNDS}: {reason} ({rounds}). Start a new run.", code="run.not-extensible", key=ROUNDS, value=rounds
        )


def _reads_rounds(method: Method) -> bool:
    """Return whether the files of a method and its base classes may use the number of rounds.

    Any object may be the server or the federation, so every attribute with this name counts.
    """
    classes = [kind for kind in type(method).__mro__ if kind not in Method.__mro__]
    # search whole files, since other functions in them may use the number
    modules = {inspect.getmodule(kind) or kind for kind in classes}
    try:
        trees = [ast.parse(inspect.getsource(module)) for module in modules]
    except (OSError, TypeError, SyntaxError, ValueError):  # such as a method typed at a prompt, which has no source
        return True
    nodes = (node for tree in trees for node in ast.walk(tree))
    return any(isinstance(node, ast.Attribute) and node.attr == "rounds" for node in nodes)


def _as_any_round(report: ReportDict, config: Config, method: Method, run: Run, folder: Path) -> None:
    """Remove from a report, in place, the figures that only a last round has."""
    step = report["step"]
    evaluation = config.evaluation
    shared_due = step % evaluation.every == 0
    own_models = method.personal or config.federation.batchnorm == "local"
    clients_due = shared_due
    if own_models:
        clients_due = evaluation.personal > 0 and step % evaluation.personal == 0
    dropped = ["quality", "answers", "others"]
    if not clients_due or not listed_by_client(report["by_client"] or {}, own_models, last=False):
        dropped.append("by_client")
    if not shared_due:
        dropped += SHARED
    if not clients_due:
        dropped += [*POOLED, "groups", "clients", "shown"]
        report["figures"] = {name: value for name, value in report["figures"].items() if name != "validation"}
    last_round_only = ("new_clients", "zero_shot")
    report["figures"] = {name: value for name, value in report["figures"].items() if name not in last_round_only}
    report |= dict.fromkeys(dropped)
    if not report.get("confusion"):
        return
    matrices = run.matrices(step)
    client_matrices = (matrices.clients, matrices.own) if clients_due else ()
    matrices = Matrices(matrices.shared if shared_due else None, *client_matrices)
    report["confusion"] = matrices.sha256 if matrices else None
    if matrices:
        counts.write(folder, step, matrices)
    else:
        counts.remove(folder, step)


@dataclass(frozen=True)
class _Continuation:
    """A new run that takes over the first steps of a parent run.

    Attributes:
        parent: The parent run.
        config, setup: Configuration and setup of the new run.
        folder: Folder of the new run.
        stage: Stage at which the runs diverge, for the parent record.
        saved: Checkpoint after the last shared step.
        judge_again: Function that updates the report of the last shared step, if the new run evaluates this step
            differently.
    """

    parent: Run
    config: Config
    setup: Setup
    folder: Path
    stage: str
    saved: Checkpoint
    judge_again: Callable[[ReportDict], None]

    def run_rest(self, fleet: FleetKind, address: str | None, quiet: bool, callbacks: Sequence[Callback]) -> Run:
        """Take over the shared steps from the parent run and run the remaining steps.

        Raises:
            CheckpointError: The folder exists, or the model's frozen weights have changed.
            ConfigError: The remaining steps cannot be run as configured. A folder without a new step is removed.
        """
        check_fleet(fleet, address)
        callbacks = checked(callbacks)
        parent = self.parent
        task = parent.task
        check_frozen(self.saved.read("server"), self.setup.new_model(task.spec), self.config)
        step = self.saved.facts["step"]
        record = {"name": parent.name, "run": parent.sha256, "stage": self.stage, "step": step}
        journal = Journal.create(
            self.folder, self.config, task.split, hash_data(task), origins(self.config), record, outline_of(task)
        )
        screen = [] if quiet else [progress_display()]
        with journal:
            try:
                self._take_over_steps(journal)
            except BaseException:  # such as a full disk; the same call must be possible again
                journal.discard()
                raise
            try:
                carry_out(self.setup, task, journal, fleet, address, Callbacks([*screen, *callbacks]))
            except ConfigError:
                journal.discard()
                raise
        return Run(self.folder)

    def _take_over_steps(self, journal: Journal) -> None:
        """Copy the reports, counts and provenance of the shared steps from the parent, and up to two checkpoints."""
        step = self.saved.facts["step"]
        reports = [
            {key: value for key, value in line.items() if key not in FILE_KEYS} for line in self.parent.reports[:step]
        ]
        hashes = {line["step"]: line["confusion"] for line in reports if line.get("confusion")}
        counts.copy(self.parent.folder, self.folder, hashes)
        self.judge_again(reports[-1])
        provenance.copy(self.parent.folder, self.folder)
        journal.adopt(reports, [*self._best(reports), self.saved], self.config)

    def _best(self, reports: Sequence[ReportDict]) -> list[Checkpoint]:
        """Return the checkpoint with the best accuracy on validation images before the last of these steps.

        The list is empty if the last step is better, or if the checkpoint is damaged, since the run can continue
        without it.
        """
        best = best_validated(reports, checkpoint.steps(self.parent.folder / "checkpoints"))
        if best is None or best["step"] == len(reports):
            return []
        try:
            return [self.parent.checkpoint_after(best["step"])]
        except CheckpointError:
            return []
