"""Runs of a study that begin in the same way are run once until they part (raylt/core/stages.py)."""

from collections.abc import Sequence
from typing import NamedTuple

from raylt.core.stages import fork
from raylt.errors import ConfigError
from raylt.registry import resolve
from raylt.studies.definition import Planned


class Stem(NamedTuple):
    """A run that another one goes on from.

    Attributes:
        folder: its own, relative to the study's.
        steps: those that both share.
    """

    folder: str
    steps: int


def stems(planned: Sequence[Planned]) -> dict[str, Stem]:
    """Of each run that another one's first steps will do for, by its folder, that other.

    One that is taken over so is no stem itself. Those whose first later stage begins earliest are looked at first: a
    run keeps the checkpoints before its own stages, and from one before an earlier stage nobody could go on.
    """
    roots: dict[tuple[str, int], list[Planned]] = {}
    shared: dict[str, Stem] = {}
    for each in sorted(planned, key=lambda run: min(_kept(run))):
        same = roots.setdefault((each.cell, each.seed), [])
        stem = next((Stem(root.folder, steps) for root in same if (steps := _shared(root, each))), None)
        if stem is None:
            same.append(each)
        else:
            shared[each.folder] = stem
    return shared


def _kept(run: Planned) -> set[int]:
    """The steps after which a run keeps its checkpoint."""
    return set(resolve(run.config).method.stages(run.config.federation.rounds).values())


def _shared(root: Planned, other: Planned) -> int:
    """The steps that they share, where the root keeps the checkpoint after the last of them; else none."""
    try:
        shared = fork(root.config, resolve(root.config).method, other.config, resolve(other.config).method)
    except ConfigError:             # they differ from the start
        return 0
    return shared.step if shared.step in _kept(root) else 0
