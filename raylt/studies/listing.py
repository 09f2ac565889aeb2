"""What `raylt ls` lists: the runs and studies under a folder."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt.config.notation import read_file
from raylt.errors import CheckpointError, ConfigError
from raylt.store import Folder
from raylt.studies.records import age, read_run

STUDY, RECORDED = "study.yaml", "recorded.json"
LIMIT = 2**30               # bytes of the second


class _Place(TypedDict):
    folder: str


class _Places(TypedDict):
    """As much of recorded.json as a list needs."""

    records: list[_Place]


_RECORDED = TypeAdapter(_Places)


@dataclass(frozen=True)
class Entry:
    """A run, or a study with its runs counted by state.

    Attributes:
        name: relative to the folder that was asked for.
        progress: committed steps of rounds, or for a study finished runs of those that are there.
        accuracy: the last that was judged.
        age_s: seconds since something was written.
    """

    name: str
    kind: str
    method: str
    state: str
    progress: str
    accuracy: float | None
    age_s: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def listing(folder: Path) -> list[Entry]:
    """Runs and studies in a folder, newest first; the runs of a study are counted, and listed where it is asked for.

    Raises:
        ConfigError: no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give one that holds run folders")
    if (folder / STUDY).is_file():
        entries = [_run(run, str(run.relative_to(folder))) for run in _runs(folder)]
    else:
        entries = [_study(path) if (path / STUDY).is_file() else _run(path, path.name)
                   for path in folder.iterdir() if (path / STUDY).is_file() or (path / "config.yaml").is_file()]
    return sorted(entries, key=lambda entry: (entry.age_s if entry.age_s is not None else float("inf"), entry.name))


def _runs(study: Path) -> list[Path]:
    """The run folders of a study, at any depth. What lies inside a run is not entered: one at work deletes old
    checkpoints at any moment, and a folder that is gone while it is walked through would end the listing."""
    runs = []
    for place, folders, files in os.walk(study):
        if "config.yaml" in files:
            runs.append(Path(place))
            folders.clear()
    return runs


def _run(folder: Path, name: str) -> Entry:
    record = read_run(folder)
    judged = [value for value in record.curve.get("accuracy", []) if value is not None]
    method = record.config.get("method", {}).get("name", "") if record.config else ""
    return Entry(name, "run", method, record.state, f"{min(record.steps, record.planned_steps)}/{record.planned_steps}",
                 judged[-1] if judged else None, age(folder))


def _study(folder: Path) -> Entry:
    runs = _runs(folder)
    records = [read_run(run) for run in runs]
    states = Counter(record.state for record in records)
    methods = sorted({record.config["method"]["name"] for record in records if record.config})
    ages = [seconds for run in runs if (seconds := age(run)) is not None]
    total, done = _planned(folder / STUDY), states["done"] + len(_recorded(folder) - set(runs))
    state = next((state for state in ("running", "failed", "damaged") if states[state]),
                 "done" if total and done >= total else "stopped")
    return Entry(folder.name, "study", ", ".join(methods), state, f"{done}/{total or '?'} runs", None,
                 min(ages, default=None))


def _recorded(study: Path) -> set[Path]:
    """Where runs would lie that are done, since they are on record; none where that cannot be read."""
    with suppress(CheckpointError), Folder.open(study) as opened:
        return {study / each["folder"] for each in opened.read_json(RECORDED, _RECORDED, LIMIT)["records"]}
    return set()


def _planned(file: Path) -> int | None:
    """Runs of a study; counted here and not by its definition, which would take a second to import torch."""
    try:
        tree = read_file(file)
        cells, seeds, arms = tree.get("cells") or [{}], tree.get("seeds", 3), len(tree["arms"])
        product = isinstance(cells, dict) and not any(isinstance(each, dict) for each in cells.values())
        count = prod(map(len, cells.values())) if isinstance(cells, dict) and product else len(cells)
        fewer = sum(arms - len(only) for only in tree.get("only", {}).values())
        return (arms * count - fewer) * (seeds if isinstance(seeds, int) else len(seeds))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return None
