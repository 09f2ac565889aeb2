"""Tuning of a study's arms on validation samples, each with the same budget.

    tune: {runs: 8, ranges: {local.lr: "loguniform(0.003, 0.1)"}}

Each arm is searched over the ranges that its method's fields declare, except for fields that the study sets, and over
the ranges given for all arms. The arm's runs then use the best values. An arm's search has a folder next to the arm's
runs (`CELL/ARM/search`, see tune/search.py). The outcome is stored in tuned.json, so that the search is not repeated.
"""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.config import Config, Section, settings
from raylt.core.method import Method
from raylt.errors import CheckpointError, ConfigError, RayltError, count_of, spoken
from raylt.own_code.child_process import start_python
from raylt.own_code.commands import plugin_files
from raylt.registry import resolve
from raylt.runs.callbacks.base import Callback
from raylt.studies.cells import slug
from raylt.studies.records.former_names import former_name, former_settings
from raylt.studies.running.worker_slots import WorkerSlot, worker_slots
from raylt.studies.settings import portable
from raylt.typed_json import as_json, closed, hash_json

FILE = "tuned.json"
MAX_FILE_BYTES = 2**26  # maximum size of tuned.json
# Code of a search process. `python -m tune.arm` could import a tune.py from the current folder instead.
SEARCH_CODE = "from raylt.own_code.top_level_names import claim; claim(); from tune.arm import main; main()"


Count = Literal["steps", "passes"]
Metric = Literal["accuracy", "many", "medium", "few", "owned", "matched", "miou", "local", "worst_decile"]
MOST_SPLITS = 20
_LATER = ("evaluation.fresh",)
UNITS: dict[Count, str] = {"steps": "client-steps", "passes": "client-steps of FedAvg"}


class Tuning(Section):
    """The settings of a study's searches.

    Attributes:
        runs: Budget of every arm, in runs of the reference arm in the same cell.
        count: Unit of the budget. "steps": every SGD step costs the same. "passes": a step costs the passes over
            samples that the trial's method needs for it, as a multiple of FedAvg's, and the server's own work counts
            as FedAvg's steps.
        ranges: Range of each setting that is searched for all arms, such as loguniform(0.003, 0.1). The range of a
            method's field applies to arms whose method has this field.
        fields: Method fields to search, by arm; by default all fields that the study does not set.
        metric: Figure on the validation samples to maximise. In a definition it is the study's measure by default, or
            accuracy if searches do not compute that measure.
        splits: Number of splits on which each trial runs; its score is the worst over these splits. The splits use the
            study's first seed and the seeds after it.
        searcher: Tree-structured Parzen estimator, or random search.
    """

    runs: float = Field(gt=0, le=1000)
    count: Count = "steps"
    ranges: dict[str, str] = Field(
        default={}, json_schema_extra={"takes": "a mapping from settings to ranges, as in {local.lr: 'uniform(0, 1)'}"}
    )
    fields: dict[str, list[str]] = Field(default={})
    metric: Metric | None = None
    searcher: Literal["tpe", "random"] = "tpe"
    splits: int = Field(default=1, ge=1, le=MOST_SPLITS)


@closed
class Tuned(TypedDict):
    """The outcome of tuning one arm in one cell.

    `asked` is the hash of `search_settings`. `values` are settings by dotted key. `score` is the metric on validation
    samples, or None if there was nothing to search. `count` is the unit of `client_steps` and `budget`, by default
    "steps".
    """

    asked: str
    values: dict[str, Any]
    score: float | None
    trials: int
    client_steps: int
    budget: int
    count: NotRequired[Count]


Outcomes = dict[str, dict[str, Tuned]]  # by cell and arm


@closed
class _File(TypedDict):
    """The content of tuned.json."""

    outcomes: Outcomes
    sha256: str


_FILE = TypeAdapter(_File)


def search_arms(
    bases: Mapping[tuple[str, str], Config],
    tuning: Tuning,
    reference: str,
    folder: Path,
    callback: Callback,
    parallel: int | None,
    fleet: Literal["local", "ray"],
    address: str | None,
) -> Outcomes:
    """Search for the best settings of every arm and cell that has no outcome in tuned.json yet.

    Interrupted searches continue.

    Args:
        bases: Settings by cell and arm, with only the method fields that the study sets.
        tuning: Settings of the searches.
        reference: Arm whose runs are the unit of the budget.
        folder: The study's folder.
        callback: Receives a message for each outcome.
        parallel: Number of simultaneous searches; see `Study.run`.
        fleet: See `Study.run`.
        address: See `Study.run`.

    Returns:
        The outcomes of all arms and cells.

    Raises:
        CheckpointError: An arm was tuned with other settings.
        ConfigError: A range is invalid, or one trial exceeds the budget. The message names the arm.
        RayltError: A search failed. The message names the arm.
    """
    outcomes = read_tuned(folder)
    hashes = {
        (cell, arm): hash_json(search_settings(tuning, arm, base, bases[cell, reference]))
        for (cell, arm), base in bases.items()
    }
    check_same_searches(outcomes, {key: {expected} for key, expected in hashes.items()}, folder)
    waiting = [(cell, arm) for cell, arm in bases if arm not in outcomes.get(cell, {})]
    if not waiting:
        return outcomes
    jobs = [
        {
            "cell": cell,
            "arm": arm,
            "folder": str(folder / slug(cell) / slug(arm)),
            "base": bases[cell, arm].model_dump(mode="json"),
            "reference": bases[cell, reference].model_dump(mode="json"),
            "tune": tuning.model_dump(mode="json"),
            "fleet": fleet,
            "address": address,
            "plugins": plugin_files(),
        }
        for cell, arm in waiting
    ]
    slots = worker_slots(parallel, fleet, [bases[key] for key in waiting])
    for job, outcome in _run_searches(jobs, slots, folder):
        cell = job["cell"]
        arm = job["arm"]
        outcome["asked"] = hashes[cell, arm]
        outcomes.setdefault(cell, {})[arm] = outcome
        write_tuned(folder, outcomes)
        callback.on_message(describe(cell, arm, outcome, tuning.metric))
    return outcomes


def check_same_searches(
    outcomes: Outcomes,
    accepted: Mapping[tuple[str, str], Collection[str]],
    folder: Path,
    changes: Callable[[str, str], Sequence[str]] = lambda cell, arm: (),
) -> None:
    """Check that the outcomes are of the study's searches.

    Args:
        outcomes: The outcomes by cell and arm.
        accepted: Hashes of the searches that count, by cell and arm, see `search_settings`.
        folder: The study's folder.
        changes: Function of a cell and an arm that returns the settings in which their search changed, as text.

    Raises:
        CheckpointError: An arm was tuned with other settings.
    """
    for (cell, arm), hashes in accepted.items():
        outcome = outcomes.get(cell, {}).get(arm)
        if outcome is not None and outcome["asked"] not in hashes:
            changed = list(changes(cell, arm))
            which = f" ({'; '.join(changed)})" if changed else ""
            raise CheckpointError(
                f"{folder / FILE}: arm {arm!r} was tuned with other settings{which}. Give the study another name, or "
                "remove that file and the folder of the arm.",
                code="study.changed",
                path=str(folder / FILE),
                arm=arm,
                cell=cell,
                differences=changed,
            )


def search_settings(
    tuning: Tuning,
    arm: str,
    base: Config,
    reference: Config,
    version: Collection[str] | None = None,
    former_names: bool = False,
) -> dict[str, Any]:
    """Return everything that an arm's search depends on, except the location of files.

    Settings of other arms are not included, nor are `count`, `splits` and later settings at their defaults, which
    earlier versions did not have. The reference arm's settings are included, since its runs are the unit of the budget.

    Args:
        tuning: Settings of the searches.
        arm: Name of the arm.
        base: Settings of the arm before tuning.
        reference: Settings of the reference arm.
        version: Dotted names of the settings in the version that made the search. Later settings are left out if they
            have their defaults, which reproduce that version's behaviour. None to include all settings.
        former_names: Whether that version used the former names of method fields.
    """
    method = resolve(base).method
    newer = {
        key: field.default for key, field in settings() if key in _LATER or (version is not None and key not in version)
    }
    ranges = applying(tuning.ranges, type(method))
    fields = tuning.fields.get(arm)
    if former_names:
        ranges = former_settings(ranges, method.name)
        fields = None if fields is None else [former_name(method.name, field) for field in fields]

    def counted(config: Config) -> dict[str, Any]:
        count = {key: value for key, value in portable(config).items() if key not in newer or value != newer[key]}
        return former_settings(count, config.method["name"]) if former_names else count

    return {
        "runs": tuning.runs,
        **({} if tuning.count == "steps" else {"count": tuning.count}),
        **({} if tuning.splits == 1 else {"splits": tuning.splits}),
        "metric": tuning.metric,
        "searcher": tuning.searcher,
        "fields": fields,
        "ranges": ranges,
        "base": counted(base),
        "reference": counted(reference),
    }


def applying(ranges: Mapping[str, str], method: type[Method]) -> dict[str, str]:
    """Return the search ranges that apply to a method, without ranges of fields that the method does not have."""
    return {
        key: text
        for key, text in ranges.items()
        if not key.startswith("method.") or key.removeprefix("method.") in method.model_fields
    }


def read_tuned(folder: Path) -> Outcomes:
    """Read the tuning outcomes from a study's folder.

    Raises:
        CheckpointError: tuned.json cannot be read, or was changed.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    content = as_json(store.read(path, MAX_FILE_BYTES), _FILE, str(path))
    if content["sha256"] != hash_json(content["outcomes"]):
        raise CheckpointError(
            f"{path}: was changed after the arms were tuned. Restore the original, or remove the file and run the "
            f"study's file again with {spoken('raylt study', 'raylt.study')}, which reads the finished searches.",
            code="record.changed",
            path=str(path),
        )
    return content["outcomes"]


def write_tuned(folder: Path, outcomes: Outcomes) -> None:
    """Write the tuning outcomes to a study's folder."""
    content = {"outcomes": outcomes, "sha256": hash_json(outcomes)}
    store.write(folder / FILE, json.dumps(content, indent=1) + "\n")


def joined(outcomes: Outcomes, more: Outcomes) -> Outcomes:
    """Merge two sets of tuning outcomes; `more` wins where both have the same cell and arm."""
    return {cell: outcomes.get(cell, {}) | more.get(cell, {}) for cell in outcomes | more}


def searched(outcomes: Outcomes) -> dict[str, set[str]]:
    """Return, by arm, the dotted keys of the settings that were tuned."""
    keys_by_arm: dict[str, set[str]] = {}
    for arms in outcomes.values():
        for arm, outcome in arms.items():
            keys_by_arm.setdefault(arm, set()).update(outcome["values"])
    return keys_by_arm


def describe(cell: str, arm: str, outcome: Tuned, metric: Metric | None) -> str:
    """Return one line with the tuned values, the cost and the score of a search by a metric."""
    name = f"{arm} in {cell}" if cell else arm
    if outcome["score"] is None:
        return f"{name}: nothing to tune"
    values = ", ".join(f"{key} {value}" for key, value in outcome["values"].items())
    unit = UNITS[outcome.get("count", "steps")]
    spent = f"{outcome['client_steps']:,} of {outcome['budget']:,} {unit}"
    return (
        f"{name}: {values} ({count_of(outcome['trials'], 'trial')}, {spent}, "
        f"{metric} {100 * outcome['score']:.2f} % on validation samples)"
    )


def _run_searches(
    jobs: list[dict[str, Any]], slots: list[WorkerSlot], folder: Path
) -> Iterator[tuple[dict[str, Any], Tuned]]:
    """Run one search process for each job, at most one per slot at a time.

    Yields:
        Each job with its outcome, in the order of the jobs.
    """
    free = list(slots)
    running: set[subprocess.Popen[str]] = set()
    lock = threading.Lock()  # guards `running` and `stopping`
    stopping = threading.Event()

    def search(job: dict[str, Any]) -> Tuned:
        slot = free.pop()
        try:
            # a separate session, so that Ctrl-C reaches only the study, which then closes the process's input
            with start_python(
                "-c",
                SEARCH_CODE,
                environment=slot.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            ) as process:
                _send(job, process)
                with lock:
                    running.add(process)
                    if stopping.is_set():  # the job started before the others were cancelled
                        _close_input(process)
                if slot.cores and hasattr(os, "sched_setaffinity"):
                    os.sched_setaffinity(process.pid, slot.cores)
                assert process.stdout is not None
                answer = process.stdout.read()
                with lock:
                    running.discard(process)
            return _outcome(job["arm"], answer)
        finally:
            free.append(slot)

    with store.folder_for(folder) as opened, opened.log("tuning.log") as log, ThreadPoolExecutor(len(slots)) as pool:
        try:
            futures = [pool.submit(search, job) for job in jobs]
            for job, future in zip(jobs, futures, strict=True):
                yield job, future.result()
        finally:
            with lock:
                stopping.set()
                for process in running:
                    _close_input(process)
            pool.shutdown(wait=False, cancel_futures=True)


def _send(job: dict[str, Any], process: "subprocess.Popen[str]") -> None:
    """Write a job to a search process's standard input."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    except BrokenPipeError:  # the process died; its output ends without an answer
        _close_input(process)


def _close_input(process: "subprocess.Popen[str]") -> None:
    """Close a search process's standard input, which stops the process."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()


def _outcome(arm: str, answer: str) -> Tuned:
    """Parse the tuning outcome that an arm's search process printed.

    Raises:
        ConfigError: The process reported a mistake in the settings.
        RayltError: The process failed or died.
    """
    if not answer:
        raise RayltError(
            f"tuning of arm {arm!r}: its process died. Repeat the command to continue the search.",
            code="study.tuning-failed",
            arm=arm,
        )
    message: Any = json.loads(answer)
    if "problem" not in message:
        return message
    kind = ConfigError if message.get("input") else RayltError
    raise kind(f"tuning of arm {arm!r}: {message['problem']}", code="study.tuning-failed", arm=arm)
