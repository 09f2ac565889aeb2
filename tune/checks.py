"""What is asked of a search, before anything starts."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from raylt.data.maps import class_counts
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.registry import resolve
from raylt.runs.trackers import check_trackers
from tune.desk import sizes, task_of
from tune.halving import rungs
from tune.kinds import PLAN
from tune.plan import Plan, State
from tune.record import Record

GROUPS = ("many", "medium", "few")


def check_tracked(track: Sequence[str], fleet: str) -> None:
    """Raises a ConfigError where trials cannot be logged as asked."""
    check_trackers(track)
    if track and fleet == "local":
        raise ConfigError(f"--track {track[0]}: Ray Tune logs the trials; leave out --fleet local")


def check_asked(plan: Plan, parallel: int | None, fleet: str) -> None:
    """Raises a ConfigError where an argument is none of those that there are: from Python anything may come."""
    try:
        PLAN.validate_python(plan.to_json())
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}") from None
    if fleet not in ("ray", "local"):
        raise ConfigError(f"fleet = {fleet!r}: must be ray or local")
    if parallel is not None and parallel < 1:
        raise ConfigError(f"parallel = {parallel}: must be at least 1")


def check_plan(plan: Plan) -> None:
    """Raises a ConfigError for what can be known to be wrong before anything is started."""
    for name, space in plan.spaces.items():
        if "model" not in space:
            resolve(plan.base.model_copy(update={"method": {"name": name}})).check(task_of(plan.base).facts)
    if plan.metric in GROUPS and plan.metric not in _judged_groups(task_of(plan.base)):
        raise ConfigError(f"--metric {plan.metric}: this split has no {plan.metric}-shot class with a validation "
                          "sample; choose another, or set data.groups or data.validation")
    for method, track in State(plan, sizes).tracks.items():
        if plan.scheduler == "asha" and not rungs(plan.base.federation.rounds, plan.grace):
            raise ConfigError(f"--scheduler asha: nothing to compare on the way in federation.rounds = "
                              f"{plan.base.federation.rounds}; use --scheduler none, or more rounds")
        if not isinstance(track.next(), Record):
            cost = replace(plan, budget=None)
            record = State(cost, sizes).tracks[method].next()
            assert isinstance(record, Record)
            raise ConfigError(f"--budget {plan.budget}: one trial of {method} takes {record.cost} client-steps; raise "
                              "it, or lower federation.rounds")


def _judged_groups(task: Task) -> set[str]:
    """Groups of classes that have validation samples."""
    assert task.validation is not None
    held = class_counts(task.validation.labels(), task.classes)
    return {group for n, group in zip(held, task.groups, strict=True) if n}
