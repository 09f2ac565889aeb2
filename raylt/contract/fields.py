"""Checks that a method's fields have an effect, and only from their declared stage on."""

import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raylt.contract.case import Case
from raylt.contract.declarations import expect
from raylt.contract.trace import fingerprint, private_states
from raylt.core.experiment import Experiment
from raylt.core.method import Method
from raylt.errors import ConfigError
from raylt.hyper import Choice, range_of

MEASURED = {"seconds", "evaluation_seconds", "timings"}  # Parts of a report that differ between two equal runs.


def acts_from_its_stage_on(case: Case) -> None:
    """A field in `later` has no effect before its stage, so runs that differ in it can share earlier steps."""
    rounds = case.config().federation.rounds
    own: dict[int, str] = {}
    for stage, names in case.method.later.items():
        for name in names:
            for other in others(case.method, name):
                step = min(each.stages(rounds).get(stage, rounds) for each in (case.method, other))
                own.setdefault(step, _state_after(case, case.method, step))
                try:
                    state = _state_after(case, other, step)
                except ConfigError:  # the value conflicts with other fields
                    continue
                value = getattr(other, name)
                expect(state == own[step], f"{name} = {value!r} acts before the stage {stage!r} of `later`")
                break


def fields_without_effect(method: Method) -> list[str]:
    """Return the fields whose other values change nothing in the method's runs on the tiny tasks of the checks.

    Such a field is no violation: it may act only on larger tasks, or together with another field.
    """
    idle = list(type(method).model_fields)
    for kind in method.problems:
        with tempfile.TemporaryDirectory(prefix="raylt-check-") as folder:
            case = Case(method, kind, Path(folder))
            own = _outcome(case, method)
            idle = [name for name in idle if all(_outcome(case, other) == own for other in others(method, name))]
    return idle


def _outcome(case: Case, method: Method) -> Any:
    """Return everything that a run computes: states, model and the figures of its reports; None if it fails."""
    try:
        with warnings.catch_warnings(action="ignore"):
            trace = replace(case, method=method).run()
    except Exception:  # a value at the end of a range may not suit the tiny task
        return None
    return trace.bits, [report.model_dump(exclude=MEASURED) for report in trace.reports]


def others(method: Method, name: str) -> Iterator[Method]:
    """Yield copies of the method in which one field has another valid value from its search range."""
    field = type(method).model_fields[name]
    searched = range_of(field)
    values = searched.values if isinstance(searched, Choice) else (searched.low, searched.high)
    for value in values:
        try:
            other = type(method)(**method.model_dump() | {name: value})
        except (ValidationError, ConfigError):
            continue
        if getattr(other, name) != getattr(method, name):
            yield other


def _state_after(case: Case, method: Method, step: int) -> str:
    """Return the state of a run after `step` steps: server state, model and the state of each client."""
    one = replace(case, method=method, raised=case.raised)
    experiment = one.experiment(one.config())
    for _ in range(step):
        experiment.step()
    return fingerprint(_parts(experiment))


def _parts(experiment: Experiment) -> dict[str, Any]:
    return {
        "server": experiment.server.state,
        "model": dict(experiment.server.model.state_dict()),
        "clients": {str(id): state for id, state in private_states(experiment).items()},
    }
