"""A run that goes on from another's steps, in a folder of its own: what `branch` and a longer `resume` share.

The shared steps' lines, their counts and the checkpoint after the last of them are taken over under the new run's
identity, which names the parent by its SHA-256.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raylt.config import Config
from raylt.core import confusions
from raylt.core.checkpoint import Checkpoint
from raylt.core.setup import Setup
from raylt.data.hashes import hash_data
from raylt.data.outline import outline_of
from raylt.errors import ConfigError
from raylt.registry import origins
from raylt.runs import provenance
from raylt.runs.callbacks import Callback, Callbacks
from raylt.runs.journal import Journal
from raylt.runs.run import Run
from raylt.runs.runner import FleetKind, carry_out
from raylt.runs.screen import Screen

OF_A_LINE = ("schema", "previous", "date")     # which belong to the file, not to the step
Report = dict[str, Any]


def descend(run: Run, config: Config, setup: Setup, folder: Path, stage: str, saved: Checkpoint,
            judge_again: Callable[[Report], None], *, fleet: FleetKind, address: str | None, quiet: bool,
            callbacks: Sequence[Callback]) -> Run:
    """Runs the rest, from the parent's checkpoint on.

    Args:
        config: of the new run; `setup` is what it names.
        stage: what the parent's record calls the place where they part.
        saved: the checkpoint after the last shared step.
        judge_again: changes the report of that step where the new run would have judged it otherwise.

    Raises:
        CheckpointError: the folder exists.
        ConfigError: the rest cannot be run as asked; the shared steps stay, and `raylt resume` can be told otherwise.
    """
    step = saved.facts["step"]
    reports = [{key: value for key, value in line.items() if key not in OF_A_LINE} for line in run.reports[:step]]
    parent = {"name": run.name, "run": run.sha256, "stage": stage, "step": step}
    journal = Journal.create(folder, config, run.task.split, hash_data(run.task), origins(config), parent,
                             outline_of(run.task))
    screen = [] if quiet else [Screen()]
    try:
        confusions.copy(run.folder, folder, [report["step"] for report in reports if report.get("confusion")])
        judge_again(reports[-1])
        provenance.copy(run.folder, folder)
        journal.adopt(reports, saved, config)
        carry_out(setup, run.task, journal, fleet, address, Callbacks([*screen, *callbacks]))
    except ConfigError:
        journal.discard()
        raise
    return Run(folder)
