"""`branch`: what a run does late, done again with other fields of its method, as a run of its own.

The steps before the stage are the parent's: their lines and the checkpoint after the last of them are taken over, under
the new run's identity, which names the parent by its SHA-256. What comes out is what the whole run would have given.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from raylt.config import Config, check, followed, override
from raylt.core import checkpoint
from raylt.core.stages import Fork, fork
from raylt.errors import CheckpointError, ConfigError
from raylt.registry import resolve
from raylt.runs.callbacks import Callback
from raylt.runs.descent import Report, descend
from raylt.runs.here import one_thread, open_here
from raylt.runs.run import Run
from raylt.runs.runner import FleetKind


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
        _shared(run, followed(config, run.config))
    except (ConfigError, CheckpointError):
        return False
    return True


def branch_to(run: Run, config: Config, folder: Path, *, fleet: FleetKind = "ray", address: str | None = None,
              quiet: bool = False, callbacks: Sequence[Callback] = ()) -> Run:
    """The same for a whole configuration, with all fields of its method, in a new folder."""
    config = followed(config, run.config)
    stage, step = _shared(run, config)
    setup = resolve(config)
    setup.check(run.task.facts)
    saved = run.checkpoint_after(step)

    def judge_again(report: Report) -> None:
        with one_thread():
            end = open_here(setup, run.task, folder, saved)
            if end.done:                    # the last step is a shared one, and judged as the end of this run
                report |= end.judged_again()

    return descend(run, config, setup, folder, stage, saved, judge_again, fleet=fleet, address=address, quiet=quiet,
                   callbacks=callbacks)


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
