"""Branch points: the steps after which a run can continue with changed fields of its method.

A method names the fields that act only in a later stage (`Method.later`), and the step after which each stage begins
(`Method.stages`). Two runs that differ in these fields alone are identical until then.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from raylt.config import Config, differences, settled
from raylt.core.method import Method
from raylt.errors import ConfigError, count_of

JUDGING = "judging"  # the stage of fields that act wherever clients' own models are evaluated


class Fork(NamedTuple):
    """The point at which two runs diverge: the stage that differs first, and the last step before that stage."""

    stage: str
    step: int


def fork(config: Config, method: Method, other_config: Config, other: Method) -> Fork:
    """Return the point at which two runs with these configurations and methods diverge.

    Args:
        config: Configuration of the first run.
        method: Method of the first run.
        other_config: Configuration of the second run.
        other: Method of the second run.

    Raises:
        ConfigError: The runs differ from the first round on or not at all, the changed stage begins with the first
            round, or `evaluation.personal` or `federation.patience` could make earlier rounds differ.
    """
    _check_same_start(config, method, other_config, other)
    stages = _changed_stages(config, method, other)
    if not stages:
        late = ", ".join(name for names in method.later.values() for name in names)
        raise ConfigError(
            "method: no field differs from the branched run. Change a field that acts in a later stage: "
            f"{late or 'this method has none'}.",
            code="run.not-branchable",
        )
    if config.federation.patience is not None:
        raise ConfigError(
            f"federation.patience: the run may stop early ({config.federation.patience}), so another run may have a "
            "different last round. Start a new run.",
            code="run.not-branchable",
            key="federation.patience",
            value=config.federation.patience,
        )
    rounds = config.federation.rounds
    starts = {stage: min(each.stages(rounds).get(stage, rounds) for each in (method, other)) for stage in stages}
    first = min(starts, key=starts.__getitem__)
    if starts[first] < 1:
        raise ConfigError(
            f"method: the stage {first} begins with the first round ({rounds} rounds). Start a new run.",
            code="run.not-branchable",
            stage=first,
        )
    return Fork(first, starts[first])


def _check_same_start(config: Config, method: Method, other_config: Config, other: Method) -> None:
    """Raise ConfigError if two runs differ from the first round on, apart from the fields of their methods."""
    before = settled(config) | {"method": None}
    after = settled(other_config) | {"method": None}
    if early := [f"{key}: {old!r} -> {new!r}" for key, old, new in differences(before, after)]:
        raise ConfigError(
            f"{'; '.join(early)}: this takes effect from the start. Change only fields of the method that act in a "
            "later stage, or start a new run.",
            code="run.not-branchable",
        )
    trained, other_trained = (each.trains_as or each.name for each in (method, other))
    if trained != other_trained:
        raise ConfigError(
            f"method: {other.name} does not train as {method.name} does. Start a new run.",
            code="run.not-branchable",
            key="method",
            value=other.name,
        )


def _changed_stages(config: Config, method: Method, other: Method) -> set[str]:
    """Return the stages in which the two methods differ.

    Raises:
        ConfigError: A changed field acts from the first round on, or in evaluations between rounds.
    """
    stages: set[str] = set() if method.name == other.name else {"finish"}
    for name, old, new in _changed(method, other):
        stage = stage_of(type(other), name) or stage_of(type(method), name)
        if stage is None:
            raise ConfigError(
                f"method.{name}: {old!r} -> {new!r} acts from the first round on. Start a new run.",
                code="run.not-branchable",
                key=f"method.{name}",
                value=new,
            )
        if stage == JUDGING and config.evaluation.personal:
            raise ConfigError(
                f"method.{name}: {old!r} -> {new!r} acts when clients' own models are evaluated, and the run "
                f"evaluates them every {count_of(config.evaluation.personal, 'round')}. Start a new run, or branch one "
                "with evaluation.personal=0.",
                code="run.not-branchable",
                key=f"method.{name}",
                value=new,
            )
        stages.add(stage)
    return stages


def stage_of(method: type[Method], field: str) -> str | None:
    """Return the stage of training in which a method's field first takes effect, or None for the first round."""
    return next((stage for stage, names in method.later.items() if field in names), None)


def _changed(method: Method, other: Method) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old value, new value) for each field that differs between two methods.

    For two methods of different classes, only fields that act from the first round on are compared.
    """
    before, after = (
        {
            name: value
            for name, value in each.model_dump(mode="json").items()
            if type(method) is type(other) or stage_of(type(each), name) is None
        }
        for each in (method, other)
    )
    return differences(before, after)
