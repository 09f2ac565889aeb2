"""`MEASURES`: the figures of a run that studies compare, each by one word; `value_of` reads one off a record.

Where a method judges several models of a client, `matched@post_local` is that figure of the one of that name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from raylt.errors import ConfigError
from raylt.studies.records import Record

At = Literal["last", "last10", "validation", "best"]


@dataclass(frozen=True)
class Measure:
    """A figure of a finished run.

    Attributes:
        what: in words, for a table's heading.
        read: from summary.json; None where the run has no such figure.
        every_round: the key of the curve that `last10`, `validation` and `best` are taken from; None: only the last is
            known.
        higher: whether more is better.
    """

    what: str
    read: Callable[[Mapping[str, Any]], float | None]
    every_round: str | None = None
    higher: bool = True


def _at(*path: str) -> Callable[[Mapping[str, Any]], float | None]:
    def read(summary: Mapping[str, Any]) -> float | None:
        value: Any = summary
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value
    return read


# where a measure stands among the figures of one model
_OF_MODELS: dict[str, tuple[str, ...]] = {
    "accuracy": ("accuracy",), "macro": ("macro",), "miou": ("miou",),
    **{group: ("groups", group) for group in ("many", "medium", "few")},
    "owned": ("clients", "owned", "mean"), "matched": ("clients", "matched", "mean"),
    "clients": ("clients", "global", "mean"), "local": ("clients", "local", "mean"),
    "client_miou": ("clients", "miou", "mean"),
    "worst_decile": ("clients", "matched", "worst_decile"),
}

MEASURES: dict[str, Measure] = {
    "accuracy": Measure("accuracy on the balanced test set", _at("accuracy", "last"), "accuracy"),
    "many": Measure("accuracy, many-shot classes", _at("groups", "many"), "many"),
    "medium": Measure("accuracy, medium-shot classes", _at("groups", "medium"), "medium"),
    "few": Measure("accuracy, few-shot classes", _at("groups", "few"), "few"),
    "macro": Measure("mean of the class accuracies", _at("macro")),
    "miou": Measure("mean intersection over union", _at("miou")),
    "global_accuracy": Measure("accuracy of the global model", _at("global_accuracy")),
    "global_macro": Measure("mean of the global model's class accuracies", _at("global_macro")),
    "global_miou": Measure("mean intersection over union of the global model", _at("global_miou")),
    "owned": Measure("mean over clients, classes that they own", _at("clients", "by", "owned", "mean")),
    "matched": Measure("mean over clients, own class mix", _at("clients", "by", "matched", "mean")),
    "clients": Measure("mean over clients, all classes", _at("clients", "by", "global", "mean")),
    "client_miou": Measure("mean IoU over clients, own classes", _at("clients", "by", "miou", "mean")),
    "worst_decile": Measure("worst tenth of the clients, own class mix",
                            _at("clients", "by", "matched", "worst_decile")),
    "local": Measure("mean over clients, own test images", _at("clients", "by", "local", "mean")),
    **{f"new_{kind}": Measure(f"clients that join after training, {what}", _at("figures", "new_clients", kind))
       for kind, what in (("owned", "classes that they own"), ("matched", "own class mix"),
                          ("worst_decile", "worst tenth, own class mix"))},
    "bytes_up": Measure("bytes sent by clients", _at("bytes", "up"), higher=False),
    "seconds": Measure("seconds of the run, judging among them", _at("seconds"), higher=False),
    "bytes_down": Measure("bytes sent to clients", _at("bytes", "down"), higher=False),
}


def measure_of(name: str) -> Measure:
    """The measure of a name, or of `NAME@MODEL`.

    Raises:
        ConfigError: there is none.
    """
    word, at, model = name.partition("@")
    if word not in MEASURES or (at and (word not in _OF_MODELS or not model)):
        models = f"; with @MODEL: {', '.join(_OF_MODELS)}" if at else ""
        raise ConfigError(f"measure {name}: no such measure; there are: {', '.join(MEASURES)}{models}")
    if not at:
        return MEASURES[word]
    return replace(MEASURES[word], what=f"{MEASURES[word].what}, model {model}", every_round=None,
                   read=_at("others", model, *_OF_MODELS[word]))


def value_of(record: Record, measure: str, at: At) -> float | None:
    """A figure of a finished run; None where it has none."""
    assert record.summary is not None
    known = measure_of(measure)
    last = known.read(record.summary)
    if at == "last" or known.every_round is None or last is None:
        return last
    if at == "validation":
        return _chosen(record, known.every_round)
    rounds = record.config["federation"]["rounds"]
    curve = [value for value in record.curve[known.every_round][:rounds] if value is not None]
    if not curve:
        return None
    return fmean(curve[-10:]) if at == "last10" else max([*curve, last])


def _chosen(record: Record, key: str) -> float | None:
    """A figure of the step, the finish among them, whose model is best on validation samples; the first of equals."""
    judged = [(chosen, value) for chosen, value in zip(record.curve.get("validation", []), record.curve[key],
                                                       strict=False) if chosen is not None and value is not None]
    return max(judged, key=lambda pair: pair[0])[1] if judged else None
