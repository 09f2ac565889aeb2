"""Draws the scores of a search's trials, and their Pareto front by several metrics, as PNG files."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from raylt.errors import count_of
from raylt.hyper import Choice, LogUniform
from tune.plan import SearchPlan, SearchState
from tune.records import TrialRecord
from tune.report.pareto import pareto_front
from tune.space import Axis, Grid

PAPER, INK, MUTED = "#ffffff", "#1f2430", "#8a8f9c"
COLOURS = ("#2f5d8a", "#c4622d", "#4f7f52", "#86548f", "#a08a2c", "#3d8f93")


def draw(plan: SearchPlan, state: SearchState, shares: Mapping[str, Mapping[str, float]]) -> bytes:
    """Draw scores against client-steps and against each searched setting, as a PNG. Stopped trials are hollow.

    Args:
        plan: Settings of the search.
        state: The trials so far.
        shares: Importance of each setting by method; see tune/report/importance.py.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # Unlike pyplot, needs no global state and no display.
    from matplotlib.figure import Figure

    # methods may have different ranges for fields of the same name, so each range has its own panel
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
    panel.set_title(
        f"{count_of(len(state.trials), 'trial')}, {stopped} stopped early (hollow)", loc="left", fontsize=10, color=INK
    )
    if len(plan.methods) > 1:
        for method in plan.methods:
            panel.plot([], [], color=colour[method], label=method)
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    style_panel(panel)


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
        panel.set_xticks(range(len(axis.values)), [value_text(v) for v in axis.values])
        panel.set_xlim(-0.5, len(axis.values) - 0.5)
    elif isinstance(axis, LogUniform):
        panel.set_xscale("log")
        middle = (axis.low * axis.high) ** 0.5
        panel.set_xticks([axis.low, middle, axis.high], [f"{v:.2g}" for v in (axis.low, middle, axis.high)])
        panel.minorticks_off()
    panel.margins(y=0.12)
    style_panel(panel)


def style_panel(panel: Any) -> None:
    """Remove the box of a plot's panel and draw faint grid lines."""
    panel.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(MUTED)
    panel.tick_params(colors=MUTED, labelcolor=INK, labelsize=8)
    panel.xaxis.label.set(color=INK, size=9)
    panel.yaxis.label.set(color=INK, size=9)
    panel.grid(axis="y", color="#e6e8ec", linewidth=0.7)
    panel.set_axisbelow(True)


def draw_pareto(trials: Sequence[Mapping[str, Any]], metrics: Sequence[str], names: Sequence[str]) -> bytes:
    """Draw the first metric against each other one, in percent, with a labelled Pareto front; return a PNG.

    A step line joins the front of two metrics.

    Args:
        trials: Metrics of each trial by name. Trials without one of the metrics are not drawn.
        metrics: Names of two or more metrics.
        names: Names of the trials.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # Unlike pyplot, needs no global state and no display.
    from matplotlib.figure import Figure

    front = pareto_front(trials, metrics)
    first, *others = metrics
    figure = Figure(figsize=(6.4, 4.6 * len(others)), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    for number, other in enumerate(others):
        panel = figure.add_subplot(len(others), 1, number + 1)
        for index, trial in enumerate(trials):
            if index not in front and all(trial.get(name) is not None for name in metrics):
                panel.plot(100 * trial[first], 100 * trial[other], "o", color=MUTED, markersize=5, alpha=0.7)
        x = [100 * trials[index][first] for index in front]
        y = [100 * trials[index][other] for index in front]
        if len(others) == 1:
            panel.step(x, y, where="post", color=COLOURS[0], linewidth=1.4)
        panel.plot(x, y, "o", color=COLOURS[0], markersize=7)
        for index, left, height in zip(front, x, y, strict=True):
            panel.annotate(
                names[index], (left, height), xytext=(6, 6), textcoords="offset points", color=INK, fontsize=8
            )
        panel.margins(x=0.15, y=0.12)
        panel.set_xlabel(f"{first}, %")
        panel.set_ylabel(f"{other}, %")
        if number == 0:
            title = f"on the Pareto front: {len(front)} of {count_of(len(trials), 'trial')}"
            panel.set_title(title, loc="left", fontsize=10, color=INK)
        style_panel(panel)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130)
    return picture.getvalue()


def value_text(value: Any) -> str:
    """Format a setting's value for a table or a plot."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
