"""`branch`: what a run does late, done again with other fields of its method, as a run of its own.

The steps before the stage are the parent's: their lines and the checkpoint after the last of them are taken over, under
the new run's identity, which names the parent by its SHA-256. What comes out is what the whole run would have given.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from raylt.config import Config, check, override
from raylt.core import checkpoint
from raylt.core.stages import Fork, fork
from raylt.data.hashes import hash_data
from raylt.errors import CheckpointError, ConfigError
from raylt.registry import origins, resolve
from raylt.runs import provenance
from raylt.runs.callbacks import Callback, Callbacks
from raylt.runs.here import one_thread, open_here
from raylt.runs.journal import Journal
from raylt.runs.run import Run
from raylt.runs.runner import FleetKind, carry_out
from raylt.runs.screen import Screen

_OF_A_LINE = ("schema", "previous", "date")     # which belong to the file, not to the step


def branch(run: Run | Path | str, overrides: Sequence[str], folder: Path | str | None = None, *,
           fleet: FleetKind = "ray", address: str | None = None, quiet: bool = False,
           callbacks: Sequence[Callback] = ()) -> Run:
    """Runs the rest of a run with other fields.

    Args:
        run: or its folder. It need not be finished, but has committed the steps that are shared.
        overrides: `key=value`, of the method's later stages; `method=NAME` for one that trains as the run's does.
        folder: of the new run; by default beside the run's, named after it, the stage and the time.

    Raises:
        ConfigError: the fields act earlier, or nothing differs.
        CheckpointError: the run has not come so far, the checkpoint is not kept, or the folder exists.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    tree = run.config.model_dump()
    override(tree, overrides)
    config: Config = check(Config, tree)
    method = resolve(config).method
    config = config.model_copy(update={"method": {"name": method.name, **method.model_dump()}})
    stage = fork(run.config, run.method, config, method).stage
    beside = run.folder.parent / f"{run.name}-{stage}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]
    return branch_to(run, config, beside if folder is None else Path(folder), fleet=fleet, address=address, quiet=quiet,
                     callbacks=callbacks)


def can_branch(run: Run, config: Config) -> bool:
    """Whether a run has come so far that this configuration can go on from it."""
    try:
        _shared(run, config)
    except (ConfigError, CheckpointError):
        return False
    return True


def branch_to(run: Run, config: Config, folder: Path, *, fleet: FleetKind = "ray", address: str | None = None,
              quiet: bool = False, callbacks: Sequence[Callback] = ()) -> Run:
    """The same for a whole configuration, with all fields of its method, in a new folder."""
    stage, step = _shared(run, config)
    saved, task, setup = run.checkpoint_after(step), run.task, resolve(config)
    setup.check(task.facts)
    reports = [{key: value for key, value in line.items() if key not in _OF_A_LINE} for line in run.reports[:step]]
    parent = {"name": run.name, "run": run.sha256, "stage": stage, "step": step}
    journal = Journal.create(folder, config, task.split, hash_data(task), origins(config), parent)
    screen = [] if quiet else [Screen()]
    try:
        with one_thread():
            end = open_here(setup, task, folder, saved)
            if end.done:                    # the last step is a shared one, and judged as the end of this run
                reports[-1] |= end.judged_again()
        journal.adopt(reports, saved, config.output.keep)
        provenance.copy(run.folder, folder)
        carry_out(setup, task, journal, fleet, address, Callbacks([*screen, *callbacks]))
    except ConfigError:
        journal.discard()
        raise
    return Run(folder)


def _shared(run: Run, config: Config) -> Fork:
    """Where the configuration parts from the run, which has come so far and kept its checkpoint of there."""
    shared = fork(run.config, run.method, config, resolve(config).method)
    if (committed := len(run.reports)) < shared.step:
        raise CheckpointError(f"{run.folder}: has committed {committed} steps, and {shared.stage} begins after "
                              f"{shared.step}; resume it first")
    if shared.step not in checkpoint.steps(run.folder / "checkpoints"):
        raise CheckpointError(f"{run.folder}: the checkpoint after step {shared.step}, where {shared.stage} begins, is "
                              f"not kept; run it again with output.keep={run.config.federation.rounds}")
    return shared
