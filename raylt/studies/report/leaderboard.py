"""The leaderboard: a ranking as a table, as a page in Markdown and as a picture."""

from collections.abc import Callable
from html import escape
from math import ceil, floor
from textwrap import wrap

from raylt.errors import count_of, shorten
from raylt.runs.callbacks.console import UNSAFE
from raylt.studies.analysis.measures import measure_of
from raylt.studies.analysis.ranking import Ranked, Ranking
from raylt.studies.analysis.statistics import Interval
from raylt.studies.report.comparison_tables import HEADINGS, PASSES, UNSEALED, one_line_per_failure
from raylt.studies.report.text_table import TextTable

SECONDS = (
    "median duration of a run's steps, including the server's work and evaluation, as a multiple of the arm fedavg's "
    "with the same seed; multiples between 0.5 and 2 say little if runs shared a machine with other work"
)
PERSONAL = "arms whose clients have models of their own: by these models; other arms: by the global model"
AXIS = "strength: log-odds of being better than an arm of mean strength"
WIDTH = 570  # of the drawing next to the column of names
RIGHT = 16  # margin at the right
LETTER_WIDTH = 7.2  # width of a character
MAX_NAME_LENGTH = 48  # characters of an arm's name
ROW = 20
LINE = 16  # height of a line of the title
MARGIN = 34  # height of the ticks, and of the axis name below them
MAX_TICKS = 10  # number of steps between grid lines, above which only every third is drawn
STYLE = """<style>
.page { fill: #ffffff } text { fill: #1f2730 }
.grid { stroke: #dddddd } .zero { stroke: #888888 } .arm { stroke: #1f5fa8; stroke-width: 2 } .mark { fill: #1f5fa8 }
@media (prefers-color-scheme: dark) {
.page { fill: #11161c } text { fill: #e6ebf0 }
.grid { stroke: #2b343e } .zero { stroke: #7d8894 } .arm { stroke: #6aa9f0 } .mark { fill: #6aa9f0 }
}
</style>"""


def ranking_table(ranking: Ranking) -> TextTable:
    """Return a ranking as a table with one row per arm, and with the arms' costs if they were measured."""
    costs = any(arm.cost is not None for arm in ranking.arms)
    times = any(arm.time is not None for arm in ranking.arms)
    rows = [
        [
            arm.arm,
            _strength(arm.strength),
            f"{100 * arm.chance:.0f} %",
            f"{arm.finished} of {arm.planned}",
            *([_multiple(arm.time)] if times else []),
            *([_multiple(arm.cost)] if costs else []),
        ]
        for arm in ranking.arms
    ]
    diverged = [f"{arm.arm}: {arm.diverged} of {arm.planned} runs" for arm in ranking.arms if arm.diverged]
    return TextTable(
        title=_title(ranking),
        head=[
            "arm",
            "strength, log-odds",
            "better than another arm",
            "finished",
            *(["time"] if times else []),
            *(["passes"] if costs else []),
        ],
        rows=rows,
        columns="lrrr" + "r" * (times + costs),
        grouped=False,
        naming=1,
        notes={
            "time": [SECONDS] if times else [],
            "passes": [PASSES] if costs else [],
            "diverged runs, which count as worse than every finished run of the same seed": diverged,
            "evaluated models": ranking.models,
            "versions of the code": ranking.versions,
            UNSEALED: ranking.unsealed,
            "left out": one_line_per_failure(ranking.left_out),
        },
    )


def leaderboard_page(ranking: Ranking, picture: str, command: str) -> str:
    """Return the leaderboard page of a ranking in Markdown.

    Args:
        ranking: The ranking.
        picture: Address of the picture.
        command: Command that writes the page.
    """
    return "\n".join(
        [
            "# Leaderboard",
            "",
            "A block is one seed of a cell: its runs share the split and the initial weights, and every pair of its",
            "arms is compared. Strengths are those of the Bradley-Terry model, as log-odds against an arm of mean",
            "strength. Each arm gets an extra half win and half loss, so that an arm that always wins has a finite",
            "strength. Intervals account for the dependence between the comparisons of a block. An arm with few blocks",
            "has few degrees of freedom and a wide interval. In simulations with three and six seeds, and with an arm",
            "that has two or three blocks of 36, intervals cover at least 93 % at a level of 95 %. They hold for these",
            "grounds. An arm that was run on only one ground has its strength from that ground. Arms with overlapping",
            "intervals cannot be told apart. A diverged run counts as worse than every finished run of its seed. Runs",
            "that are missing from the record are left out, which favours arms that diverged before raylt recorded",
            "such runs. Recorded runs count even if the code of their method has changed since.",
            "",
            f"![Strengths of the arms with intervals]({picture})",
            "",
            ranking_table(ranking).markdown().rstrip(),
            "",
            "This command writes the page from recorded runs:",
            "",
            "```",
            command,
            "```",
            "",
        ]
    )


def ranking_svg(ranking: Ranking) -> str:
    """Draw a ranking: one line per arm with its strength and interval, strongest at the top."""
    # the axis reaches 1 to both sides of 0, since equal arms without intervals have no width
    low = min(-1, floor(min(_ends(arm, float)[0] for arm in ranking.arms)))
    high = max(1, ceil(max(_ends(arm, float)[1] for arm in ranking.arms)))
    names = 18 + round(LETTER_WIDTH * max(len(_name(arm)) for arm in ranking.arms))
    width = names + WIDTH
    caption = _title(ranking) + (f"; {PERSONAL}" if ranking.models else "")
    title = wrap(caption.replace(" %", "\N{NO-BREAK SPACE}%"), int((width - 16) / LETTER_WIDTH))
    top = 18 + LINE * len(title)
    bottom = top + ROW * len(ranking.arms)
    height = bottom + MARGIN + 8

    def x(value: float) -> float:
        return names + (WIDTH - RIGHT) * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{escape(caption)}</title>',
        STYLE,
        f'<rect class="page" width="{width}" height="{height}"/>',
        *(f'<text x="8" y="{20 + LINE * number}">{escape(line)}</text>' for number, line in enumerate(title)),
    ]
    step = 1 if high - low <= MAX_TICKS else 3
    for tick in range(-(-low // step) * step, high + 1, step):
        kind = "zero" if tick == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{f"{tick:+d}" if tick else 0}</text>'
        )
    middle = (x(low) + x(high)) / 2
    parts.append(f'<text x="{middle:.1f}" y="{bottom + MARGIN}" text-anchor="middle" class="axis">{AXIS}</text>')
    for number, arm in enumerate(ranking.arms):
        parts += _line(arm, names - 10, top + ROW * number + ROW // 2, x(arm.strength.estimate), _ends(arm, x))
    return UNSAFE.sub("?", "\n".join([*parts, "</svg>", ""]))


def _name(arm: Ranked) -> str:
    return shorten(arm.arm, MAX_NAME_LENGTH, "…")


def _strength(strength: Interval) -> str:
    if strength.low is None or strength.high is None:
        return f"{strength.estimate:+.2f}"
    return f"{strength.estimate:+.2f} [{strength.low:+.2f}, {strength.high:+.2f}]"


def _multiple(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 0.05 else "< 0.1"


def _ends(arm: Ranked, x: Callable[[float], float]) -> tuple[float, float]:
    if arm.strength.low is None or arm.strength.high is None:
        return x(arm.strength.estimate), x(arm.strength.estimate)
    return x(arm.strength.low), x(arm.strength.high)


def _line(arm: Ranked, right: int, y: int, centre: float, ends: tuple[float, float]) -> list[str]:
    finished = f"{arm.finished} of {arm.planned} runs finished"
    text = f"{arm.arm}: {arm.strength.estimate:+.2f}, {finished}"
    return [
        f'<text x="{right}" y="{y + 4}" text-anchor="end">{escape(_name(arm))}</text>',
        f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y}" y2="{y}" class="arm"/>',
        f'<circle cx="{centre:.1f}" cy="{y}" r="4" class="mark"><title>{escape(text)}</title></circle>',
    ]


def _title(ranking: Ranking) -> str:
    blocks = f"{count_of(ranking.blocks, 'block')} of one seed in {count_of(ranking.cells, 'cell')}"
    where = f"{', '.join(ranking.studies)}: {blocks}"
    return f"{measure_of(ranking.measure).what}, {HEADINGS[ranking.at]}; {where}; {100 * ranking.level:g} % intervals"
