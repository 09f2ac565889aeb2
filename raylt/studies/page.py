"""The page of verdicts: docs/reproducibility.md, made of recorded runs and of nothing else."""

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Group
from rich.table import Table

from raylt.studies.expectations import PAPERS
from raylt.studies.reproduce import command
from raylt.studies.tables import margin
from raylt.studies.verdicts import KINDS, LEAST_SEEDS, WIDEST, Verdict, count

MEANING = {
    "reproduced": "the printed value lies in the 95 % t interval over our seeds",
    "difference reproduced": "the value does not, but the printed difference to FedAvg lies in the interval of ours",
    "outside": "neither",
    "cannot be told": f"it lies there, but the interval is wider than ± {100 * WIDEST:g} points",
    "too few seeds": f"under {LEAST_SEEDS} seeds: figures, and nothing is claimed",
    "at reduced scale": "run with fewer rounds than the paper: figures, and no verdict",
    "longer than the paper": "run with more rounds than the paper only: figures, and no verdict",
    "not run": "a command is there, no recorded run of it",
    "cannot be run": "no method of raylt, or the paper does not say enough",
}


def page(judged: Sequence[Verdict]) -> str:
    """Markdown: coverage, what the words mean, and a line per cell, those without a run in short."""
    counts, ran = count(judged), [v for v in judged if v.ours is not None]
    lines = ["# What of the papers' tables was run, and what came out", "",
             "Written by `raylt verdicts --page docs/reproducibility.md --mix-versions studies/results/*.json` from "
             "recorded runs; not edited by hand.", "",
             f"Of {len(judged)} printed cells {len(ran)} have recorded runs here, "
             f"{counts['not run']} have a command and no run, {counts['cannot be run']} have no command.", "",
             "| verdict | cells | means |", "|---|---|---|",
             *(f"| {kind} | {counts[kind]} | {MEANING[kind]} |" for kind in KINDS)]
    for paper, title in PAPERS.items():
        mine = [v for v in judged if v.cell.paper == paper]
        lines += ["", f"## {title}", "", *_tables(mine), *_with_runs([v for v in mine if v.ours is not None]),
                  *_without([v for v in mine if v.ours is None])]
    return "\n".join(lines) + "\n"


def table_of(judged: Sequence[Verdict]) -> Group:
    """Verdicts for a terminal, a table for each setting of a paper's table; in brackets differences to FedAvg."""
    parts: list[Table | str] = []
    for (paper, table, cell), group in groupby(judged, key=lambda v: (v.cell.paper, v.cell.table, v.cell.cell)):
        several = Table("row", "figure", "printed, %", "here, %", "verdict", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                        show_edge=False, title=f"{paper}, table {table}: {cell}", title_justify="left")
        for column in several.columns[2:4]:
            column.no_wrap = True
        for verdict in group:
            _, _, row, figure, printed, here, printed_difference, difference, kind = _cells(verdict)
            several.add_row(row, figure, _with_difference(printed.partition(" ")[0], printed_difference),
                            _with_difference(here.partition(" (")[0], difference),
                            f"{kind}, {verdict.seeds} seeds" if verdict.ours is not None else kind)
        parts += [several, ""]
    return Group(*parts)


def _with_difference(value: str, difference: str) -> str:
    return f"{value} ({difference})" if difference else value


def _cells(v: Verdict) -> list[str]:
    printed = f"{100 * v.cell.value:.2f}"
    rounds = [] if v.scale in (None, 1) else [f"{v.scale:g} of the rounds"]
    why = f" ({'; '.join(notes)})" if (notes := [*rounds, *([v.why] if v.why else [])]) else ""
    return [v.cell.table, v.cell.cell, v.cell.arm, v.cell.measure if v.cell.at == "last" else
            f"{v.cell.measure}, {v.cell.at}",
            printed if v.cell.std is None else f"{printed} (sd {100 * v.cell.std:.1f})",
            "" if v.ours is None else f"{margin(v.ours, _percent)} ({v.seeds} seeds)",
            "" if v.printed_difference is None else f"{100 * v.printed_difference:+.2f}",
            "" if v.difference is None else margin(v.difference.difference, _percent, sign=True), v.kind + why]


def _tables(judged: Sequence[Verdict]) -> list[str]:
    lines = ["| table | cells | with recorded runs | command, no run | no command |", "|---|---|---|---|---|"]
    for table, group in groupby(sorted(judged, key=lambda v: v.cell.table), key=lambda v: v.cell.table):
        mine = list(group)
        counts = count(mine)
        lines.append(f"| {table} | {len(mine)} | {sum(v.ours is not None for v in mine)} | {counts['not run']} | "
                     f"{counts['cannot be run']} |")
    return lines


def _with_runs(judged: Sequence[Verdict]) -> list[str]:
    if not judged:
        return []
    lines = ["", "| table | cell | row | figure | printed, % | here, % | difference to FedAvg, printed | here | "
             "verdict | splits | models | made with |", "|" + "---|" * 12]
    return lines + [f"| {' | '.join([*_cells(v), ' '.join(v.splits), ' '.join(v.models), v.made])} |" for v in judged]


def _without(judged: Sequence[Verdict]) -> list[str]:
    """One line per cell: what it is, what is printed, and the command or why there is none."""
    if not judged:
        return []
    lines = ["", "<details><summary>Cells without a recorded run</summary>", "",
             "| table | cell | row | figure | printed, % | command, or why there is none |", "|" + "---|" * 6]
    for v in judged:
        how = f"`{command(v.cell)}`" if v.cell.problem is None else v.cell.problem
        note = f"; {v.cell.note}" if v.cell.note else ""
        lines.append(f"| {' | '.join(_cells(v)[:5])} | {how}{note.replace('|', '/')} |")
    return [*lines, "", "</details>"]


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"
