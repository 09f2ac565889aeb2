"""Plot of figures over rounds, bytes or seconds, as means over seeds with intervals (`raylt plot curves`).

The picture has its final size: one column of a two-column page (3.35 inches), or the full page width if a row has three
panels or more. Text has at least 7 points at this size. Arms differ in colour, dash and marker, so that they can be
distinguished in greyscale and by colour-blind readers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

from raylt.errors import ConfigError, count_of
from raylt.metrics import GROUPS
from raylt.plots.style import COLOURS, DASHES, MARKERS, new_figure, plain_text, save_if_asked, style_axes
from raylt.studies.analysis.measures import FINISH, by_step, measure_of
from raylt.studies.analysis.statistics import mean_interval
from raylt.studies.records.record import RunRecord
from raylt.studies.report.comparison_tables import Spread
from raylt.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Over = Literal["rounds", "bytes", "seconds"]
COLUMN, PAGE = 3.35, 6.9  # widths in inches
SMALL, TEXT = 7, 8  # font sizes in points
MARKERS_PER_LINE = 8  # approximate number, without the last marker
# Panel titles, by measure.
TITLES = {
    "accuracy": "accuracy",
    "many": "many-shot",
    "medium": "medium-shot",
    "few": "few-shot",
    "local": "own test images",
    "matched": "own class mix",
    "owned": "owned classes",
    "clients": "all classes, by client",
    "worst_decile": "worst tenth, class mix",
}
AXES: dict[Over, str] = {"rounds": "round", "bytes": "MiB sent and received", "seconds": "seconds"}


@dataclass(frozen=True)
class ArmCurve:
    """The curve of one arm in one cell, over the steps that all its runs evaluated.

    Attributes:
        x: Mean over the seeds of rounds, MiB or seconds.
        mean: Means over the seeds, in percent.
        low, high: Bounds of the band, in percent; None for a single seed.
        finish: Whether the last step is the method's last phase instead of a round.
        seeds: Number of runs.
    """

    arm: str
    x: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None
    finish: bool
    seeds: int


def draw_curves(
    study: Study,
    measures: Sequence[str] = (),
    over: Over = "rounds",
    spread: Spread = "interval",
    path: "Path | str | None" = None,
    level: float = 0.95,
    mix_versions: bool = False,
) -> "Figure":
    """Draw the curves of a study's arms: a panel per measure, and a row of panels per cell.

    Args:
        study: The study; only its finished runs are drawn.
        measures: Measures to draw, from `TITLES`. By default the main figure of clients' own models if there are any,
            the accuracy, and the class groups with test images.
        over: Unit of the horizontal axis.
        spread: Meaning of the bands: the t interval of the mean, or one standard deviation over the seeds.
        path: File to save the picture to: .pdf, .svg or .png.
        level: Confidence of the intervals.
        mix_versions: Whether runs of several versions of the code may be compared.

    Raises:
        ConfigError: A measure is not computed in each round, fewer than two steps were evaluated, or the file cannot be
            written.
        CheckpointError: Runs of one cell and seed differ in split, budget, optimiser, evaluation or code.
    """
    study.check_comparable(mix_versions)
    done = [record for record in study.records if record.state == "done"]
    names = list(measures) or _judged_measures(done)
    for name in names:
        if _key(name) is None:
            raise ConfigError(
                f"measure: is computed only after the last round ({name}). Give one of {', '.join(TITLES)}.",
                code="config.conflict",
                key="measure",
                value=name,
            )
    arms = list(dict.fromkeys(record.arm for record in study.records))
    cells = list(dict.fromkeys(record.cell for record in done))
    curves = {
        (cell, name): [curve for arm in arms if (curve := _curve(done, cell, arm, name, over, spread, level))]
        for cell in cells
        for name in names
    }
    if not any(len(curve.x) > 1 for panel in curves.values() for curve in panel):
        raise ConfigError(
            f"{study.definition.name}: fewer than two steps were evaluated in all runs of an arm. Finish the runs, "
            "which need two rounds or more, and set evaluation.every, or evaluation.personal for clients' own models.",
            code="study.no-figure",
            name=study.definition.name,
        )
    figure = _figure(curves, cells, names, arms, over)
    return save_if_asked(figure, path)


def caption(study: Study, spread: Spread = "interval", level: float = 0.95) -> str:
    """Return a caption for `draw_curves` that explains means, bands, seeds and test images, and counts other runs."""
    done = [record for record in study.records if record.state == "done"]
    counts = dict.fromkeys(dict.fromkeys((record.cell, record.arm) for record in done), 0)
    for record in done:
        counts[record.cell, record.arm] += 1
    least, most = min(counts.values()), max(counts.values())
    seeds = count_of(least, "seed") if least == most else f"{least} to {most} seeds"
    text = f"Lines: means over {seeds}."
    if most > 1:
        band = f"{100 * level:g} % t intervals" if spread == "interval" else "one standard deviation of the seeds"
        text += f" Bands and error bars: {band}."
    if any(record.steps > record.rounds for record in done):
        text += " Last marker behind a dotted line: after the method's last phase."
    left_out = Counter(
        (record.arm, "diverged" if record.diverged else record.state)
        for record in study.records
        if record.state != "done"
    )
    if left_out:
        runs = [f"{arm}: {count_of(count, f'{state} run')}" for (arm, state), count in left_out.items()]
        text += f" Not drawn: {', '.join(runs)}."
    images = _test_images(done)
    if len(set(images.values())) == 1:
        text += f" Test images: {next(iter(images.values()))}."
    elif images:
        text += f" Test images: {'; '.join(f'{cell}: {counts}' for cell, counts in images.items())}."
    return text


def _test_images(done: Sequence[RunRecord]) -> dict[str, str]:
    """Return the numbers of test images by cell, such as "300 (150 many, 150 medium)", where they are recorded."""
    images: dict[str, str] = {}
    for record in done:
        tests = (record.summary or {}).get("tests")
        if tests:
            groups = ", ".join(f"{n} {group}" for group, n in tests["groups"].items() if n)
            images.setdefault(record.cell, f"{tests['images']} ({groups})")
    return images


def _judged_measures(done: Sequence[RunRecord]) -> list[str]:
    """Return the measures to draw by default: accuracy, and others for which the finished runs have values."""
    shown = {((record.summary or {}).get("shown") or {}).get("figure") for record in done}
    own = [name for name in ("local", "matched") if name in shown]
    return [*own, "accuracy", *(g for g in GROUPS if any(v is not None for r in done for v in r.curve.get(g, ())))]


def _key(measure: str) -> str | None:
    """Return the key under which a record stores a measure's curve; None if the measure has no curve."""
    definition = measure_of(measure)
    return definition.curve or definition.every_round


def _curve(
    done: Sequence[RunRecord], cell: str, arm: str, measure: str, over: Over, spread: Spread, level: float
) -> ArmCurve | None:
    """Return the curve of an arm in a cell, or None if no step was evaluated in all of the arm's runs."""
    runs = [record for record in done if (record.cell, record.arm) == (cell, arm)]
    key = _key(measure)
    assert key is not None
    values = [by_step(run, run.curve.get(key, [None] * run.steps)) for run in runs]
    steps = [step for step in (values[0] if values else ()) if all(each.get(step) is not None for each in values)]
    if not steps:
        return None
    places = [by_step(run, _places(run, over)) for run in runs]
    columns = [[100 * float(each[step]) for each in values] for step in steps]
    bands = [_band(column, spread, level) for column in columns]
    return ArmCurve(
        arm,
        [fmean(each[step] for each in places) for step in steps],
        [fmean(column) for column in columns],
        [low for low, _ in bands] if len(runs) > 1 else None,
        [high for _, high in bands] if len(runs) > 1 else None,
        steps[-1] == FINISH,
        len(runs),
    )


def _places(run: RunRecord, over: Over) -> list[float]:
    """Return the horizontal position of each step of a run, in rounds, MiB or seconds."""
    if over == "bytes":
        return [(up + down) / 2**20 for up, down in zip(run.curve["up"], run.curve["down"], strict=True)]
    return run.curve["step" if over == "rounds" else "seconds"]


def _band(values: Sequence[float], spread: Spread, level: float) -> tuple[float, float]:
    """Return the lower and upper end of the band at a step, within 0 and 100 %."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, mean
    if spread == "sd":
        half = stdev(values)
    else:
        interval = mean_interval(list(values), level)
        half = (interval.high if interval.high is not None else mean) - mean
    return max(0.0, mean - half), min(100.0, mean + half)


def _figure(
    curves: dict[tuple[str, str], list[ArmCurve]],
    cells: Sequence[str],
    names: Sequence[str],
    arms: Sequence[str],
    over: Over,
) -> "Figure":
    """Draw a figure with a row of panels per cell; a single cell has two panels in a row."""
    from matplotlib.ticker import MaxNLocator

    panels = [(cell, name) for cell in cells for name in names]
    columns = min(2, len(names)) if len(cells) == 1 else len(names)
    rows = -(-len(panels) // columns)
    width = COLUMN if columns <= 2 else PAGE
    drawn = [arm for arm in arms if any(curve.arm == arm for panel in curves.values() for curve in panel)]
    legend_columns = _legend_columns(drawn, width)
    tall = 2.1 if columns == 1 else 1.45
    figure = new_figure(width, min(40.0, rows * tall + 0.35 + 0.16 * -(-len(drawn) // legend_columns)), dpi=300)
    axes = figure.subplots(rows, columns, squeeze=False, sharex="row" if len(cells) > 1 else True)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (cell, name) in zip(axes.flat, panels, strict=False):
        for curve in curves[cell, name]:
            _draw(ax, curve, arms.index(curve.arm))
        if curves[cell, name]:
            _limit(ax, curves[cell, name])
        else:
            _say_empty(ax, name)
        if over == "rounds":
            ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
        words = TITLES[name]
        ax.set_title(plain_text(f"{words}, {cell}" if len(cells) > 1 else words), fontsize=TEXT, pad=3)
        ax.tick_params(labelsize=SMALL, length=2, pad=2)
        style_axes(ax)
        ax.set_axisbelow(True)
    for ax in axes[-1]:
        ax.set_xlabel(AXES[over], fontsize=TEXT)
    figure.supylabel("accuracy / %", fontsize=TEXT)
    handles = {line.get_label(): line for ax in axes.flat for line in ax.lines if line.get_label() in _labels(drawn)}
    figure.legend(
        [handles[label] for label in _labels(drawn)],
        _labels(drawn),
        loc="outside lower center",
        ncols=legend_columns,
        frameon=False,
        fontsize=SMALL,
        handlelength=2.6,
        columnspacing=1.2,
        borderpad=0.2,
    )
    return figure


def _labels(arms: Sequence[str]) -> list[str]:
    return [plain_text(arm) for arm in arms]


def _legend_columns(arms: Sequence[str], width: float) -> int:
    """Return the number of legend entries that fit in a row of the given width in inches.

    A character takes about 0.055 inches, and the line symbol of an entry 0.5 inches.
    """
    longest = max(map(len, arms), default=1)
    return max(1, min(len(arms), int(width / (0.5 + 0.055 * longest))))


def _draw(ax: "Axes", curve: ArmCurve, number: int) -> None:
    """Draw the band, line and markers of an arm. The phase after the last round is a dotted line."""
    colour = COLOURS[number % len(COLOURS)]
    dash = DASHES[number % len(DASHES)]
    marker = MARKERS[number % len(MARKERS)]
    rounds = len(curve.x) - curve.finish
    if curve.low is not None and curve.high is not None:
        ax.fill_between(
            curve.x[:rounds], curve.low[:rounds], curve.high[:rounds], color=colour, alpha=0.16, linewidth=0
        )
    if rounds == 1:  # a band of one point has no width
        ax.errorbar(
            curve.x[:1], curve.mean[:1], yerr=_errors(curve, 0), color=colour, fmt="none", elinewidth=0.9, zorder=2
        )
    every = max(1, -(-rounds // MARKERS_PER_LINE))
    first = number * every // 4 % every  # shifts the markers of lines that overlap
    ax.plot(
        curve.x[:rounds],
        curve.mean[:rounds],
        color=colour,
        linestyle=dash,
        linewidth=1.2,
        marker=marker,
        markersize=3.2,
        markevery=(first, every),
        label=plain_text(curve.arm),
        zorder=3,
    )
    if not curve.finish:
        return
    if rounds:
        ax.plot(curve.x[-2:], curve.mean[-2:], color=colour, linestyle=":", linewidth=0.9, zorder=2)
    ax.errorbar(
        curve.x[-1:],
        curve.mean[-1:],
        yerr=_errors(curve, -1),
        color=colour,
        marker=marker,
        markersize=4.5,
        elinewidth=0.9,
        zorder=4,
    )


def _errors(curve: ArmCurve, step: int) -> list[list[float]] | None:
    """Return the lengths of a step's error bar below and above the mean; None for a single seed."""
    if curve.low is None or curve.high is None:
        return None
    return [[curve.mean[step] - curve.low[step]], [curve.high[step] - curve.mean[step]]]


def _say_empty(ax: "Axes", measure: str) -> None:
    """Write into a panel without curves that there is nothing to draw, in place of an axis without values."""
    text = f"no {TITLES[measure]} class" if measure in GROUPS else "not evaluated"
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=SMALL)
    ax.set_yticks([])


def _limit(ax: "Axes", panel: Sequence[ArmCurve]) -> None:
    """Set the vertical axis to the range of the means.

    Intervals are ignored, since with two or three seeds they may be larger than all differences.
    """
    means = [value for curve in panel for value in curve.mean]
    low, high = min(means), max(means)
    space = max(2.0, 0.25 * (high - low))
    top = min(102.5, high + space)
    ax.set_ylim(max(-2.5 * top / 102.5, low - space), top)  # leaves room for markers at 0 and 100, and no tick below 0
