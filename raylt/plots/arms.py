"""Plot of a study's arms with means, intervals and the value of every seed (`raylt plot arms STUDY`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raylt.errors import ConfigError, spoken
from raylt.plots.style import COLOURS, INK, new_figure, plain_text, save_if_asked, style_axes
from raylt.studies.analysis.comparison import Comparison, Row
from raylt.studies.analysis.measures import measure_of
from raylt.studies.report.comparison_tables import scale, unit, within

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_arms(comparisons: Sequence[Comparison], path: Path | str | None = None) -> "Figure":
    """Draw dots and intervals of a study's arms: a column of panels per measure, a row per cell, a line per arm.

    Filled dots are means, lines are their t intervals, and open dots are seeds. Arms are sorted by their mean of the
    first measure in the first cell, with the best on top. An arm with one seed has no interval and so no line.

    Args:
        comparisons: Comparisons of the same records, one per measure.
        path: File to save the picture to.

    Raises:
        ConfigError: No finished run has the first measure, or the picture cannot be written.
    """
    rows = {
        (row.cell, row.arm, number): row for number, comparison in enumerate(comparisons) for row in comparison.rows
    }
    first = comparisons[0]
    cells = list(dict.fromkeys(row.cell for row in first.rows))
    if not cells:
        raise ConfigError(
            f"{spoken('--measure', 'measure')}: no finished run has this measure ({first.measure}). Give another, or "
            "finish a run.",
            code="study.no-figure",
            key="--measure",
            value=first.measure,
        )
    sign = 1 if measure_of(first.measure).higher else -1
    ordered = sorted((row for row in first.rows if row.cell == cells[0]), key=lambda row: sign * row.mean.estimate)
    arms = [row.arm for row in ordered]
    arms = [*(arm for arm in dict.fromkeys(row.arm for row in first.rows) if arm not in arms), *arms]
    height = 0.9 + len(cells) * (0.6 + 0.26 * len(arms))
    figure = new_figure(2.2 + 3.2 * len(comparisons), min(height, 40.0))
    panels = figure.subplots(len(cells), len(comparisons), sharey=True, squeeze=False, sharex="col")
    for column, comparison in enumerate(comparisons):
        measure = comparison.measure
        for line, cell in enumerate(cells):
            ax = panels[line][column]
            for height_of_arm, arm in enumerate(arms):
                row = rows.get((cell, arm, column))
                if row is not None:
                    _draw(ax, height_of_arm, row, measure, arm == comparison.reference)
            ax.set_title(plain_text(f"{cell}: {measure}" if len(cells) > 1 else measure), fontsize=10)
            ax.set_yticks(range(len(arms)), [plain_text(arm) for arm in arms], fontsize=9)
            ax.set_ylim(-0.7, len(arms) - 0.3)
            if line == len(cells) - 1:
                ax.set_xlabel(f"{measure_of(measure).what} / {unit(measure)}", fontsize=9)
            style_axes(ax, "both")
    counted = any(row.finished < len(row.values) for row in rows.values())
    guessing = "\ndiverged runs count as guessing, or as the worst finished run" if counted else ""
    figure.supxlabel(
        f"means with {100 * first.level:g} % t intervals; open: seeds; dotted: {plain_text(first.reference)}{guessing}",
        fontsize=9,
        color=INK,
    )
    return save_if_asked(figure, path)


def _draw(ax: "Axes", y: int, row: Row, measure: str, reference: bool) -> None:
    """Draw one arm at height y; for the reference arm, also draw a vertical line at the mean."""
    colour = COLOURS[0]
    factor = scale(measure)
    mean = factor * row.mean.estimate
    if reference:
        ax.axvline(mean, color=INK, linewidth=0.8, linestyle=":", zorder=1)
    if row.mean.low is not None and row.mean.high is not None:
        low, high = within(row.mean.low, row.mean.high, measure)
        ax.plot(
            [factor * low, factor * high],
            [y, y],
            color=colour,
            linewidth=2.2,
            zorder=2,
            solid_capstyle="butt",
        )
    ax.plot([mean], [y], "o", markersize=9, color=colour, zorder=3)
    ax.plot(
        [factor * value for value in row.values.values()],
        [y] * len(row.values),
        "o",
        markersize=3.2,
        markerfacecolor="white",
        markeredgecolor=INK,
        markeredgewidth=0.7,
        zorder=4,
    )
