"""Shared training: runs with the same first steps are trained once, up to the step at which they differ.

See raylt/core/checkpoint/branch_points.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from raylt.core.checkpoint.branch_points import fork
from raylt.errors import ConfigError
from raylt.registry import resolve
from raylt.studies.definition import Planned


class Stem(NamedTuple):
    """The run from which another run continues, and the number of steps that both runs share.

    Attributes:
        folder: The stem's folder, relative to the study's folder.
        steps: Number of steps that both runs share.
    """

    folder: str
    steps: int


def stems(planned: Sequence[Planned]) -> dict[str, Stem]:
    """Map the folder of each run that can continue from another run's first steps to that run, its stem.

    A run that has a stem is never the stem of another run. Other runs can only continue from a run's checkpoints, which
    it keeps before each of its stages. Runs with early stages are therefore tried first as stems.
    """
    roots: dict[tuple[str, int], list[Planned]] = {}
    stem_by_folder: dict[str, Stem] = {}
    for run in sorted(planned, key=lambda each: min(_kept_steps(each))):
        candidates = roots.setdefault((run.cell, run.seed), [])
        stem = next((Stem(root.folder, steps) for root in candidates if (steps := _shared_steps(root, run))), None)
        if stem is None:
            candidates.append(run)
        else:
            stem_by_folder[run.folder] = stem
    return stem_by_folder


def _kept_steps(run: Planned) -> set[int]:
    """Return the steps after which a run keeps a checkpoint."""
    return set(resolve(run.config).method.stages(run.config.federation.rounds).values())


def _shared_steps(root: Planned, other: Planned) -> int:
    """Return the number of steps that two runs share.

    Return 0 if the first run keeps no checkpoint after these steps.
    """
    try:
        shared = fork(root.config, resolve(root.config).method, other.config, resolve(other.config).method)
    except ConfigError:  # the runs differ from the first step on
        return 0
    return shared.step if shared.step in _kept_steps(root) else 0
