"""Lists of the runs, studies and searches in a folder, for `raylt ls`."""

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from raylt.config.yaml_text import read_file
from raylt.disk import exists, is_file, is_folder, named
from raylt.errors import CheckpointError, ConfigError, count_of
from raylt.runs.folder.reader import is_locked
from raylt.store import Folder
from raylt.studies.cells import cells_by_label, folder_of
from raylt.studies.records.record import RunRecord, age, read_run

STUDY = "study.yaml"
SEARCH = "search.json"
RAY_SEARCH = "ray_search.json"  # of a search with one of Ray's schedulers
RUN_FILES = ("identity.json", "split.json", "metrics.jsonl")  # any of them shows that a config.yaml is of a run
RECORDED = "recorded.json"
MAX_FILE_BYTES = 2**30  # maximum size of recorded.json and search.json


class _RecordedRun(TypedDict):
    """The fields that are read from a recorded run."""

    folder: str


class _RecordedRuns(TypedDict):
    """The fields that are read from recorded.json."""

    records: list[_RecordedRun]


class _SearchPlan(TypedDict):
    """The fields that are read from search.json."""

    spaces: dict[str, Any]


class _Method(TypedDict):
    """The fields that are read from the method in ray_search.json."""

    name: str


class _RaySearchConfig(TypedDict):
    """The fields that are read from the configuration in ray_search.json."""

    method: _Method


class _RaySearchPlan(TypedDict):
    """The fields that are read from ray_search.json."""

    config: _RaySearchConfig


_RECORDED = TypeAdapter(_RecordedRuns)
_SEARCH_PLAN = TypeAdapter(_SearchPlan)
_RAY_SEARCH_PLAN = TypeAdapter(_RaySearchPlan)


@dataclass(frozen=True)
class ListedRun:
    """A row of the list: a run, a study with its number of finished runs, or a search with its number of trials.

    Attributes:
        name: Folder, relative to the listed folder.
        kind: "run", "study" or "search".
        state: State of the run, study or search; "unreadable" for a folder that the user may not enter.
        progress: Committed rounds of all rounds; for a study, finished runs of all runs; for a search, trials so far.
        accuracy: Main accuracy of the last evaluated round. For clients' own models it is the accuracy on their own
            test images or class mix.
        age_s: Seconds since a file was written.
        images: Number of test images behind the accuracy; None for a study or a search, and if the run is not finished
            or did not record it.
        figure: Name of the main accuracy: "accuracy", or "local" or "matched" for clients' own models; None without it.
        error: Code of the error that ended a failed run; None if it had no code.
    """

    name: str
    kind: str
    method: str
    state: str
    progress: str
    accuracy: float | None
    age_s: float | None
    images: int | None = None
    figure: str | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


def listing(folder: Path) -> list[ListedRun]:
    """List the runs, studies and searches in a folder, newest first.

    The folder of a study lists the study's runs, and that of a search its trials; in other folders, a study or a search
    is one row with the number of its runs. A run's folder lists that run, and so does that of a search with one of
    Ray's schedulers, whose trials are no runs.

    Raises:
        ConfigError: The folder does not exist.
    """
    if not is_folder(folder):
        raise ConfigError(
            f"{folder}: {'is not a folder' if exists(folder) else 'no such folder'}. Give a folder that contains run "
            "folders.",
            code="file.not-found",
            path=str(folder),
        )
    if (folder / STUDY).is_file():
        entries = [_run(run, str(run.relative_to(folder))) for run in run_folders(folder)]
    elif (folder / SEARCH).is_file():
        entries = [_run(trial, str(trial.relative_to(folder))) for trial in _trials(folder)]
    elif (folder / RAY_SEARCH).is_file():
        entries = [_ray_search(named(folder))]
    elif _is_run(folder):
        entries = [_run(folder, named(folder).name)]
    else:
        entries = list(filter(None, map(_row, folder.iterdir())))
    return sorted(entries, key=lambda entry: (entry.age_s if entry.age_s is not None else float("inf"), entry.name))


def _row(folder: Path) -> ListedRun | None:
    """Return the row of a folder, or None if it holds neither a run nor a study nor a search."""
    try:
        if is_file(folder / STUDY):
            return _study(folder)
        if is_file(folder / SEARCH):
            return _search(folder)
        if is_file(folder / RAY_SEARCH):
            return _ray_search(folder)
        return _run(folder, folder.name) if is_file(folder / "config.yaml") else None
    except CheckpointError:  # perhaps another user's run, since only its user can open a run folder
        return ListedRun(folder.name, "run", "", "unreadable", "", None, None)


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run, of which files may be missing, rather than a folder with a config.yaml."""
    return (folder / "config.yaml").is_file() and any((folder / name).is_file() for name in RUN_FILES)


def run_folders(study: Path) -> list[Path]:
    """Return the run folders of a study, at any depth, without the trials of its searches.

    The walk does not enter run folders: an active run may delete old checkpoints at any time, and a folder that
    vanishes during the walk would end the listing.
    """
    runs = []
    for path, folders, files in os.walk(study):
        if SEARCH in files:
            folders.clear()
        elif "config.yaml" in files:
            runs.append(Path(path))
            folders.clear()
    return runs


def _run(folder: Path, name: str) -> ListedRun:
    record = read_run(folder)
    method = record.config.get("method", {}).get("name", "") if record.config else ""
    return ListedRun(
        name,
        "run",
        method,
        record.state,
        f"{record.rounds if record.summary else min(record.steps, record.planned_steps)}/{record.planned_steps}",
        _last(record, "shown"),
        age(folder),
        _images(record.summary),
        _figure(record),
        record.error,
    )


def _figure(record: RunRecord) -> str | None:
    """Return the name of the curve whose last value is the last main accuracy; None if there is none."""
    shown = _last(record, "shown")
    names = ("accuracy", "local", "matched")
    return None if shown is None else next((name for name in names if _last(record, name) == shown), None)


def _last(record: RunRecord, curve: str) -> float | None:
    values = [value for value in record.curve.get(curve, []) if value is not None]
    return values[-1] if values else None


def _images(summary: Mapping[str, Any] | None) -> int | None:
    """Return the number of test images from which a finished run's main figure was computed."""
    tests = (summary or {}).get("tests")
    if tests is None:
        return None
    shown = (summary or {}).get("shown") or {}
    return sum(tests["own"]) if shown.get("figure") == "local" and tests["own"] else tests["images"]


def _study(folder: Path) -> ListedRun:
    planned = _planned(folder / STUDY)
    runs = [run for run in run_folders(folder) if planned is None or str(run.relative_to(folder)) in planned]
    records = [read_run(run) for run in runs]
    states = Counter(record.state for record in records)
    methods = sorted({record.config["method"]["name"] for record in records if record.config})
    ages = [seconds for run in runs if (seconds := age(run)) is not None]
    done = states["done"] + len(_recorded(folder) - set(runs))
    total = None if planned is None else len(planned)
    state = next(
        (state for state in ("running", "failed", "damaged") if states[state]),
        "done" if total and done >= total else "stopped",
    )
    return ListedRun(
        folder.name, "study", ", ".join(methods), state, f"{done}/{total or '?'} runs", None, min(ages, default=None)
    )


def _search(folder: Path) -> ListedRun:
    trials = _trials(folder)
    count = sum(re.search(r"-split-\d+$", trial.name) is None for trial in trials)  # a trial may run on several splits
    methods: list[str] = []
    with suppress(CheckpointError), Folder.open(folder) as opened:
        methods = sorted(opened.read_json(SEARCH, _SEARCH_PLAN, MAX_FILE_BYTES)["spaces"])
    ended = "done" if (folder / "best.yaml").is_file() else "failed"  # no trial may have reached its end
    state = "running" if is_locked(folder) else ended if (folder / "seal.json").is_file() else "stopped"
    ages = [seconds for trial in trials if (seconds := age(trial)) is not None]
    return ListedRun(
        folder.name, "search", ", ".join(methods), state, count_of(count, "trial"), None, min(ages, default=None)
    )


def _ray_search(folder: Path) -> ListedRun:
    results = list(folder.glob("*/result.json"))  # of the trials that have begun
    method = ""
    with suppress(CheckpointError), Folder.open(folder) as opened:
        plan = opened.read_json(RAY_SEARCH, _RAY_SEARCH_PLAN, MAX_FILE_BYTES)
        method = plan["config"]["method"]["name"]
    ended = "done" if (folder / "best.yaml").is_file() else "stopped"
    state = "running" if is_locked(folder) else ended
    written = max(file.lstat().st_mtime for file in [*results, folder / RAY_SEARCH])
    age_s = max(0.0, datetime.now().timestamp() - written)
    return ListedRun(folder.name, "search", method, state, count_of(len(results), "trial"), None, age_s)


def _trials(search: Path) -> list[Path]:
    """Return the run folders of a search's trials."""
    return [config.parent for config in (search / "trials").glob("*/config.yaml")]


def _recorded(study: Path) -> set[Path]:
    """Return the folders that a study's recorded runs would have; an empty set if recorded.json cannot be read."""
    with suppress(CheckpointError), Folder.open(study) as opened:
        return {study / each["folder"] for each in opened.read_json(RECORDED, _RECORDED, MAX_FILE_BYTES)["records"]}
    return set()


def _planned(file: Path) -> Collection[str] | None:
    """Return the folders of the runs that a study file defines; None if it cannot be read.

    `Definition` is not used, because importing torch takes a second.
    """
    try:
        tree = read_file(file)
        given = tree.get("seeds", 3)
        seeds = range(given) if isinstance(given, int) else given
        only = tree.get("only", {})
        return {
            folder_of(cell, arm, seed)
            for cell in cells_by_label(tree.get("cells", {}))
            for arm in only.get(cell, tree["arms"])
            for seed in seeds
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return None
