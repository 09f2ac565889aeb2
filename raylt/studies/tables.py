"""A comparison as text, Markdown and LaTeX. Accuracies are in percent, differences in points; nothing here depends on
how long a run took, so equal runs print equal tables."""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from raylt.studies.comparison import Comparison, Row
from raylt.studies.measures import measure_of
from raylt.studies.statistics import Interval

HEADINGS = {"last": "last round", "last10": "mean of the last ten judged rounds", "best": "best round on the test set"}


def of_comparison(comparison: Comparison) -> Group:
    """What a person reads on a terminal."""
    parts: list[Table | Text] = []
    table = Table(*_head(comparison), title=_title(comparison), title_justify="left", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), show_edge=False)
    for column in table.columns[2:-1]:
        column.justify, column.no_wrap = "right", True
    cell = None
    for row in comparison.rows:
        if cell not in (None, row.cell):
            table.add_section()
        table.add_row("" if row.cell == cell else row.cell, *_cells(comparison, row))
        cell = row.cell
    parts.append(table)
    for title, head, lines in _further(comparison):
        more = Table(*head, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                     show_edge=False)
        for line in lines:
            more.add_row(*line)
        parts += [Text(""), more]
    if comparison.apart:
        parts += [Text("\narms with settings of their own:\n" + "\n".join(f"  {line}" for line in comparison.apart))]
    if comparison.left_out:
        parts += [Text("\nleft out:\n" + "\n".join(f"  {line}" for line in comparison.left_out))]
    return Group(*parts)


def markdown(comparison: Comparison) -> str:
    """Tables that GitHub and every Markdown reader draws."""
    lines = [f"**{_title(comparison)}**", "", *_pipes(_head(comparison), [[row.cell, *_cells(comparison, row)]
                                                                         for row in comparison.rows])]
    for title, head, rows in _further(comparison):
        lines += ["", f"**{title}**", "", *_pipes(head, rows)]
    if comparison.apart:
        lines += ["", "Arms with settings of their own:", "", *(f"- {line}" for line in comparison.apart)]
    if comparison.left_out:
        lines += ["", "Left out:", "", *(f"- {line}" for line in comparison.left_out)]
    return "\n".join(lines) + "\n"


def latex(comparison: Comparison) -> str:
    """A tabular for booktabs; claims and what was left out are comments below it."""
    head = _head(comparison)
    lines = [f"% {_title(comparison)}", rf"\begin{{tabular}}{{ll{'r' * (len(head) - 3)}l}}", r"\toprule",
             " & ".join(map(_tex, head)) + r" \\", r"\midrule"]
    cell = None
    for row in comparison.rows:
        if cell not in (None, row.cell):
            lines.append(r"\midrule")
        lines.append(" & ".join(map(_tex, ["" if row.cell == cell else row.cell, *_cells(comparison, row)])) + r" \\")
        cell = row.cell
    lines += [r"\bottomrule", r"\end{tabular}"]
    for title, _, rows in _further(comparison):
        lines += [f"% {title}", *(f"%   {', '.join(row)}" for row in rows)]
    lines += [f"% own settings: {line}" for line in comparison.apart]
    lines += [f"% left out: {line}" for line in comparison.left_out]
    return "\n".join(lines) + "\n"


def shown(measure: str) -> Callable[[float], str]:
    """How a value of a measure is written, without its unit: shares in percent, bytes in MiB."""
    scale = 2**-20 if measure.startswith("bytes") else 100
    return lambda value: f"{scale * value:.2f}"


def unit(measure: str) -> str:
    return "MiB" if measure.startswith("bytes") else "%"


def interval(each: Interval, show: Callable[[float], str]) -> str:
    """1.20 [0.40, 2.00]; without brackets where there is no interval."""
    text = show(each.estimate)
    return text if each.low is None or each.high is None else f"{text} [{show(each.low)}, {show(each.high)}]"


def margin(each: Interval, show: Callable[[float], str], sign: bool = False) -> str:
    """+1.20 ± 0.80: an interval that is even on both sides; without a margin where there is no interval."""
    text = show(each.estimate)
    if sign and not text.startswith("-"):
        text = f"+{text}"
    return text if each.high is None else f"{text} ± {show(each.high - each.estimate)}"


def probability(p: float | None) -> str:
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _title(comparison: Comparison) -> str:
    measure = measure_of(comparison.measure)
    return (f"{measure.what}, {unit(comparison.measure)}, {HEADINGS[comparison.at]}; ± {100 * comparison.level:g} % "
            f"t interval over seeds; differences to {comparison.reference}, paired by seed")


def _head(comparison: Comparison) -> list[str]:
    optimism = ["best - last"] if any(row.optimism is not None for row in comparison.rows) else []
    return ["cell", "arm", "seeds", "mean", "sd", "difference", *optimism, "values"]


def _cells(comparison: Comparison, row: Row) -> list[str]:
    show = shown(comparison.measure)
    optimism = [] if "best - last" not in _head(comparison) else [
        "-" if row.optimism is None else show(row.optimism)]
    return [row.arm, str(len(row.values)), margin(row.mean, show), "-" if row.sd is None else show(row.sd),
            "-" if row.difference is None else margin(row.difference.difference, show, sign=True), *optimism,
            " ".join(show(value) for value in row.values.values())]


def _further(comparison: Comparison) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, heading and rows of the tables of claims and over cells, where there are any."""
    tables = []
    if comparison.claims:
        tables.append((f"claims, one family of {len(comparison.claims)}; p adjusted by Holm, none under six seeds",
                       ["claim", "cell", "difference", "p", "verdict"],
                       [[str(j.claim), j.cell, margin(j.difference.difference, shown(j.claim.measure), sign=True),
                         probability(j.p), j.verdict] for j in comparison.claims]))
    if comparison.overall:
        show = shown(comparison.measure)
        rows = [[o.arm, interval(o.iqm, show), "-" if o.improvement is None else
                 interval(o.improvement, lambda value: f"{value:.2f}")] for o in comparison.overall]
        tables.append(("over cells: interquartile mean, and probability that a run beats one of "
                       f"{comparison.reference}; bootstrap within cells",
                       ["arm", "interquartile mean", "probability of improvement"], rows))
    return tables


def _pipes(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head),
            *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]


def _tex(text: str) -> str:
    for sign in "%&_#$":
        text = text.replace(sign, f"\\{sign}")
    return text.replace(">", "$>$").replace("<", "$<$").replace("±", r"$\pm$")
