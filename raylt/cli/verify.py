"""`raylt verify`."""

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import Format, FormatOption, RunFolder, err, out, print_json


def verify(run_folder: RunFolder,
           repair: Annotated[bool, typer.Option("--repair", help="Remove what a kill left and what is damaged, where "
                                                "something whole stands behind it.")] = False,
           format: FormatOption = Format.table) -> None:
    """Say what of a run folder is whole and what is not; exit code 2 where something is not."""
    from raylt.runs import verify as verifying
    if repair:
        for line in verifying.repair(run_folder):
            err.print(line, soft_wrap=True)
    findings = verifying.verify(run_folder)
    if format is Format.json:
        print_json([vars(finding) for finding in findings])
    else:
        table = Table("file", "", "what it is", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.columns[2].overflow = "fold"
        for finding in findings:
            mend = f"; --repair would {finding.mendable}" if finding.mendable else ""
            table.add_row(finding.what, "whole" if finding.whole else "NOT whole", f"{finding.detail}{mend}")
        out.print(table)
    if not all(finding.whole for finding in findings):
        raise typer.Exit(2)
