"""Tuning: each arm of a study may spend as many client-steps on a search, judged on validation samples.

    tune: {runs: 8, ranges: {local.lr: "loguniform(0.003, 0.1)"}}

Arms are searched over the ranges that their methods' fields declare, as far as the study does not give a field, and
over the ranges given for all. The seeds then run with what was best. An arm's search is a folder beside its runs
(`CELL/ARM/search`, see tune/search.py); what came of it stands in tuned.json, and is not searched for again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt import store
from raylt.config import Config, Section
from raylt.core.method import Method
from raylt.errors import CheckpointError, ConfigError, RayltError
from raylt.registry import plugin_files, resolve
from raylt.studies.places import Place, places_for
from raylt.studies.settings import portable, slug
from raylt.typed import as_json, closed, hash_json

FILE = "tuned.json"
LIMIT = 2**26               # bytes of it


class Tuning(Section):
    """What a study's arms are tuned by.

    Attributes:
        runs: the budget of every arm, in whole runs of the reference arm in that cell: its client-steps times this.
        ranges: searched for every arm, by setting, as in loguniform(0.003, 0.1); of a method's field for those that
            have it.
        fields: of the methods, by arm, that are searched; all that the study does not give by default.
    """

    runs: float = Field(gt=0, le=1000)
    ranges: dict[str, str] = Field(default={})
    fields: dict[str, list[str]] = Field(default={})
    metric: Literal["accuracy", "many", "medium", "few", "owned", "matched", "miou"] = "accuracy"
    searcher: Literal["tpe", "random"] = "tpe"


@closed
class Tuned(TypedDict):
    """What came of an arm's search in a cell.

    `asked` is a hash of what was searched for; `values` are settings by dotted key; `score` is the metric on
    validation samples, None where there was nothing to search.
    """

    asked: str
    values: dict[str, Any]
    score: float | None
    trials: int
    client_steps: int
    budget: int


Outcomes = dict[str, dict[str, Tuned]]          # by cell and arm


@closed
class _File(TypedDict):
    """The content of tuned.json."""

    outcomes: Outcomes
    sha256: str


_FILE = TypeAdapter(_File)


class Listener(Protocol):
    """Told what came of each search."""

    def says(self, text: str) -> None: ...


def asked(tuning: Tuning, arm: str, base: Config, reference: Config) -> str:
    """A hash of what an arm is searched for, wherever its files lie: the same search need not be done again.

    What is there for other arms alone does not count; the reference does, in whose runs the budget is.
    """
    method = resolve(base).method
    return hash_json({
        "runs": tuning.runs, "metric": tuning.metric, "searcher": tuning.searcher, "fields": tuning.fields.get(arm),
        "ranges": applying(tuning.ranges, type(method)), "base": portable(base), "reference": portable(reference)})


def applying(ranges: Mapping[str, str], method: type[Method]) -> dict[str, str]:
    """Those ranges that are not of fields that a method has not: these are for other arms."""
    return {key: text for key, text in ranges.items()
            if not key.startswith("method.") or key.removeprefix("method.") in method.model_fields}


def read_tuned(folder: Path) -> Outcomes:
    """What was tuned so far.

    Raises:
        CheckpointError: tuned.json cannot be read, or was changed.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    content = as_json(store.read(path, LIMIT), _FILE, str(path))
    if content["sha256"] != hash_json(content["outcomes"]):
        raise CheckpointError(f"{path}: was changed after the arms were tuned; put the original back, or remove it: "
                              "the searches beside it are read again")
    return content["outcomes"]


def write_tuned(folder: Path, outcomes: Outcomes) -> None:
    """The inverse of `read_tuned`."""
    content = {"outcomes": outcomes, "sha256": hash_json(outcomes)}
    store.write(folder / FILE, json.dumps(content, indent=1) + "\n")


def joined(outcomes: Outcomes, more: Outcomes) -> Outcomes:
    """Outcomes of both; of an arm in a cell that both have, the second's."""
    return {cell: outcomes.get(cell, {}) | more.get(cell, {}) for cell in outcomes | more}


def search_arms(bases: Mapping[tuple[str, str], Config], tuning: Tuning, reference: str, folder: Path,
                watcher: Listener, parallel: int | None, fleet: Literal["local", "ray"],
                address: str | None) -> Outcomes:
    """Searches every arm in every cell that tuned.json has not; a search that was interrupted goes on.

    Args:
        bases: by cell and arm, with only those fields of the method that the study gives.
        reference: the arm whose runs the budget is counted in.
        folder: of the study.
        parallel, fleet, address: as of `Study.run`.

    Raises:
        CheckpointError: an arm was tuned for something else.
        ConfigError: a range cannot be, or a trial takes more than the budget; RayltError: a search failed. Both name
            the arm.
    """
    outcomes = read_tuned(folder)
    sought = {(cell, arm): asked(tuning, arm, base, bases[cell, reference]) for (cell, arm), base in bases.items()}
    for (cell, arm), wanted in sought.items():
        known = outcomes.get(cell, {}).get(arm)
        if known is not None and known["asked"] != wanted:
            raise CheckpointError(f"{folder / FILE}: arm {arm!r} was tuned with other settings; give the study another "
                                  "name, or remove that file and the arm's folder")
    waiting = [key for key in bases if key[1] not in outcomes.get(key[0], {})]
    if not waiting:
        return outcomes
    jobs = [{"cell": cell, "arm": arm, "folder": str(folder / slug(cell) / slug(arm)),
             "base": bases[cell, arm].model_dump(mode="json"), "reference": bases[cell, reference].model_dump(
                 mode="json"), "tune": tuning.model_dump(mode="json"), "fleet": fleet, "address": address,
             "plugins": plugin_files()} for cell, arm in waiting]
    places = places_for(parallel, fleet, [bases[key] for key in waiting])
    for job, outcome in _carry_out(jobs, places, folder):
        outcome["asked"] = sought[job["cell"], job["arm"]]
        outcomes.setdefault(job["cell"], {})[job["arm"]] = outcome
        write_tuned(folder, outcomes)
        watcher.says(describe(job["cell"], job["arm"], outcome))
    return outcomes


def searched(outcomes: Outcomes) -> dict[str, set[str]]:
    """The settings, by dotted key, that each arm was tuned in."""
    found: dict[str, set[str]] = {}
    for arms in outcomes.values():
        for arm, outcome in arms.items():
            found.setdefault(arm, set()).update(outcome["values"])
    return found


def describe(cell: str, arm: str, outcome: Tuned) -> str:
    """What came of a search, in a line."""
    where = f"{arm} in {cell}" if cell else arm
    if outcome["score"] is None:
        return f"{where}: nothing to tune"
    values = ", ".join(f"{key} {value}" for key, value in outcome["values"].items())
    return (f"{where}: {values} ({outcome['trials']} trials, {outcome['client_steps']:,} of {outcome['budget']:,} "
            f"client-steps, {100 * outcome['score']:.2f} % on validation samples)")


def _carry_out(jobs: list[dict[str, Any]], places: list[Place], folder: Path) -> Any:
    """Runs a process for each job, as many at once as there are places, and yields jobs with their outcomes."""
    free, running = list(places), set[subprocess.Popen[str]]()

    def work(job: dict[str, Any]) -> Tuned:
        place = free.pop()
        try:
            # a session of its own: Ctrl-C is for the study, which then closes the input that the process listens to
            with subprocess.Popen([sys.executable, "-m", "tune.arm", json.dumps(job)], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                                  env=os.environ | place.environment) as process:
                running.add(process)
                if place.cores and hasattr(os, "sched_setaffinity"):
                    os.sched_setaffinity(process.pid, place.cores)
                assert process.stdout is not None
                answer = process.stdout.read()
                running.discard(process)
            message: Any = json.loads(answer) if answer else {"problem": "its process died; the same command goes on"}
            if "problem" in message:
                kind = ConfigError if message.get("input") else RayltError
                raise kind(f"tuning of arm {job['arm']!r}: {message['problem']}")
            return message
        finally:
            free.append(place)

    with store.folder_for(folder) as opened, opened.log("tuning.log") as log, ThreadPoolExecutor(len(places)) as pool:
        try:
            for job, future in [(job, pool.submit(work, job)) for job in jobs]:
                yield job, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                assert process.stdin is not None
                with suppress(OSError):
                    process.stdin.close()
