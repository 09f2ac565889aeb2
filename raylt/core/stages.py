"""Stages: what a run does late can be done again with other fields, from the checkpoint before it.

A method says which of its fields act in a later stage alone (`Method.later`) and after which step each stage begins
(`Method.stages`). Two runs that differ in nothing else are the same until then.
"""

from typing import Any, NamedTuple

from raylt.config import Config
from raylt.core.method import Method
from raylt.errors import ConfigError

FREE = ("resources", "output", "method")        # no number depends on the first two


class Fork(NamedTuple):
    """Where two runs part: the stage, and the last step that they share."""

    stage: str
    step: int


def fork(config: Config, method: Method, other_config: Config, other: Method) -> Fork:
    """The last step that a run and another have in common.

    Raises:
        ConfigError: they differ from the first round on, and in what; or in nothing.
    """
    if differences := [line for key in Config.model_fields if key not in FREE
                       for line in _differences(key, _plain(getattr(config, key)), _plain(getattr(other_config, key)))]:
        raise ConfigError(f"{'; '.join(differences)}: acts from the start; only fields of the method that act in a "
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


def _changed(method: Method, other: Method) -> list[tuple[str, Any, Any]]:
    fields = method.model_dump(mode="json"), other.model_dump(mode="json")
    missing = "absent"
    if type(method) is not type(other):         # what acts in a stage of one alone is not compared
        fields = tuple({name: value for name, value in values.items() if each.stage_of(name) is None}
                       for values, each in zip(fields, (method, other), strict=True))
    before, after = fields
    return [(name, before.get(name, missing), after.get(name, missing)) for name in before | after
            if before.get(name, missing) != after.get(name, missing)]


def _plain(section: Any) -> Any:
    return section.model_dump(mode="json") if hasattr(section, "model_dump") else section


def _differences(key: str, before: Any, after: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        return [line for inner in before for line in _differences(f"{key}.{inner}", before[inner], after[inner])]
    return [] if before == after else [f"{key}: {before!r} -> {after!r}"]
