"""`MEASURES`, the figures by which studies compare runs, and `value_of`, which reads a figure from a record.

If a method evaluates several models of a client, `matched@post_local` is the figure `matched` of the model
`post_local`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from raylt.core.report import FIGURES, POOLED, SHARED
from raylt.errors import ConfigError, did_you_mean
from raylt.studies.records.record import RunRecord

At = Literal["last", "last10", "validation", "best"]
FINISH = math.inf  # step of the phase after the last round, see `by_step`


@dataclass(frozen=True)
class Measure:
    """A quantity by which finished runs are compared, such as accuracy.

    Attributes:
        what: Description for table headings.
        read: Function that returns the figure from the content of summary.json, or None if the run does not have it.
        every_round: Key of the curve that `last10`, `validation` and `best` use; None if only the last value is known.
        curve: Key of the curve that `raylt plot curves` draws, if it differs from `every_round`.
        higher: Whether higher values are better.
        guessed: Whether guessing has the value 1 / (number of classes).
    """

    what: str
    read: Callable[[Mapping[str, Any]], float | None]
    every_round: str | None = None
    higher: bool = True
    curve: str | None = None
    guessed: bool = False


def _at(*path: str) -> Callable[[Mapping[str, Any]], float | None]:
    def read(summary: Mapping[str, Any]) -> float | None:
        value: Any = summary
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    return read


# Path of each measure in the figures of a single model.
_OF_MODELS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in POOLED},
    **{group: ("groups", group) for group in ("many", "medium", "few")},
    "owned": ("clients", "owned", "mean"),
    "matched": ("clients", "matched", "mean"),
    "long_tailed": ("clients", "long_tailed", "mean"),
    "clients": ("clients", "global", "mean"),
    "local": ("clients", "local", "mean"),
    "client_miou": ("clients", "miou", "mean"),
    "worst_decile": ("clients", "matched", "worst_decile"),
}

_SHARES: dict[str, Measure] = {
    "accuracy": Measure(FIGURES["accuracy"].title, _at("accuracy", "last"), "accuracy"),
    "many": Measure("accuracy, many-shot classes", _at("groups", "many"), "many"),
    "medium": Measure("accuracy, medium-shot classes", _at("groups", "medium"), "medium"),
    "few": Measure("accuracy, few-shot classes", _at("groups", "few"), "few"),
    **{
        name: Measure(FIGURES[name].title, _at(name))
        for name in (*POOLED, *SHARED)
        if name not in ("accuracy", "miou", "global_miou")
    },
    "owned": Measure("mean over clients, classes that they own", _at("clients", "by", "owned", "mean"), curve="owned"),
    "matched": Measure("mean over clients, own class mix", _at("clients", "by", "matched", "mean"), curve="matched"),
    "long_tailed": Measure(
        "mean over clients, class mix of all clients together", _at("clients", "by", "long_tailed", "mean")
    ),
    "clients": Measure("mean over clients, all classes", _at("clients", "by", "global", "mean"), curve="clients"),
    "worst_decile": Measure(
        "worst tenth of the clients, own class mix",
        _at("clients", "by", "matched", "worst_decile"),
        curve="worst_decile",
    ),
    "local": Measure("mean over clients, own test images", _at("clients", "by", "local", "mean"), curve="local"),
    **{
        f"new_{kind}": Measure(f"clients that join after training, {what}", _at("figures", "new_clients", kind))
        for kind, what in (
            ("owned", "classes that they own"),
            ("matched", "own class mix"),
            ("worst_decile", "worst tenth, own class mix"),
        )
    },
}

MEASURES: dict[str, Measure] = {
    **{name: replace(measure, guessed=True) for name, measure in _SHARES.items()},
    **{name: Measure(FIGURES[name].title, _at(name)) for name in ("miou", "global_miou")},
    "client_miou": Measure("mean IoU over clients, own classes", _at("clients", "by", "miou", "mean")),
    "zero_shot": Measure("accuracy before training, by texts", _at("figures", "zero_shot", "accuracy")),
    "bytes_up": Measure("bytes sent by clients", _at("bytes", "up"), higher=False),
    "seconds": Measure("seconds of the run, evaluations included", _at("seconds"), higher=False),
    "bytes_down": Measure("bytes sent to clients", _at("bytes", "down"), higher=False),
}


def measure_of(name: str) -> Measure:
    """Return the measure with this name; `NAME@MODEL` selects one of several models of a client.

    Raises:
        ConfigError: The measure is unknown.
    """
    word, at, model = name.partition("@")
    if word not in MEASURES or (at and (word not in _OF_MODELS or not model)):
        names = _OF_MODELS if at else MEASURES
        raise ConfigError(
            f"measure: unknown measure ({name}). {did_you_mean(word, names)}"
            f"Choose from {', '.join(names)}{', each with @MODEL' if at else ''}.",
            code="config.unknown-name",
            key="measure",
            name=name,
        )
    if not at:
        return MEASURES[word]
    return replace(
        MEASURES[word],
        what=f"{MEASURES[word].what}, model {model}",
        every_round=None,
        curve=None,
        read=_at("others", model, *_OF_MODELS[word]),
    )


def value_of(record: RunRecord, measure: str, at: At) -> float | None:
    """Return the value of a measure for a finished run, or None if the run does not have it.

    Args:
        record: Record of the run.
        measure: Name of the measure.
        at: Rounds whose figures count.
    """
    assert record.summary is not None
    definition = measure_of(measure)
    last = definition.read(record.summary)
    if at == "last" or definition.every_round is None or last is None:
        return last
    if at == "validation":
        return _chosen(record, definition.every_round)
    curve = of_rounds(record, definition.every_round)
    if not curve:
        return None
    return fmean(curve[-10:]) if at == "last10" else max([*curve, last])


def of_rounds(record: RunRecord, curve: str) -> list[float]:
    """Return the values of a finished run's curve in its evaluated rounds, without the phase after the last round.

    Only completed rounds count: federation.patience may have ended the run early.
    """
    return [value for value in record.curve.get(curve, [])[: record.rounds] if value is not None]


def by_step(record: RunRecord, values: Sequence[Any]) -> dict[float, Any]:
    """Return a finished run's values by step, where the phase after the last round is the step `FINISH`.

    federation.patience may end runs of one arm after different rounds, so their last phases have different steps.

    Args:
        record: Record of the run.
        values: One value for each step.
    """
    steps = [step if step <= record.rounds else FINISH for step in record.curve["step"]]
    return dict(zip(steps, values, strict=True))


def is_of_deployed_models(measure: str) -> bool:
    """Return whether a measure is of the models that clients use: their own ones, or the global model."""
    return measure in _OF_MODELS


def _chosen(record: RunRecord, key: str) -> float | None:
    """Return the value of a run's curve at the step with the best accuracy on validation samples.

    The first such step counts. It may be the phase after the last round.
    """
    judged = [
        (chosen, value)
        for chosen, value in zip(record.curve.get("validation", []), record.curve.get(key, []), strict=False)
        if chosen is not None and value is not None
    ]
    return max(judged, key=lambda pair: pair[0])[1] if judged else None
