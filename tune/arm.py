"""A process that tunes one arm of a study: `python -m tune.arm JOB`, started by raylt/studies/tuning.py.

What came of it goes out as a line of JSON. When its standard input ends, as it does when the study's process dies in
whatever way, it ends at once: the search is resumed from its trials' last rounds.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from raylt.config import Config, check
from raylt.errors import CheckpointError, ConfigError, RayltError, one_line
from raylt.methods import METHODS
from raylt.registry import load_plugin
from raylt.store import Folder, folder_for
from raylt.studies.tuning import Tuned, Tuning, applying
from tune.axes import parse
from tune.desk import sizes
from tune.halving import rungs
from tune.plan import Plan, client_steps
from tune.search import VALIDATION, resume, search
from tune.space import Space, space

NAME = "search"


def tune_arm(folder: Path, base: Config, reference: Config, tuning: Tuning, arm: str, fleet: Any = "local",
             address: str | None = None) -> Tuned:
    """Searches for the best settings of an arm, or goes on with that.

    Args:
        folder: of the arm; the search is made in it.
        base: the arm's settings, with only those fields of its method that are given.
        reference: the settings in whose client-steps the budget is counted.

    Raises:
        ConfigError: a range cannot be, or one trial takes more than the budget.
        CheckpointError: the search that is there is another one.
    """
    base, reference = _held_out(base), _held_out(reference)
    sought = _space(base, tuning, arm)
    budget = round(tuning.runs * client_steps(reference, sizes(reference)))
    outcome: Tuned = {"asked": "", "values": {}, "score": None, "trials": 0, "client_steps": 0, "budget": budget}
    if not sought:
        return outcome
    cost = client_steps(base, sizes(base))
    if cost > budget:
        raise ConfigError(f"study.tune.runs = {tuning.runs:g}: is {budget} client-steps, and one trial of the arm "
                          f"takes {cost}; raise it to at least {tuning.runs * cost / budget:.2g}")
    if (folder / NAME / "search.json").exists():
        with Folder.open(folder / NAME) as here:
            plan = Plan.from_json(here.read("search.json"), str(folder / NAME / "search.json"))
        if (plan.spaces, plan.budget, plan.metric, plan.searcher) != ({base.method["name"]: sought}, budget,
                                                                      tuning.metric, tuning.searcher):
            raise CheckpointError(f"{folder / NAME}: is a search for something else; give the study another name, or "
                                  "remove that folder")
        best = resume(folder / NAME, fleet=fleet, address=address)
    else:
        with folder_for(folder) as here:
            here.remove(NAME)               # left by a process that died before it wrote what is searched for
        best = search(base, sought, None, out=folder, name=NAME, metric=tuning.metric, searcher=tuning.searcher,
                      scheduler="asha" if rungs(base.federation.rounds, None) else "none", budget=budget,
                      seed=base.seed, fleet=fleet, address=address)
    assert best.best.outcome is not None
    return {**outcome, "values": best.best.values, "score": best.best.outcome.score, "trials": len(best.trials),
            "client_steps": sum(record.spent for record in best.trials)}


def _held_out(config: Config) -> Config:
    """With a validation part, as searches have it, where the study has none."""
    if config.data.validation:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"validation": VALIDATION})})


def _space(base: Config, tuning: Tuning, arm: str) -> Space:
    """What is searched; ranges of fields that the arm's method has not are for other arms."""
    method = base.method["name"]
    ranges = {}
    for key, text in applying(tuning.ranges, METHODS[method]).items():
        if (axis := parse(text)) is None:
            raise ConfigError(f"study.tune.ranges.{key} = {text!r}: not a range; write one as in "
                              "loguniform(0.01,0.3)")
        ranges[key] = axis
    return space(base, ranges, tuning.fields.get(arm), method)


def main() -> None:
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                           # what libraries print is no message
    job = json.loads(sys.argv[1])
    try:
        for file in job["plugins"]:
            load_plugin(Path(file))
        base, reference = (check(Config, job[which]) for which in ("base", "reference"))
        tuning: Tuning = check(Tuning, job["tune"])
        message: Any = tune_arm(Path(job["folder"]), base, reference, tuning, job["arm"], job["fleet"], job["address"])
    except Exception as error:
        message = {"problem": str(error) if isinstance(error, RayltError) else one_line(error),
                   "input": isinstance(error, ConfigError)}
    channel.write(json.dumps(message))
    channel.close()


def _end_with_the_study() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
