"""Runs of a study that begin in the same way are run once until they part (raylt/core/stages.py)."""

from collections.abc import Sequence

from raylt.core.stages import fork
from raylt.errors import ConfigError
from raylt.registry import resolve
from raylt.studies.definition import Planned


def stems(planned: Sequence[Planned]) -> dict[str, str]:
    """Of each run that another one's first steps will do for, by its folder, that other's folder.

    Of several it is the one with which it shares the most steps; one that is taken over so is no stem itself.
    """
    roots: dict[tuple[str, int], list[Planned]] = {}
    shared: dict[str, str] = {}
    for each in planned:
        same = roots.setdefault((each.cell, each.seed), [])
        steps = {root.folder: step for root in same if (step := _shared_steps(root, each))}
        if steps:
            shared[each.folder] = max(steps, key=steps.__getitem__)
        else:
            same.append(each)
    return shared


def _shared_steps(root: Planned, other: Planned) -> int:
    try:
        return fork(root.config, resolve(root.config).method, other.config, resolve(other.config).method).step
    except ConfigError:             # they differ from the start
        return 0
