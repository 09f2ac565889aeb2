"""The verdicts on the papers' results as a Markdown page, and as a table for a terminal."""

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Group
from rich.table import Table

from raylt.formatting import in_percent
from raylt.studies.papers.printed_tables import PAPERS
from raylt.studies.papers.reproduce import command
from raylt.studies.papers.verdicts import KINDS, MAX_HALF_WIDTH, MIN_SEEDS, Verdict, count
from raylt.studies.report.comparison_tables import margin
from raylt.studies.report.text_table import markdown_text

MEANING = {
    "reproduced": "the 95 % t interval over our seeds contains the printed value; for a row of an ablation, the "
    "interval of our differences to the base also contains the printed difference; the base is FedAvg in the same "
    "setting, or FedSM for FedSM with a fine-tuned teacher",
    "difference reproduced": "the interval of the values does not contain the printed value, but the interval of our "
    "differences to the base contains the printed difference",
    "outside": "neither interval contains the printed figure; for an ablation, the interval of differences does not",
    "cannot be told": "an interval contains the printed figure, but is wider than "
    f"± {100 * MAX_HALF_WIDTH:g} points, or there is no interval: all seeds have the same value, or an ablation has no "
    "runs of its base",
    "too few seeds": f"fewer than {MIN_SEEDS} seeds: figures without a verdict",
    "at reduced scale": "run with fewer rounds than the paper: figures without a verdict",
    "longer than the paper": "run only with more rounds than the paper: figures without a verdict",
    "not run": "there is a command, but no recorded run",
    "cannot be run": "raylt does not have the method, or the paper does not specify the setting",
}


def page(judged: Sequence[Verdict]) -> str:
    """Return the page of verdicts in Markdown: coverage, meaning of the verdicts, and one line per cell."""
    counts = count(judged)
    with_runs = sum(verdict.ours is not None for verdict in judged)
    lines = [
        "# Verdicts on the papers' tables",
        "",
        "`raylt verdicts --page FILE --mix-versions studies/results/*.json` writes this page from recorded runs.",
        "",
        f"Of {len(judged)} printed cells, {with_runs} have recorded runs, {counts['not run']} have a command and no "
        f"run, and {counts['cannot be run']} have no command.",
        "",
        "| verdict | cells | meaning |",
        "|---|---|---|",
        *(f"| {kind} | {counts[kind]} | {MEANING[kind]} |" for kind in KINDS),
    ]
    for paper, title in PAPERS.items():
        of_paper = [verdict for verdict in judged if verdict.cell.paper == paper]
        lines += ["", f"## {title}", ""]
        lines += _coverage(of_paper)
        lines += _with_runs([verdict for verdict in of_paper if verdict.ours is not None])
        lines += _without_runs([verdict for verdict in of_paper if verdict.ours is None])
    return "\n".join(lines) + "\n"


def verdict_tables(judged: Sequence[Verdict]) -> Group:
    """Return a terminal table of verdicts for each setting; differences to the base are in brackets."""
    parts: list[Table | str] = []
    for (paper, table, cell), group in groupby(judged, key=lambda v: (v.cell.paper, v.cell.table, v.cell.cell)):
        parts += [_setting_table(f"{paper}, table {table}: {cell}", list(group)), ""]
    return Group(*parts)


def _setting_table(title: str, judged: Sequence[Verdict]) -> Table:
    table = Table(
        "row",
        "figure",
        "printed, %",
        "here, %",
        "verdict",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title=title,
        title_justify="left",
    )
    for column in table.columns[2:4]:
        column.no_wrap = True
    words = [word for verdict in judged for word in verdict.cell.arm.split()]
    table.columns[0].min_width = max(map(len, words))  # wide enough for each word of a row's name
    for verdict in judged:
        _, _, row, figure, printed, measured, printed_difference, difference, kind = _columns(verdict)
        table.add_row(
            row,
            figure,
            _with_difference(printed.partition(" ")[0], printed_difference),
            _with_difference(measured.partition(" (")[0], difference),
            f"{kind}, {verdict.seeds} seeds" if verdict.ours is not None else kind,
        )
    return table


def _with_difference(value: str, difference: str) -> str:
    """Return a value and, on a separate line, a difference in brackets."""
    return f"{value}\n({difference})" if difference else value


def _columns(verdict: Verdict) -> list[str]:
    """Return the texts of a verdict's row: cell, figure, printed and measured value, differences, verdict."""
    cell = verdict.cell
    printed = f"{100 * cell.value:.2f}"
    notes = [verdict.why] if verdict.why else []
    if verdict.scale not in (None, 1):
        notes.insert(0, f"{verdict.scale:g} of the rounds")
    return [
        cell.table,
        cell.cell,
        cell.arm,
        cell.measure if cell.at == "last" else f"{cell.measure}, {cell.at}",
        printed if cell.std is None else f"{printed} (sd {100 * cell.std:.1f})",
        "" if verdict.ours is None else f"{margin(verdict.ours, in_percent)} ({verdict.seeds} seeds)",
        "" if verdict.printed_difference is None else f"{100 * verdict.printed_difference:+.2f}",
        "" if verdict.difference is None else margin(verdict.difference.difference, in_percent, sign=True),
        f"{verdict.kind} ({'; '.join(notes)})" if notes else verdict.kind,
    ]


def _coverage(judged: Sequence[Verdict]) -> list[str]:
    """Return a table that counts, for each table of the papers, the cells that have runs or can be run."""
    lines = ["| table | cells | with recorded runs | command, no run | no command |", "|---|---|---|---|---|"]
    for table, group in groupby(sorted(judged, key=lambda v: v.cell.table), key=lambda v: v.cell.table):
        of_table = list(group)
        counts = count(of_table)
        with_runs = sum(verdict.ours is not None for verdict in of_table)
        figures = [len(of_table), with_runs, counts["not run"], counts["cannot be run"]]
        lines.append(f"| {table} | {' | '.join(map(str, figures))} |")
    return lines


def _with_runs(judged: Sequence[Verdict]) -> list[str]:
    if not judged:
        return []
    lines = [
        "",
        "| table | cell | row | figure | printed, % | here, % | difference to the base, printed | here | "
        "verdict | splits | models | made with |",
        "|" + "---|" * 12,
    ]
    for verdict in judged:
        cells = [*_columns(verdict), " ".join(verdict.splits), " ".join(verdict.models), verdict.made]
        lines.append(f"| {' | '.join(map(markdown_text, cells))} |")
    return lines


def _without_runs(judged: Sequence[Verdict]) -> list[str]:
    """Return a line for each cell of the papers' tables without runs, with the command that runs the cell.

    For a cell that cannot be run, the line has the reason instead.
    """
    if not judged:
        return []
    lines = [
        "",
        "<details><summary>Cells without a recorded run</summary>",
        "",
        "| table | cell | row | figure | printed, % | command, or the reason why there is none |",
        "|" + "---|" * 6,
    ]
    for verdict in judged:
        cell = verdict.cell
        remedy = f"`{command(cell)}`" if cell.problem is None else cell.problem
        note = f"; {cell.note}" if cell.note else ""
        lines.append(f"| {' | '.join(_columns(verdict)[:5])} | {remedy}{note.replace('|', '/')} |")
    return [*lines, "", "</details>"]
