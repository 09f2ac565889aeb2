"""Stages: what a run does late can be done again with other fields, from the checkpoint before it.

A method says which of its fields act in a later stage alone (`Method.later`) and after which step each stage begins
(`Method.stages`). Two runs that differ in nothing else are the same until then.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from raylt.config import Config, differences, settled
from raylt.core.method import Method
from raylt.errors import ConfigError


class Fork(NamedTuple):
    """Where two runs part: the stage, and the last step that they share."""

    stage: str
    step: int


def fork(config: Config, method: Method, other_config: Config, other: Method) -> Fork:
    """The last step that a run and another have in common.

    Raises:
        ConfigError: they differ from the first round on, and in what; or in nothing.
    """
    before, after = settled(config) | {"method": None}, settled(other_config) | {"method": None}
    if early := [f"{key}: {then!r} -> {now!r}" for key, then, now in differences(before, after)]:
        raise ConfigError(f"{'; '.join(early)}: acts from the start; only fields of the method that act in a "
                          "later stage can change, start a new run for others")
    trained, other_trained = (each.trains_as or each.name for each in (method, other))
    if trained != other_trained:
        raise ConfigError(f"method = {other.name}: does not train as {method.name} does; start a new run")
    stages: set[str] = set() if method.name == other.name else {"finish"}
    for name, before, after in _changed(method, other):
        stage = other.stage_of(name) or method.stage_of(name)
        if stage is None:
            raise ConfigError(f"method.{name}: {before!r} -> {after!r} acts from the first round on; start a new run")
        stages.add(stage)
    if not stages:
        late = ", ".join(name for names in method.later.values() for name in names)
        raise ConfigError("nothing differs from the run that is branched; give a field of the method that acts in a "
                          f"later stage: {late or 'none does'}")
    rounds = config.federation.rounds
    starts = {stage: min(each.stages(rounds).get(stage, rounds) for each in (method, other)) for stage in stages}
    first = min(starts, key=starts.__getitem__)
    if starts[first] < 1:
        raise ConfigError(f"the stage {first} begins with the first round here; start a new run")
    return Fork(first, starts[first])


def _changed(method: Method, other: Method) -> Iterator[tuple[str, Any, Any]]:
    """The fields that differ; of two methods, those that act while both train."""
    before, after = ({name: value for name, value in each.model_dump(mode="json").items()
                      if type(method) is type(other) or each.stage_of(name) is None} for each in (method, other))
    return differences(before, after)
