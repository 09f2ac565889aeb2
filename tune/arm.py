"""Process that tunes one arm of a study. raylt/studies/running/tuning.py starts it.

The process reads the job as a line of JSON from standard input, and writes the result as JSON to standard output. It
exits when standard input ends, which happens when the study's process dies. The search can then be resumed from the
last rounds of its trials.
"""

import json
import os
import queue
import sys
import threading
from math import ceil
from pathlib import Path
from typing import Any

from raylt.config import Config, check
from raylt.errors import CheckpointError, ConfigError, describe_error
from raylt.methods import METHODS
from raylt.registry import load_plugin
from raylt.store import Folder, folder_for
from raylt.studies.definition import Definition
from raylt.studies.running.tuning import UNITS, Outcomes, Tuned, Tuning, applying
from tune.asha import rungs
from tune.loop import size_of
from tune.plan import SearchPlan, cost_of, with_validation
from tune.search import SearchResult, resume, search
from tune.space import Space, axis_of, space

NAME = "search"
# Keys of a study, by the option of `raylt tune` that they set.
KEYS = {"--budget": "study.tune.runs", "--metric": "study.tune.metric", "--splits": "study.tune.splits"}


def tune_arm(
    folder: Path,
    base: Config,
    reference: Config,
    tuning: Tuning,
    arm: str,
    fleet: Any = "local",
    address: str | None = None,
) -> Tuned:
    """Search for the best settings of an arm, or continue an interrupted search.

    Args:
        folder: Folder of the arm, in which the search's folder is created.
        base: Settings of the arm, with only the given fields of its method.
        reference: Settings of the run that is the unit of the budget.
        tuning: Settings of the search.
        arm: Name of the arm.
        fleet: Where the trials run.
        address: Address of the Ray cluster.

    Raises:
        ConfigError: A range is invalid, or one trial costs more than the budget.
        CheckpointError: The folder holds another search.
    """
    base = with_validation(base)
    reference = with_validation(reference)
    arm_space = _space(base, tuning, arm)
    unit = cost_of(reference, size_of(reference), tuning.count)
    budget = round(tuning.runs * unit)
    outcome: Tuned = {"asked": "", "values": {}, "score": None, "trials": 0, "client_steps": 0, "budget": budget}
    if tuning.count != "steps":
        outcome["count"] = tuning.count
    if not arm_space:
        return outcome
    cost = cost_of(base, size_of(base), tuning.count) * tuning.splits
    if cost and not reference.federation.rounds:
        raise _no_unit(tuning)
    if cost > budget:
        raise ConfigError(
            f"study.tune.runs: the budget is {budget} {UNITS[tuning.count]}, but one trial of the arm takes {cost} "
            f"({tuning.runs:g}). Raise it to at least {ceil(100 * cost / unit) / 100:g}.",
            code="search.budget-too-small",
            key="study.tune.runs",
            value=tuning.runs,
            cost=cost,
        )
    try:
        result = _search(folder, base, arm_space, budget, tuning, fleet, address, limited=cost > 0)
    except ConfigError as error:
        raise _of_study(error) from None
    assert result.best.outcome is not None
    return {
        **outcome,
        "values": result.best.values,
        "score": result.best.outcome.score,
        "trials": len(result.trials),
        "client_steps": sum(record.spent for record in result.trials),
    }


def _search(
    folder: Path,
    base: Config,
    arm_space: Space,
    budget: int,
    tuning: Tuning,
    fleet: Any,
    address: str | None,
    limited: bool,
) -> SearchResult:
    """Run or continue the search of an arm; see `tune_arm`.

    Args:
        limited: Whether the budget limits the trials, which it does not without rounds.
    """
    if (folder / NAME / "search.json").exists():
        _check_same_search(folder / NAME, base.method["name"], arm_space, budget, tuning)
        return resume(folder / NAME, fleet=fleet, address=address)
    with folder_for(folder) as arm_folder:
        arm_folder.remove(NAME)  # a process may have died before it wrote search.json
    return search(
        base,
        arm_space,
        None if limited else ceil(tuning.runs),
        out=folder,
        name=NAME,
        metric=tuning.metric or "accuracy",
        searcher=tuning.searcher,
        scheduler="asha" if rungs(base.federation.rounds, None) else "none",
        budget=budget or None,
        count=tuning.count,
        seed=base.seed,
        splits=tuning.splits,
        fleet=fleet,
        address=address,
    )


def _of_study(error: ConfigError) -> ConfigError:
    """Return an error of `search` that names the study's key in place of the option of `raylt tune`."""
    key = KEYS.get(str(error.details.get("key")))
    if key is None:
        return error
    _, _, fault = str(error).partition(": ")
    return ConfigError(f"{key}: {fault}", code=error.code, **error.details | {"key": key})


def check_searches(definition: Definition) -> None:
    """Check each field, range and setting that a tuned study names, without its data.

    Raises:
        ConfigError: A method does not have a named field, no arm has the setting of a range, or the range is not valid
            for the setting.
    """
    assert definition.tune is not None, "the study tunes its arms"
    for key, text in definition.tune.ranges.items():
        axis_of(f"study.tune.ranges.{key}", text)
    searched = set[str]()
    bases = definition.bases()
    for (cell, arm), base in bases.items():
        try:
            own = _space(base, definition.tune, arm).keys()
            if own and base.federation.rounds and not bases[cell, definition.compared_to].federation.rounds:
                raise _no_unit(definition.tune)
            searched |= own
        except ConfigError as error:
            details = error.details | {"arm": arm}
            raise ConfigError(f"study.tune, arm {arm!r}: {error}", code=error.code, **details) from None
    for key in definition.tune.ranges:
        if key not in searched:
            raise ConfigError(
                f"study.tune.ranges: no arm can search this setting ({key}). Use a setting that raylt settings or "
                "raylt methods lists; without rounds, local settings cannot be searched.",
                code="search.unknown-field",
                key=key,
            )


def open_searches(definition: Definition, tuned: Outcomes) -> list[tuple[str, str]]:
    """Return the cell and the arm of each search of a tuned study that has no outcome yet.

    Args:
        definition: The study.
        tuned: Outcomes by cell and arm.
    """
    assert definition.tune is not None, "the study tunes its arms"
    return [
        (cell, arm)
        for (cell, arm), base in definition.bases().items()
        if arm not in tuned.get(cell, {}) and _space(base, definition.tune, arm)
    ]


def _no_unit(tuning: Tuning) -> ConfigError:
    """Return the error for a reference arm without rounds, whose runs cannot be the unit of a budget."""
    return ConfigError(
        f"study.reference: a run of the reference arm takes no {UNITS[tuning.count]}, so a budget cannot be counted in "
        "its runs (federation.rounds = 0). Name an arm with rounds.",
        code="search.budget-too-small",
        key="study.reference",
        value=0,
    )


def _check_same_search(folder: Path, method: str, arm_space: Space, budget: int, tuning: Tuning) -> None:
    """Raise CheckpointError if the folder's search has another space, budget, metric or searcher."""
    with Folder.open(folder) as search_folder:
        plan = SearchPlan.from_json(search_folder.read("search.json"), str(folder / "search.json"))
    expected = ({method: arm_space}, budget or None, tuning.count, tuning.metric, tuning.searcher, tuning.splits)
    if (plan.spaces, plan.budget, plan.count, plan.metric, plan.searcher, plan.splits) != expected:
        raise CheckpointError(
            f"{folder}: the folder holds a search with other settings. Give the study another name, or remove the "
            "folder.",
            code="search.different",
            path=str(folder),
        )


def _space(base: Config, tuning: Tuning, arm: str) -> Space:
    """Return the search space of an arm, without ranges of fields that the arm's method does not have.

    Without rounds there is no local training, so ranges of local settings are left out too.
    """
    method = base.method["name"]
    texts = applying(tuning.ranges, METHODS[method])
    if not base.federation.rounds:
        texts = {key: text for key, text in texts.items() if not key.startswith("local.")}
    ranges = {key: axis_of(f"study.tune.ranges.{key}", text) for key, text in texts.items()}
    return space(base, ranges, tuning.fields.get(arm), method)


def main() -> None:
    """Tune the arm of the job on standard input, and write the result or the error to standard output."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # make libraries print to standard error
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_job, args=(jobs,), daemon=True).start()
    job = jobs.get()
    try:
        for file in job["plugins"]:
            load_plugin(Path(file))
        base, reference = (check(Config, job[which]) for which in ("base", "reference"))
        tuning: Tuning = check(Tuning, job["tune"])
        message: Any = tune_arm(Path(job["folder"]), base, reference, tuning, job["arm"], job["fleet"], job["address"])
    except Exception as error:
        message = {
            "problem": describe_error(error),
            "input": isinstance(error, ConfigError),
        }
    channel.write(json.dumps(message))
    channel.close()


def _read_job(jobs: "queue.SimpleQueue[dict[str, Any]]") -> None:
    try:
        for line in sys.stdin:
            jobs.put(json.loads(line))
    finally:
        os._exit(1)
