"""Writes the results of a search: best.yaml, tables of its trials, and a plot."""

import csv
import hashlib
import io
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich import box
from rich.table import Table

from raylt.config import yaml_text
from raylt.errors import CheckpointError
from raylt.hyper import Choice, LogUniform
from raylt.registry import plugin_files
from raylt.runs.folder.reader import Files
from raylt.runs.folder.summary import percent
from raylt.store import Folder
from tune.importance import importance
from tune.plan import SearchPlan, SearchState
from tune.records import TrialRecord
from tune.space import Axis, Grid

SEAL = "seal.json"  # the hashes of the other files that `write` writes
PAPER, INK, MUTED = "#ffffff", "#1f2430", "#8a8f9c"
COLOURS = ("#2f5d8a", "#c4622d", "#4f7f52", "#86548f", "#a08a2c", "#3d8f93")


def write(folder: Path, plan: SearchPlan, state: SearchState) -> None:
    """Write the results of a search into its folder; best.yaml and the plot only if a trial has finished."""
    rows = [row(record) for record in state.trials]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    trials = []
    for cells, record in zip(rows, state.trials, strict=True):
        trials.append({**cells, "points": [score.to_json() for score in record.counted_scores]})
    files: dict[str, str | bytes] = {
        "trials.csv": text.getvalue(),
        "trials.json": json.dumps(trials, indent=1) + "\n",
    }
    best = state.best()
    shares = {method: importance(plan, state, method) for method in plan.methods}
    if best is not None:
        files["best.yaml"] = best_yaml(folder, plan, best)
        files["importance.json"] = json.dumps(shares, indent=1) + "\n"
        files["search.png"] = draw(plan, state, shares)
    with Folder.open(folder) as search_folder:
        for name, content in files.items():
            search_folder.write(name, content)
        search_folder.write(SEAL, json.dumps({name: _sha256(content) for name, content in files.items()}) + "\n")


def check_results(search_folder: Folder) -> str:
    """Check the results of a search against the hashes that `write` stored; return the names of the checked files.

    Raises:
        CheckpointError: a file is missing or was changed, or the hashes cannot be read.
    """
    seal = search_folder.path / SEAL
    try:
        hashes = TypeAdapter(dict[str, str]).validate_json(search_folder.read(SEAL))
    except ValidationError as error:
        raise CheckpointError(
            f"{seal}: cannot be read. Restore the original files.", code="search.changed", path=str(seal)
        ) from error
    for name, expected in hashes.items():
        if _sha256(search_folder.read(name)) != expected:
            raise CheckpointError(
                f"{search_folder.path / name}: the file was changed. Restore the original files.",
                code="search.changed",
                path=str(search_folder.path / name),
            )
    return ", ".join(hashes)


def _sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def row(record: TrialRecord) -> dict[str, Any]:
    """Return a trial as a flat mapping with its values, outcome and figures."""
    outcome = record.outcome
    deciding = record.deciding_score
    return {
        "trial": record.id,
        "method": record.method,
        "state": outcome.state if outcome else "open",
        "score": outcome.score if outcome else None,
        "round": outcome.step if outcome else None,
        "client_steps": record.spent,
        **record.values,
        **{f"validation_{key}": value for key, value in (deciding.validation if deciding else {}).items()},
        **{f"test_{key}": value for key, value in (deciding.test if deciding else {}).items()},
        "failed": record.failed,
    }


def best_yaml(folder: Path, plan: SearchPlan, best: TrialRecord) -> str:
    """Return the best configuration as YAML, with the figures to expect from `raylt run best.yaml` as a comment."""
    deciding = best.deciding_score
    summary = Files(folder / "trials" / best.id).summary()
    assert deciding is not None
    share = best.config.data.validation
    head = [
        run_command(folder),
        f"gives the figures of trial {best.id}: test accuracy {percent(summary['accuracy']['last'])}, model sha256 "
        f"{summary['model_sha256'][:16]}.",
        f"It was chosen for {plan.metric} {percent(deciding.value)} on {share:g} of the training samples, which no",
        "client has here either; train on all of them with data.validation=0.",
    ]
    body = yaml_text.write(best.config.model_dump(mode="json"))
    return "".join(f"# {line}\n" for line in head) + body


def run_command(folder: Path) -> str:
    """Return the command that runs the best configuration of a search, with this process's plugins."""
    plugins = [word for file in plugin_files() for word in ("--plugin", file)]
    return shlex.join(["raylt", "run", *plugins, str(folder / "best.yaml")])


def table_of(plan: SearchPlan, state: SearchState, most: int = 20) -> Table:
    """Return a table of the trials for the terminal, best trial first, with accuracies in percent.

    Args:
        most: rows at most.
    """
    keys = list(dict.fromkeys(key for space in plan.spaces.values() for key in space))
    short = [key.rpartition(".")[2] for key in keys]
    heads = [key if short.count(name) > 1 else name for key, name in zip(keys, short, strict=True)]
    table = Table(
        title=f"{len(state.trials)} trials, best first; percent: {plan.metric} on validation samples, "
        "accuracy on the test set",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for head in ("trial", "state", "round", plan.metric, "test", plan.unit, *heads):
        table.add_column(head, no_wrap=True, justify="left" if head == "trial" else "right")
    order = {"done": 0, "stopped": 1, "failed": 2, "open": 3}
    rows = sorted(
        ((row(r), r) for r in state.trials),
        key=lambda pair: (order[pair[0]["state"]], -(pair[0]["round"] or 0), -(pair[0]["score"] or 0)),
    )
    best = state.best()
    for cells, record in rows[:most]:
        texts = [
            cells["trial"],
            cells["state"],
            str(cells["round"] or "-"),
            _percent(cells["score"]),
            _percent(cells.get("test_accuracy")),
            f"{cells['client_steps']:,}",
            *(_text(cells.get(key)) for key in keys),
        ]
        table.add_row(*texts, style="bold" if record is best else None)
    if len(rows) > most:
        table.add_row(f"... {len(rows) - most} more in trials.csv")
    return table


def importance_lines(folder: Path) -> list[str]:
    """Return a line per method with the importance of its settings: each one's share of the scores' variance."""
    with Folder.open(folder) as search_folder:
        shares = json.loads(search_folder.read_text("importance.json"))
    return [
        f"importance for {method}: " + ", ".join(f"{key} {100 * share:.0f} %" for key, share in by_setting.items())
        for method, by_setting in shares.items()
        if by_setting
    ]


def draw(plan: SearchPlan, state: SearchState, shares: Mapping[str, Mapping[str, float]]) -> bytes:
    """Draw scores against client-steps and against each searched setting, as a PNG. Stopped trials are hollow.

    Args:
        shares: the importance of each setting by method, see tune/importance.py.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # without pyplot: no global state, no display
    from matplotlib.figure import Figure

    # fields of different methods may have the same name and other ranges, so each range has its own panel
    slices = list(dict.fromkeys((key, axis) for space in plan.spaces.values() for key, axis in space.items()))
    columns = min(3, max(1, len(slices)))
    lines = -(-len(slices) // columns)
    figure = Figure(figsize=(3.4 * max(columns, 2) + 0.6, 3.6 + 2.6 * lines), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    subfigures: Any = figure.subfigures(2, 1, height_ratios=[3.4, 2.6 * max(lines, 1)])
    upper, lower = subfigures
    colour = {method: COLOURS[i % len(COLOURS)] for i, method in enumerate(plan.methods)}
    best = state.best()
    _draw_scores(upper.add_subplot(), plan, state, colour, best)
    grid = lower.subplots(max(lines, 1), columns, sharey=True, squeeze=False)
    for number, panel in enumerate(grid.flat):
        if number >= len(slices):
            panel.set_visible(False)
            continue
        key, axis = slices[number]
        methods = {method for method, space in plan.spaces.items() if space.get(key) == axis}
        _draw_slice(panel, key, axis, [record for record in state.trials if record.method in methods], colour, best)
        percents = [f"{100 * shares[method][key]:.0f} %" for method in sorted(methods) if key in shares.get(method, {})]
        panel.set_xlabel(f"{key}   importance {', '.join(percents)}" if percents else key)
        if number % columns == 0:
            panel.set_ylabel(f"{plan.metric}, %")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130)
    return picture.getvalue()


def _draw_scores(
    panel: Any, plan: SearchPlan, state: SearchState, colour: dict[str, str], best: TrialRecord | None
) -> None:
    for record in state.trials:
        scores = [score for score in record.counted_scores if score.kind != "proxy"]
        if not scores:
            continue
        is_best = record is best
        done = record.outcome is not None and record.outcome.state == "done"
        x = [score.client_steps for score in scores]
        y = [100 * score.value for score in scores]
        panel.plot(
            x,
            y,
            color=colour[record.method],
            linewidth=2.4 if is_best else 1,
            alpha=1 if is_best else 0.45,
            zorder=3 if is_best else 2,
        )
        panel.plot(
            x[-1],
            y[-1],
            "o",
            markersize=7 if is_best else 4.5,
            markeredgecolor=colour[record.method],
            markerfacecolor=colour[record.method] if done else PAPER,
            zorder=4,
        )
        if is_best:
            panel.annotate(
                f"{record.id}  {y[-1]:.1f} %",
                (x[-1], y[-1]),
                xytext=(0, 8),
                textcoords="offset points",
                ha="right",
                color=INK,
                fontsize=9,
            )
    panel.margins(y=0.12)
    panel.set_xlabel(f"cost of a trial, {plan.unit}")
    panel.set_ylabel(f"validation {plan.metric}, %")
    stopped = sum(r.outcome is not None and r.outcome.state == "stopped" for r in state.trials)
    panel.set_title(f"{len(state.trials)} trials, {stopped} stopped early (hollow)", loc="left", fontsize=10, color=INK)
    if len(plan.methods) > 1:
        for method in plan.methods:
            panel.plot([], [], color=colour[method], label=method)
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    plain(panel)


def _draw_slice(
    panel: Any, key: str, axis: Axis, records: list[TrialRecord], colour: dict[str, str], best: TrialRecord | None
) -> None:
    discrete = isinstance(axis, Choice | Grid)
    for record in records:
        if key not in record.values or record.outcome is None or record.outcome.score is None:
            continue
        value = record.values[key]
        x = axis.values.index(value) if isinstance(axis, Choice | Grid) else value
        panel.plot(
            x,
            100 * record.outcome.score,
            "o",
            markersize=8 if record is best else 5,
            markeredgecolor=colour[record.method],
            zorder=3 if record is best else 2,
            markerfacecolor=colour[record.method] if record.outcome.state == "done" else PAPER,
        )
    if discrete:
        panel.set_xticks(range(len(axis.values)), [_text(v) for v in axis.values])
        panel.set_xlim(-0.5, len(axis.values) - 0.5)
    elif isinstance(axis, LogUniform):
        panel.set_xscale("log")
        middle = (axis.low * axis.high) ** 0.5
        panel.set_xticks([axis.low, middle, axis.high], [f"{v:.2g}" for v in (axis.low, middle, axis.high)])
        panel.minorticks_off()
    panel.margins(y=0.12)
    plain(panel)


def plain(panel: Any) -> None:
    """Remove the box of a plot's panel and draw faint grid lines."""
    panel.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(MUTED)
    panel.tick_params(colors=MUTED, labelcolor=INK, labelsize=8)
    panel.xaxis.label.set(color=INK, size=9)
    panel.yaxis.label.set(color=INK, size=9)
    panel.grid(axis="y", color="#e6e8ec", linewidth=0.7)
    panel.set_axisbelow(True)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"
