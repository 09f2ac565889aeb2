"""Runs of a study that begin in the same way are run once until they part (raylt/core/stages.py)."""

from collections.abc import Sequence

from raylt.core.stages import fork
from raylt.errors import ConfigError
from raylt.registry import resolve
from raylt.studies.definition import Planned


def stems(planned: Sequence[Planned]) -> dict[str, str]:
    """Of each run that another one's first steps will do for, by its folder, that other's folder.

    One that is taken over so is no stem itself.
    """
    roots: dict[tuple[str, int], list[Planned]] = {}
    shared: dict[str, str] = {}
    for each in planned:
        same = roots.setdefault((each.cell, each.seed), [])
        stem = next((root for root in same if _part_late(root, each)), None)
        if stem is None:
            same.append(each)
        else:
            shared[each.folder] = stem.folder
    return shared


def _part_late(one: Planned, other: Planned) -> bool:
    try:
        fork(one.config, resolve(one.config).method, other.config, resolve(other.config).method)
    except ConfigError:             # they differ from the start
        return False
    return True
