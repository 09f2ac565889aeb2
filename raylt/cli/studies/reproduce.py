"""The commands `raylt reproduce | verdicts`: run cells of the papers' tables, and compare recorded runs with them."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raylt import store
from raylt.cli.options import err, out
from raylt.cli.studies.study import (
    Address,
    Fleet,
    MixVersions,
    Out,
    Parallel,
    StudyProgress,
    raise_if_failed,
    show_plan,
)
from raylt.disk import check_target, is_file
from raylt.errors import CheckpointError, ConfigError, count_of, quoted, without_remedy

if TYPE_CHECKING:
    from raylt.studies.definition import Definition
    from raylt.studies.papers.figures import Figure
    from raylt.studies.papers.verdicts import Verdict

Format = Annotated[Literal["table", "json"], typer.Option(help="Format of the verdicts and of the plan.")]


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER", help="sfd, fedsm, mupfl or bpfed.")],
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="[TABLE]",
            help="Printed number, such as 2 or III, or fig6 or fig8 for figures; by default all tables.",
        ),
    ] = None,
    cells: Annotated[
        str | None, typer.Option(help="Run only matching cells, such as dataset=cifar10,IF=100,alpha=0.5.")
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Run only these rows, such as MuPFL,FedAvg.")] = None,
    scale: Annotated[
        float,
        typer.Option(min=0.001, max=1, help="Run this share of the paper's rounds; below 1 there are no verdicts."),
    ] = 1.0,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each row; each seed has its own split.")] = 3,
    name: Annotated[str | None, typer.Option(help="Name of the study's folder.")] = None,
    folder: Out = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and the time left; run nothing.")] = False,
    parallel: Parallel = None,
    fleet: Fleet = "local",
    address: Address = None,
    mix_versions: MixVersions = False,
    format: Format = "table",
) -> None:
    """Run the cells of a paper's table and print a verdict for each; give the reason for cells that cannot be run."""
    from raylt.studies.papers.figures import figure_of, plan_figure
    from raylt.studies.papers.reproduce import name_of, numbers_of, plan, select
    from raylt.studies.papers.verdicts import verdicts as judge_all
    from raylt.studies.study import Study

    where = parse_cells(cells)
    rows = [arm.strip() for arm in arms.split(",")] if arms else None
    if table is not None and table.lower().startswith("fig"):
        figure = figure_of(paper, table.lower().removeprefix("fig").strip(". "))
        name = name or name_of(paper, f"fig{figure.number}", where, scale)
        definition = plan_figure(figure, name, seeds, scale, where, rows)
        _run_figure(figure, definition, folder, dry_run, parallel, fleet, address, mix_versions, format)
        return
    selected = select(paper, table, where, rows)
    name = name or name_of(paper, f"table{numbers_of(table)[0]}" if table else "", where, scale)
    definition = plan(selected, name, seeds, scale)
    if dry_run:
        planned = Study.preview(definition, folder)
        judged = judge_all(planned.records, selected, mix_versions)
        show_plan(planned, parallel, fleet, format, _as_json(judged))
        if format == "table":
            show(judged, format)
        return
    study = Study.create(definition, folder)
    with StudyProgress() as progress:
        failed = study.run([progress], parallel, fleet, address, mix_versions)
    show(judge_all(study.records, selected, mix_versions), format)
    err.print(f"{study.folder}; draw it with raylt report {quoted(study.folder)}", soft_wrap=True)
    raise_if_failed(study, failed)


def _run_figure(
    figure: "Figure",
    definition: "Definition",
    folder: Path,
    dry_run: bool,
    parallel: int | None,
    fleet: Literal["local", "ray"],
    address: str | None,
    mix_versions: bool,
    format: str,
) -> None:
    """Run the study of a figure, and print its table with the rounds and seconds until each cell's target."""
    from raylt.studies.analysis.time_to_accuracy import reached
    from raylt.studies.report.comparison_tables import comparison_table, with_target
    from raylt.studies.study import Study

    if dry_run:
        show_plan(Study.preview(definition, folder), parallel, fleet, format)
        return
    study = Study.create(definition, folder)
    with StudyProgress() as progress:
        failed = study.run([progress], parallel, fleet, address, mix_versions)
    comparison = study.compare(mix_versions=mix_versions)
    table = comparison_table(comparison)
    reaching = {}
    for cell, target in figure.targets.items():
        of_cell = [record for record in study.records if record.cell == cell]
        if of_cell:
            reaching[cell] = reached(of_cell, target, figure.measure)
            table = with_target(table, reaching[cell], target, figure.measure)
    if format == "json":
        targets = {cell: [each.to_json() for each in rows] for cell, rows in reaching.items()}
        sys.stdout.write(json.dumps({**comparison.to_json(), "targets": targets}) + "\n")
    else:
        out.print(table.screen())
    err.print(f"{study.folder}; draw it with raylt plot curves {quoted(study.folder)}", soft_wrap=True)
    raise_if_failed(study, failed)


def verdicts(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[STUDY | RUN ...]", help="Studies, their results.json, or run folders."),
    ] = None,
    paper: Annotated[str | None, typer.Option(help="Print only the cells of this paper.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write all 640 cells to this Markdown file.")] = None,
    mix_versions: Annotated[
        bool, typer.Option("--mix-versions", help="Count runs of several versions of the code together.")
    ] = False,
    format: Format = "table",
) -> None:
    """Compare recorded runs with every cell that the papers print; ignore runs that belong to no cell."""
    from raylt.studies.papers.reproduce import select
    from raylt.studies.papers.verdict_page import page as markdown_page
    from raylt.studies.papers.verdicts import verdicts as judge_all
    from raylt.studies.study import Study, of_runs

    if page is not None:
        if paper:
            raise ConfigError("--page: always has all papers. Leave out --paper.", code="config.conflict", key="--page")
        check_target(page, "--page")
    records = []
    for path in paths or []:
        study = of_runs([path]) if is_file(path / "config.yaml") else Study.open(path)
        records += study.records
    judged = judge_all(records, select(paper) if paper else None, mix_versions)
    if page is not None:
        try:
            store.write(page, markdown_page(judged))
        except CheckpointError as error:
            raise ConfigError(
                f"--page: {without_remedy(error)}. Give a file that can be written.",
                code="file.unwritable",
                path=str(page),
            ) from None
    show(judged, format, only_run=True)


def show(judged: "list[Verdict]", format: str, only_run: bool = False) -> None:
    """Print the verdicts, and the number of verdicts of each kind.

    Args:
        judged: The verdicts.
        format: "table" or "json".
        only_run: Whether to show only cells with runs in the table; JSON has all cells.
    """
    from raylt.studies.papers.verdict_page import verdict_tables

    if format == "json":
        sys.stdout.write(json.dumps(_as_json(judged)) + "\n")
        return
    if lines := [verdict for verdict in judged if verdict.ours is not None or not only_run]:
        out.print(verdict_tables(lines))
    counts = ", ".join(f"{number} {kind}" for kind, number in _count(judged).items())
    out.print(f"{count_of(len(judged), 'cell')}: {counts}")


def _as_json(judged: "list[Verdict]") -> dict[str, Any]:
    return {"count": _count(judged), "cells": [asdict(verdict) for verdict in judged]}


def _count(judged: "list[Verdict]") -> dict[str, int]:
    """Return the number of verdicts of each kind that occurs."""
    from raylt.studies.papers.verdicts import count

    return {kind: number for kind, number in count(judged).items() if number}


def parse_cells(text: str | None) -> dict[str, str]:
    """Parse a text such as "IF=100,alpha=0.5" into a mapping.

    Raises:
        ConfigError: The text has another form.
    """
    where = {}
    for part in (text or "").split(","):
        key, equals, value = part.strip().partition("=")
        if part.strip() and not (key and equals and value):
            raise ConfigError(
                f"--cells: cannot be parsed ({text}). Write KEY=VALUE,..., such as IF=100,alpha=0.5.",
                code="config.wrong-type",
                key="--cells",
                value=text,
            )
        if key:
            where[key] = value
    return where
