"""summary.json: the result of a run, linked to the run by hashes, and its tables.

The file contains the SHA-256 of the run, of the last line in metrics.jsonl and of the model, and under `sha256` the
hash of all other fields.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from rich.table import Table
from typing_extensions import TypedDict

from raylt.core.report import (
    FIGURES,
    POOLED,
    SHARED,
    SHARES,
    Count,
    Fraction,
    ReportDict,
    RoundReport,
    Seconds,
    Sha256,
    Share,
    Spread,
    shown_figure,
)
from raylt.data.task import JudgedImages
from raylt.errors import CheckpointError, count_of, first_names
from raylt.formatting import interval_text, percent, size, with_images
from raylt.metrics import FEW_SAMPLES, LOCAL, client_figures
from raylt.runs.folder.metrics_log import Lines
from raylt.runs.folder.provenance import SCHEMA
from raylt.store import Folder
from raylt.typed_json import as_json, check_json, closed, hash_json, parse_json

if TYPE_CHECKING:
    from raylt.core.checkpoint.checkpoint import Seal

FILE = "summary.json"
MODEL = "model.safetensors"
SHOWN = {"accuracy": "balanced test set", "local": "own test images", "matched": "own class mix"}
MAX_NAMED_CLIENTS = 5  # number of clients that a row of the table names
# Figures that earlier versions did not write, in the order in which they were added.
ADDED = (*SHARES, "tests", "shown", "answers")
TROUBLES = ("lost", "retried", "rejected")
SERVER_DEATHS = "server_deaths"
Groups = dict[str, Share]


class _Accuracy(BaseModel):
    """The summary's accuracies of the deployed model."""

    model_config = ConfigDict(extra="forbid")

    last: Annotated[Fraction, Field(description="After the last step.")]
    last10: Annotated[
        Fraction, Field(description="Mean of the last ten evaluated rounds, or of all if there are fewer.")
    ]
    last10_values: Annotated[Count | None, Field(description="Number of rounds in that mean.")] = None
    best: Annotated[Fraction, Field(description="The best round on the test set.")]


class _Shown(BaseModel):
    """The summary's main figure: its values over all rounds with an evaluation."""

    model_config = ConfigDict(extra="forbid")

    figure: Annotated[Literal["accuracy", "local", "matched"], Field(description="Name of the figure.")]
    last: Fraction
    last10: Fraction
    best: Fraction
    before_finish: Share


class _Clients(BaseModel):
    """The summary's figures over clients, on each client's own class mix.

    `by` maps the name of each figure to its mean and worst tenth over clients.
    """

    model_config = ConfigDict(extra="forbid")

    mean: Share
    worst_decile: Share
    pooled: Annotated[
        Share, Field(description="Accuracy over the own test images of all clients, each image counting once.")
    ] = None
    by: dict[str, Spread]
    sampled: Annotated[dict[str, Any] | None, Field(description="Clients that took part in some round.")] = None
    never_sampled: Annotated[dict[str, Any] | None, Field(description="Clients that took part in no round.")] = None


@closed
class _Bytes(TypedDict):
    up: Count
    down: Count


class _SummaryFields(BaseModel):
    """The fields of a finished run's summary.json.

    Shares are in [0, 1], sizes in bytes, times in seconds.
    """

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(alias="schema", description="Version of the format.")]
    date: Annotated[str, Field(description="End of the run, UTC.")]
    made: Annotated[dict[str, Any], Field(description="Provenance of the last process, see provenance.py.")]
    method: str
    split_sha256: Sha256
    model_sha256: Sha256
    task: str
    rounds: Count
    accuracy: _Accuracy
    shown: Annotated[_Shown | None, Field(description="The run's main figure.")] = None
    before_finish: Annotated[Share, Field(description="Accuracy after the last round, if a phase follows.")]
    groups: Groups
    groups_before_finish: Groups | None
    clients: _Clients
    others: Annotated[dict[str, dict[str, Any]], Field(description="Figures of a client's other models, by name.")]
    quality: Annotated[dict[str, Share] | None, Field(description="Quality of the global model's scores.")] = None
    answers: Annotated[
        str | None, Field(description="Test images that the global model classifies correctly, as base64 of bits.")
    ] = None
    tests: Annotated[
        JudgedImages | None, Field(description="Test images behind the figures, and thresholds of the groups.")
    ] = None
    bytes: _Bytes
    seconds: Seconds
    seconds_per_round: Seconds
    figures: Annotated[dict[str, Any], Field(description="Figures that the method reports in its last step.")]
    troubles: Annotated[
        dict[str, Count], Field(description="Calls retried, clients lost, replies rejected, deaths of the server.")
    ]
    privacy: Annotated[
        dict[str, Any] | None, Field(description="Guarantee for the uploads with noise, and what it does not cover.")
    ] = None
    run: Annotated[Sha256, Field(description="SHA-256 of the run, in identity.json.")]
    line: Annotated[Sha256, Field(description="SHA-256 of the last line of metrics.jsonl.")]
    provenance: Annotated[Sha256 | None, Field(description="SHA-256 of the last line of provenance.jsonl.")] = None
    sha256: Annotated[Sha256, Field(description="SHA-256 of all other fields, as JSON with sorted keys.")]


def _repeated_figures() -> Iterator[tuple[str, Any]]:
    """Yield pydantic field definitions for the summary's fields that repeat a figure of the last step."""
    for name in SHARES:
        if name != "accuracy":
            annotation = RoundReport.model_fields[name].annotation
            yield name, (annotation, Field(default=None, description=FIGURES[name].title))


Summary: type[BaseModel] = create_model(
    "Summary", __base__=_SummaryFields, __doc__=_SummaryFields.__doc__, **dict(_repeated_figures())
)
_SUMMARY = TypeAdapter(Summary)


def summarise(
    reports: list[ReportDict], method: str, split_sha256: str, tests: JudgedImages | None, model: dict[str, str]
) -> dict[str, Any]:
    """Compute the content of summary.json.

    Args:
        reports: Lines of metrics.jsonl, oldest first; the last one has an accuracy.
        method: Name of the method.
        split_sha256: Hash of the split.
        tests: Numbers of test images; None if unknown.
        model: Fields that `Experiment.export_model` returned.
    """
    rounds = [report for report in reports if report["phase"] == "round"]
    final = reports[-1]
    steps = rounds or [final]  # a run without rounds has one step
    curve = [report["accuracy"] for report in steps if report["accuracy"] is not None]
    last10 = curve[-10:]
    before_finish = rounds[-1] if rounds and final["phase"] == "finish" else {}
    budgets = [report["figures"]["privacy"] for report in reports if "privacy" in report["figures"]]
    traffic = [calls for report in reports for calls in report["traffic"].values()]
    return {
        "method": method,
        "split_sha256": split_sha256,
        "rounds": len(rounds),
        "accuracy": {
            "last": final["accuracy"],
            "last10": sum(last10) / len(last10),
            "last10_values": len(last10),
            "best": max([*curve, final["accuracy"]]),
        },
        **{name: final[name] for name in POOLED if name != "accuracy"},
        "shown": _shown(reports),
        "before_finish": before_finish.get("accuracy"),
        "groups_before_finish": before_finish.get("groups"),
        **{name: final[name] for name in SHARED},
        "quality": final["quality"],
        "answers": final["answers"],
        "tests": tests,
        "groups": final["groups"],
        "clients": final["clients"]["matched"]
        | {"pooled": _pooled(final["by_client"], tests), "by": final["clients"]}
        | _by_participation(reports),
        "others": {
            name: {key: value for key, value in figures.items() if key != "by_client"}
            for name, figures in (final["others"] or {}).items()
        },
        "bytes": {"up": sum(calls["up"] for calls in traffic), "down": sum(calls["down"] for calls in traffic)},
        "seconds": sum(report["seconds"] + report["evaluation_seconds"] for report in reports),
        "seconds_per_round": sum(report["seconds"] for report in steps) / len(steps),
        "figures": final["figures"],
        "troubles": {kind: sum(len(report[kind]) for report in reports) for kind in TROUBLES} | {SERVER_DEATHS: 0},
        **({"privacy": budgets[-1]} if budgets else {}),
        **model,
    }


def _shown(reports: list[ReportDict]) -> dict[str, Any]:
    """Return the main figure's last value, best value, mean of the last ten, and value before the final phase."""
    name, last = shown_figure(reports[-1])
    rounds = [report for report in reports if report["phase"] == "round"]
    values = [value for kind, value in map(shown_figure, rounds) if kind == name and value is not None]
    before = shown_figure(rounds[-1])[1] if rounds and reports[-1]["phase"] == "finish" else None
    assert last is not None
    return {
        "figure": name,
        "last": last,
        "last10": sum(values[-10:]) / len(values[-10:]) if values else last,
        "best": max([*values, last]),
        "before_finish": before,
    }


def _pooled(by_client: dict[str, list[float | None]], tests: JudgedImages | None) -> float | None:
    """Return the accuracy over the pooled test images of all clients, or None if clients have none."""
    if tests is None or tests["own"] is None or LOCAL not in by_client:
        return None
    judged = [(value, n) for value, n in zip(by_client[LOCAL], tests["own"], strict=True) if value is not None]
    return sum(value * n for value, n in judged) / sum(n for _, n in judged) if judged else None


def _by_participation(reports: list[ReportDict]) -> dict[str, dict[str, Any] | None]:
    """Return the figures of clients that trained in at least one round, and of clients that never trained.

    A group without clients is None.
    """
    participants = {id for report in reports for id in report["participants"]}
    by_client: dict[str, list[float | None]] = reports[-1]["by_client"]
    clients = range(len(next(iter(by_client.values()))))
    return {
        "sampled": _figures_of([id for id in clients if id in participants], by_client),
        "never_sampled": _figures_of([id for id in clients if id not in participants], by_client),
    }


def _figures_of(ids: list[int], by_client: dict[str, list[float | None]]) -> dict[str, Any] | None:
    judged = {kind: [values[id] for id in ids if values[id] is not None] for kind, values in by_client.items()}
    count = len(judged["matched"])
    return {"count": count, **client_figures(judged)} if count else None


def seal(summary: dict[str, Any], of: "Seal") -> dict[str, Any]:
    """Return a summary with the hashes that link it to its run, and a hash over the summary itself."""
    content = json.loads(json.dumps({**summary, "run": of.run, "line": of.line}))
    return {**content, "sha256": hash_json(content)}


def write(folder: Folder, summary: dict[str, Any]) -> None:
    """Write summary.json into a run folder."""
    folder.write(FILE, json.dumps(summary, indent=2) + "\n")


def read_summary(folder: Folder, lines: Lines) -> dict[str, Any]:
    """Read the summary of a finished run.

    Args:
        folder: The run folder.
        lines: Lines of its metrics.jsonl.

    Raises:
        CheckpointError: The file was changed, or belongs to another run.
    """
    path = folder.path / FILE
    summary: dict[str, Any] = parse_json(folder.read(FILE), str(path))
    check_json(summary, _SUMMARY, str(path))
    if summary["schema"] != SCHEMA:
        raise _changed(f"{path}: the schema is {summary['schema']}, but this raylt reads {SCHEMA}. Run it again.", path)
    if summary["sha256"] != hash_json({key: value for key, value in summary.items() if key != "sha256"}):
        raise _changed(f"{path}: the file was changed after the run ended. Put the original back.", path)
    if summary["run"] != lines.root:
        raise _changed(
            f"{path}: the file belongs to another run ({summary['run'][:12]}, this one is {lines.root[:12]}). Put the "
            "run's own file back.",
            path,
        )
    if summary["line"] != lines.head() or lines.torn:
        raise _changed(
            f"{path}: metrics.jsonl does not end with the line that the run ended with. Put the original back.", path
        )
    for name in ADDED:
        summary.setdefault(name, None)  # a figure that was added after the run ended
    return summary


def check_figures(summary: dict[str, Any], where: str) -> None:
    """Check the fields of a summary that was recorded without hashes.

    Fields may be missing in older summaries.

    Raises:
        CheckpointError: A field has a wrong type or range. The message names it.
    """
    hashes = dict.fromkeys(("run", "line", "sha256"), "0" * 64)
    as_json(json.dumps({"others": {}, **hashes, **summary}), _SUMMARY, where)


def _changed(message: str, path: Path) -> CheckpointError:
    return CheckpointError(message, code="run.changed", path=str(path))


def table_of(summary: dict[str, Any]) -> Table:
    """Return the summary of a run as a table, with accuracies in percent."""
    table = Table(show_header=False, title=f"{summary['method']}, rounds: {summary['rounds']}", title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for rows in (_accuracy_rows, _client_rows, _cost_rows):
        for name, value in rows(summary):
            table.add_row(name, value)
    return table


def _accuracy_rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    accuracy, by_kind = summary["accuracy"], summary["clients"]["by"]
    tests = summary.get("tests")
    if local := by_kind.get(LOCAL):
        yield from _own_rows(local, summary, tests)
    shown = summary.get("shown") or {"figure": "accuracy", "before_finish": summary["before_finish"], **accuracy}
    if shown["figure"] == "accuracy":
        yield "accuracy, last", with_images(shown["last"], tests and tests["images"], summary["task"])
    else:
        yield "accuracy, last", f"{percent(shown['last'])} (own models, {SHOWN[shown['figure']]})"
        yield "  over all classes", with_images(accuracy["last"], tests and tests["images"], summary["task"])
    if shown["before_finish"] is not None:
        yield "accuracy, before the last phase", percent(shown["before_finish"])
    yield _last10_title(accuracy.get("last10_values")), percent(shown["last10"])
    yield "accuracy, best", percent(shown["best"])
    if summary["task"] == "segmentation":
        yield "mIoU, mAcc", f"{percent(summary['miou'])}, {percent(summary['macro'])}"
        yield (
            "global model: mIoU, mAcc, aAcc",
            ", ".join(percent(summary[f"global_{name}"]) for name in ("miou", "macro", "accuracy")),
        )
        yield "clients' mIoU, mean (own classes)", percent(by_kind["miou"]["mean"])
    yield "many / medium / few", _percents(summary["groups"])
    if summary["groups_before_finish"] is not None:
        yield "many / medium / few, before it", _percents(summary["groups_before_finish"])
    if tests:
        low, high = tests["thresholds"]
        unit = "pixels" if summary["task"] == "segmentation" else "images"
        tested = " / ".join(map(str, tests["groups"].values()))
        yield f"  training {unit} of a class; n", f"> {high} / {low} to {high} / < {low}; {tested}"
        if unit == "images" and (intervals := _intervals(summary["groups"], tests["groups"])):
            yield "  95 % intervals", intervals


def _own_rows(local: Spread, summary: dict[str, Any], tests: JudgedImages | None) -> Iterator[tuple[str, str]]:
    """Yield the table's rows on clients' own test images, with the numbers of images if they were recorded."""
    pooled = summary["clients"].get("pooled")
    sizes = [n for n in (tests and tests["own"]) or () if n]
    counted = f" ({count_of(len(sizes), 'client')}, {min(sizes)} to {max(sizes)} images each)" if sizes else ""
    yield "clients, mean (own test images)", percent(local["mean"]) + counted
    if pooled is not None:
        yield "  all these images together", with_images(pooled, sum(sizes), summary["task"])
    yield "  worst decile", percent(local["worst_decile"])


def _intervals(groups: Groups, tested: dict[str, int]) -> str:
    """Return, as text, confidence intervals for the accuracies of class groups with few test images.

    The text is empty if there is no such group.
    """
    few = {name: n for name, n in tested.items() if 0 < n < FEW_SAMPLES and groups[name] is not None}
    texts = ["-" if name not in few else interval_text(groups[name] or 0.0, few[name]) for name in groups]
    return " / ".join(texts) if few else ""


def _client_rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    clients = summary["clients"]
    yield "clients, mean (own class mix)", percent(clients["mean"])
    yield "clients, worst decile", percent(clients["worst_decile"])
    if alone := (summary.get("tests") or {}).get("one_class"):
        names = first_names(alone, MAX_NAMED_CLIENTS)
        yield "clients evaluated on one class", f"{len(alone)}, whose figures say nothing: {names}"
    if quality := summary.get("quality"):
        values = (quality["auc"], quality["calibration_error"])
        yield "global model: AUC, calibration error", ", ".join("-" if v is None else f"{v:.4f}" for v in values)
    if (start := summary["figures"].get("zero_shot")) is not None:
        yield "before training (zero-shot)", percent(start["accuracy"])
        yield "  many / medium / few", _percents({group: start[group] for group in summary["groups"]})
    for name, figures in summary["others"].items():
        yield f"clients' own models, {name}", percent(figures["clients"]["matched"]["mean"])
    if "privacy" in summary:
        budget = summary["privacy"]
        excluded = budget["not_covered"].partition(":")[0]
        yield "epsilon, delta", f"{budget['epsilon']:g}, {budget['delta']:g} for {budget['unit']}; without {excluded}"
    groups = clients["sampled"], clients["never_sampled"]
    if all(groups):
        yield (
            "clients, ever / never sampled",
            " / ".join(f"{percent(group['matched']['mean'])} ({group['count']})" for group in groups),
        )
    if (new := summary["figures"].get("new_clients")) is not None:
        yield "new clients, mean (own class mix)", f"{percent(new['matched'])} ({new['count']})"


def _cost_rows(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "bytes up / down", f"{size(summary['bytes']['up'])} / {size(summary['bytes']['down'])}"
    yield "seconds per round", f"{summary['seconds_per_round']:.2f}"
    troubles = [f"{count} {kind}" for kind in TROUBLES if (count := summary["troubles"].get(kind))]
    if troubles:
        yield "client calls", ", ".join(troubles)
    if deaths := summary["troubles"].get(SERVER_DEATHS):
        yield "server's process died", f"{deaths} times" if deaths > 1 else "once"
    for name, value in summary["figures"].items():
        if isinstance(value, str):  # a remark on how to read the result
            yield name, value
    yield "split sha256", summary["split_sha256"][:16]
    yield "model sha256", summary["model_sha256"][:16]


def _last10_title(values: int | None) -> str:
    if values in (None, 10):
        return "accuracy, mean of the last 10"
    return "accuracy, the one evaluated round" if values == 1 else f"accuracy, mean of all {values} evaluated rounds"


def _percents(groups: dict[str, float | None]) -> str:
    return " / ".join(percent(value) for value in groups.values())
