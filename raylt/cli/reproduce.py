"""`raylt reproduce | verdicts`: the papers' tables, and what recorded runs say of them."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raylt import store
from raylt.cli.options import err, out
from raylt.cli.study import Address, Fleet, MixVersions, Out, Parallel, Screen, show_plan
from raylt.errors import CheckpointError, ConfigError, RayltError

if TYPE_CHECKING:
    from raylt.studies.verdicts import Verdict

Format = Annotated[Literal["table", "json"], typer.Option(help="How to print it.")]


def reproduce(paper: Annotated[str, typer.Argument(metavar="PAPER", help="sfd, fedsm, mupfl or bpfed.")],
              table: Annotated[str | None, typer.Argument(metavar="[TABLE]", help="As in print: 2, III; else all.")
                               ] = None,
              cells: Annotated[str | None, typer.Option(help="Only cells like this, as in "
                                                        "dataset=cifar10,IF=100,alpha=0.5.")] = None,
              arms: Annotated[str | None, typer.Option(help="Only these rows, as in MuPFL,FedAvg.")] = None,
              scale: Annotated[float, typer.Option(min=0.001, max=1, help="Share of the paper's rounds; below 1 "
                                                   "figures are shown and nothing is claimed.")] = 1.0,
              seeds: Annotated[int, typer.Option(min=1, help="Runs of each row; splits differ with them.")] = 3,
              name: Annotated[str | None, typer.Option(help="Name of the study's folder.")] = None,
              folder: Out = Path("runs"),
              dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and the time left; run nothing.")
                                 ] = False,
              parallel: Parallel = None, fleet: Fleet = "local", address: Address = None,
              mix_versions: MixVersions = False, format: Format = "table") -> None:
    """Run the cells of a paper's table and say of each whether it came out; cells that cannot be run say why."""
    from raylt.studies.reproduce import name_of, plan, select
    from raylt.studies.study import Study
    from raylt.studies.verdicts import verdicts as judge_all
    where = parse_cells(cells)
    chosen = select(paper, table, where, [arm.strip() for arm in arms.split(",")] if arms else None)
    definition = plan(chosen, name or name_of(paper, table, where, scale), seeds, scale)
    if dry_run:
        planned = Study.preview(definition, folder)
        if format == "table":
            show_plan(planned, parallel, fleet)
        show(judge_all(planned.records, chosen, mix_versions), format)
        return
    study = Study.create(definition, folder)
    with Screen() as screen:
        failed = study.run(screen, parallel, fleet, address, mix_versions)
    show(judge_all(study.records, chosen, mix_versions), format)
    err.print(f"{study.folder}; raylt report {study.folder} draws it", soft_wrap=True)
    if failed:
        raise RayltError(f"{study.folder}: {len(failed)} runs failed, the first is {failed[0]}; the same command tries "
                         "them again")


def verdicts(paths: Annotated[list[Path] | None, typer.Argument(
                 metavar="[STUDY | RUN ...]", help="Studies, their results.json, or run folders.")] = None,
             paper: Annotated[str | None, typer.Option(help="Only cells of this paper.")] = None,
             page: Annotated[Path | None, typer.Option(help="Write all 640 cells to this Markdown file.")] = None,
             mix_versions: Annotated[bool, typer.Option(
                 "--mix-versions", help="Take runs of several versions of the code together.")] = False,
             format: Format = "table") -> None:
    """Hold recorded runs against every cell that the papers print; runs of no cell are not looked at."""
    from raylt.studies.page import page as written
    from raylt.studies.reproduce import select
    from raylt.studies.single import of_runs
    from raylt.studies.study import Study
    from raylt.studies.verdicts import verdicts as judge_all
    records = []
    for path in paths or []:
        one = of_runs([path]) if (path / "config.yaml").is_file() else Study.open(path)
        records += one.records
    judged = judge_all(records, select(paper) if paper else None, mix_versions)
    if page is not None:
        if paper:
            raise ConfigError("--page: has all papers; leave out --paper")
        try:
            store.write(page, written(judged))
        except CheckpointError as error:
            raise ConfigError(f"--page {error}; give a file that can be written") from None
    show(judged, format, only_run=True)


def show(judged: "list[Verdict]", format: str, only_run: bool = False) -> None:
    """Verdicts, for a person perhaps only of cells with runs, and how many of each there are."""
    from raylt.studies.page import table_of
    from raylt.studies.verdicts import count
    counts = {kind: number for kind, number in count(judged).items() if number}
    if format == "json":
        sys.stdout.write(json.dumps({"count": counts, "cells": [asdict(v) for v in judged]}) + "\n")
        return
    if lines := [verdict for verdict in judged if verdict.ours is not None or not only_run]:
        out.print(table_of(lines))
    out.print(f"{len(judged)} cells: {', '.join(f'{number} {kind}' for kind, number in counts.items())}")


def parse_cells(text: str | None) -> dict[str, str]:
    """IF=100,alpha=0.5 as a mapping."""
    where = {}
    for part in (text or "").split(","):
        key, equals, value = part.strip().partition("=")
        if part.strip() and not (key and equals and value):
            raise ConfigError(f"--cells {text}: is written KEY=VALUE,..., as in IF=100,alpha=0.5")
        if key:
            where[key] = value
    return where
