"""A study's arms side by side: means with their intervals, and every seed's value."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raylt.errors import ConfigError
from raylt.plots.style import COLOURS, INK, new_figure, plain, plain_text, save
from raylt.studies.comparison import Comparison, Row
from raylt.studies.measures import measure_of
from raylt.studies.tables import scale, unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_arms(comparisons: Sequence[Comparison], path: Path) -> Path:
    """Writes the `chart` of comparisons, and returns the picture's path.

    Raises:
        ConfigError: there is nothing to draw, or it cannot be written there.
    """
    return save(chart(comparisons), path)


def chart(comparisons: Sequence[Comparison]) -> "Figure":
    """Dots and intervals: a column of panels per measure, a row of panels per cell, a line per arm.

    Filled dots are means, lines their t intervals, open dots the seeds; arms stand in the order of their means by the
    first measure, in the first cell, the best on top. Where an arm has one seed there is no line, since one value has
    no interval.

    Args:
        comparisons: of the same records, one per measure.

    Raises:
        ConfigError: no run is done that has the first measure.
    """
    rows = {(row.cell, row.arm, number): row for number, each in enumerate(comparisons) for row in each.rows}
    first = comparisons[0]
    cells = list(dict.fromkeys(row.cell for row in first.rows))
    if not cells:
        raise ConfigError(f"measure {first.measure}: no run is done that has it, so there is nothing to draw")
    sign = 1 if measure_of(first.measure).higher else -1
    ordered = sorted((row for row in first.rows if row.cell == cells[0]), key=lambda row: sign * row.mean.estimate)
    arms = [row.arm for row in ordered]
    arms = [*(arm for arm in dict.fromkeys(row.arm for row in first.rows) if arm not in arms), *arms]
    height = 0.9 + len(cells) * (0.6 + 0.26 * len(arms))
    figure = new_figure(2.2 + 3.2 * len(comparisons), min(height, 40.0))
    panels = figure.subplots(len(cells), len(comparisons), sharey=True, squeeze=False, sharex="col")
    for across, each in enumerate(comparisons):
        for down, cell in enumerate(cells):
            ax = panels[down][across]
            for place, arm in enumerate(arms):
                if (row := rows.get((cell, arm, across))) is not None:
                    _draw(ax, place, row, scale(each.measure), arm == each.reference)
            ax.set_title(plain_text(f"{cell}: {each.measure}" if len(cells) > 1 else each.measure), fontsize=10)
            ax.set_yticks(range(len(arms)), [plain_text(arm) for arm in arms], fontsize=9)
            ax.set_ylim(-0.7, len(arms) - 0.3)
            if down == len(cells) - 1:
                ax.set_xlabel(f"{measure_of(each.measure).what} / {unit(each.measure)}", fontsize=9)
            plain(ax, "both")
    figure.supxlabel(f"means with {100 * first.level:g} % t intervals; open: seeds; dotted: "
                     f"{plain_text(first.reference)}", fontsize=9, color=INK)
    return figure


def _draw(ax: "Axes", place: int, row: Row, factor: float, reference: bool) -> None:
    colour, mean = COLOURS[0], factor * row.mean.estimate
    if reference:
        ax.axvline(mean, color=INK, linewidth=0.8, linestyle=":", zorder=1)
    if row.mean.low is not None and row.mean.high is not None:
        ax.plot([factor * row.mean.low, factor * row.mean.high], [place, place], color=colour, linewidth=2.2, zorder=2,
                solid_capstyle="butt")
    ax.plot([mean], [place], "o", markersize=9, color=colour, zorder=3)
    ax.plot([factor * value for value in row.values.values()], [place] * len(row.values), "o", markersize=3.2,
            markerfacecolor="white", markeredgecolor=INK, markeredgewidth=0.7, zorder=4)
