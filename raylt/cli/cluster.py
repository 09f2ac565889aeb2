"""`raylt plan | doctor`: where a run would go, and what is here."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from raylt.cli.options import Address, Format, FormatOption, Settings, config_of, out, print_json


def plan(settings: Settings = None,
         nodes: Annotated[str | None, typer.Option(help="Nodes that one does not have, as in 4x4gpu16cpu or "
                                                   "server:1x8cpu,client:2x4gpu48cpu.")] = None,
         address: Address = None, format: FormatOption = Format.table) -> None:
    """Show which actors a run would start, what each takes and where the server goes; start nothing."""
    config = config_of(settings)
    from actors.launch import foresee
    foreseen = foresee(config, address, nodes)
    if format is Format.json:
        print_json(asdict(foreseen))
        return
    table = Table(show_header=False)
    for what, why in foreseen.reasons.items():
        table.add_row(what, why)
    out.print(table)


def doctor(address: Address = None, format: FormatOption = Format.table) -> None:
    """Say what is installed and what torch and Ray see here."""
    from actors.doctor import examine
    findings = examine(address)
    if format is Format.json:
        print_json(findings)
    else:
        table = Table(show_header=False)
        for key, value in findings.items():
            table.add_row(key, str(value))
        out.print(table)
    if findings["problems"]:
        raise typer.Exit(1)
