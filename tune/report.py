"""What a search leaves behind: best.yaml, tables of its trials, and a picture."""

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from raylt.config import notation
from raylt.hyper import Choice, LogUniform
from raylt.runs.files import Files
from raylt.runs.summary import percent
from raylt.store import Folder
from tune.axes import Axis, Grid
from tune.plan import Plan, State
from tune.record import Record

PAPER, INK, MUTED = "#ffffff", "#1f2430", "#8a8f9c"
COLOURS = ("#2f5d8a", "#c4622d", "#4f7f52", "#86548f", "#a08a2c", "#3d8f93")


def write(folder: Path, plan: Plan, state: State) -> None:
    """Writes all of it; best.yaml only when a trial came to its end."""
    rows = [row(record) for record in state.trials]
    columns = list(dict.fromkeys(key for its in rows for key in its))
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    best = state.best()
    with Folder.open(folder) as here:
        here.write("trials.csv", text.getvalue())
        here.write("trials.json", json.dumps(
            [its | {"points": [asdict(p) for p in record.counted]}
             for its, record in zip(rows, state.trials, strict=True)], indent=1) + "\n")
        if best is not None:
            here.write("best.yaml", best_yaml(folder, plan, best))
            here.write("search.png", draw(plan, state))


def row(record: Record) -> dict[str, Any]:
    """A trial as one flat mapping; scores and figures are those of its outcome."""
    outcome, judged = record.outcome, record.judged
    return {
        "trial": record.id, "method": record.method, "state": outcome.state if outcome else "open",
        "score": outcome.score if outcome else None, "round": outcome.step if outcome else None,
        "client_steps": record.spent, **record.values,
        **{f"validation_{key}": value for key, value in (judged.validation if judged else {}).items()},
        **{f"test_{key}": value for key, value in (judged.test if judged else {}).items()},
        "failed": record.failed,
    }


def best_yaml(folder: Path, plan: Plan, best: Record) -> str:
    """The configuration with the figures that `raylt run best.yaml` will give."""
    judged, summary = best.judged, Files(folder / "trials" / best.id).summary()
    assert judged is not None
    share = best.config.data.validation
    head = [
        f"raylt run {folder / 'best.yaml'}",
        f"gives the figures of trial {best.id}: test accuracy {percent(summary['accuracy']['last'])}, model sha256 "
        f"{summary['model_sha256'][:16]}.",
        f"It was chosen for {plan.metric} {percent(judged.score)} on {share:g} of the training samples, which no",
        "client has here either; train on all of them with data.validation=0.",
    ]
    body = notation.write(best.config.model_dump(mode="json"))
    return "".join(f"# {line}\n" for line in head) + body


def table_of(plan: Plan, state: State, most: int = 20) -> Table:
    """The trials as a person reads them, best first; accuracies in percent."""
    keys = list(dict.fromkeys(key for space in plan.spaces.values() for key in space))
    last = [key.rpartition(".")[2] for key in keys]
    heads = [key if last.count(its) > 1 else its for key, its in zip(keys, last, strict=True)]
    table = Table(title=f"{len(state.trials)} trials, best first; percent: {plan.metric} on validation samples, "
                  "accuracy on the test set", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                  show_edge=False)
    for head in ("trial", "state", "round", plan.metric, "test", "client-steps", *heads):
        table.add_column(head, no_wrap=True, justify="left" if head == "trial" else "right")
    order = {"done": 0, "stopped": 1, "failed": 2, "open": 3}
    rows = sorted(((row(r), r) for r in state.trials),
                  key=lambda pair: (order[pair[0]["state"]], -(pair[0]["round"] or 0), -(pair[0]["score"] or 0)))
    best = state.best()
    for its, record in rows[:most]:
        cells = [its["trial"], its["state"], str(its["round"] or "-"), _percent(its["score"]),
                 _percent(its.get("test_accuracy")), f"{its['client_steps']:,}",
                 *(_text(its.get(key)) for key in keys)]
        table.add_row(*cells, style="bold" if record is best else None)
    if len(rows) > most:
        table.add_row(f"... {len(rows) - most} more in trials.csv")
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def draw(plan: Plan, state: State) -> bytes:
    """A PNG: score against client-steps, then one slice per searched setting; stopped trials are hollow."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # without pyplot: no global state, no display
    from matplotlib.figure import Figure

    # methods may have fields of one name and other ranges: each range has a slice of its own
    slices = list(dict.fromkeys((key, axis) for space in plan.spaces.values() for key, axis in space.items()))
    columns = min(3, max(1, len(slices)))
    lines = -(-len(slices) // columns)
    figure = Figure(figsize=(3.4 * max(columns, 2) + 0.6, 3.6 + 2.6 * lines), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(2, 1, height_ratios=[3.4, 2.6 * max(lines, 1)])
    upper, lower = parts
    colour = {method: COLOURS[i % len(COLOURS)] for i, method in enumerate(plan.methods)}
    best = state.best()
    _draw_courses(upper.add_subplot(), plan, state, colour, best)
    grid = lower.subplots(max(lines, 1), columns, sharey=True, squeeze=False)
    for place, panel in enumerate(grid.flat):
        if place >= len(slices):
            panel.set_visible(False)
            continue
        key, axis = slices[place]
        of = {method for method, space in plan.spaces.items() if space.get(key) == axis}
        _draw_slice(panel, key, axis, [record for record in state.trials if record.method in of], colour, best)
        if place % columns == 0:
            panel.set_ylabel(f"{plan.metric}, %")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130)
    return picture.getvalue()


def _draw_courses(panel: Any, plan: Plan, state: State, colour: dict[str, str], best: Record | None) -> None:
    for record in state.trials:
        points = [p for p in record.counted if p.kind != "proxy"]
        if not points:
            continue
        mine, ended = record is best, record.outcome is not None and record.outcome.state == "done"
        x, y = [p.steps for p in points], [100 * p.score for p in points]
        panel.plot(x, y, color=colour[record.method], linewidth=2.4 if mine else 1, alpha=1 if mine else 0.45,
                   zorder=3 if mine else 2)
        panel.plot(x[-1], y[-1], "o", markersize=7 if mine else 4.5, markeredgecolor=colour[record.method],
                   markerfacecolor=colour[record.method] if ended else PAPER, zorder=4)
        if mine:
            panel.annotate(f"{record.id}  {y[-1]:.1f} %", (x[-1], y[-1]), xytext=(0, 8), textcoords="offset points",
                           ha="right", color=INK, fontsize=9)
    panel.margins(y=0.12)
    panel.set_xlabel("client-steps of a trial")
    panel.set_ylabel(f"validation {plan.metric}, %")
    stopped = sum(r.outcome is not None and r.outcome.state == "stopped" for r in state.trials)
    panel.set_title(f"{len(state.trials)} trials, {stopped} of them stopped early (hollow)", loc="left", fontsize=10,
                    color=INK)
    if len(plan.methods) > 1:
        for method in plan.methods:
            panel.plot([], [], color=colour[method], label=method)
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    _plain(panel)


def _draw_slice(panel: Any, key: str, axis: Axis, records: list[Record], colour: dict[str, str],
                best: Record | None) -> None:
    discrete = isinstance(axis, Choice | Grid)
    for record in records:
        if key not in record.values or record.outcome is None or record.outcome.score is None:
            continue
        value = record.values[key]
        x = axis.values.index(value) if isinstance(axis, Choice | Grid) else value
        panel.plot(x, 100 * record.outcome.score, "o", markersize=8 if record is best else 5,
                   markeredgecolor=colour[record.method], zorder=3 if record is best else 2,
                   markerfacecolor=colour[record.method] if record.outcome.state == "done" else PAPER)
    if discrete:
        panel.set_xticks(range(len(axis.values)), [_text(v) for v in axis.values])
        panel.set_xlim(-0.5, len(axis.values) - 0.5)
    elif isinstance(axis, LogUniform):
        panel.set_xscale("log")
        middle = (axis.low * axis.high) ** 0.5
        panel.set_xticks([axis.low, middle, axis.high], [f"{v:.2g}" for v in (axis.low, middle, axis.high)])
        panel.minorticks_off()
    panel.set_xlabel(key)
    panel.margins(y=0.12)
    _plain(panel)


def _plain(panel: Any) -> None:
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
