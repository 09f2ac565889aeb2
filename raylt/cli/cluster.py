"""The commands `raylt plan` and `raylt doctor`."""

from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.table import Table

from raylt.cli.options import Address, Format, FormatOption, Settings, config_of, err, out, print_json
from raylt.config import Config
from raylt.errors import RayltError
from raylt.own_code.top_level_names import claim


def plan(
    settings: Settings = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="Plan for these nodes, as in 4x4gpu16cpu or server:1x8cpu,client:2x4gpu48cpu."),
    ] = None,
    address: Address = None,
    format: FormatOption = Format.table,
) -> None:
    """Show which actors a run would start, their resources and the server's node; start nothing."""
    config = config_of(settings)
    claim()
    from actors.launch import plan_placement

    last_phase = _check_as_run_does(config)
    placement = plan_placement(config, address, nodes)
    if last_phase:
        placement = replace(placement, reasons=placement.reasons | {"last phase": last_phase})
    if format is Format.json:
        print_json(asdict(placement))
        return
    table = Table(show_header=False)
    for decision, reason in placement.reasons.items():
        table.add_row(decision, reason)
    out.print(table)


def _check_as_run_does(config: Config) -> str:
    """Check the settings as `raylt run` does before it starts.

    Plans are also made where the data or weights are not, on a laptop for a cluster. Checks that need them are then
    left out.

    Returns:
        A description of the phase after the last round; "" if it takes no longer than a round or was not checked.
    """
    from raylt.core.device import one_thread
    from raylt.runs.start import lacks_files, preview_run

    try:
        setup, task, model = preview_run(config)
    except RayltError as error:
        if config.data.clients is None or not lacks_files(error):
            raise
        err.print(f"checked without these files: {error}", markup=False, soft_wrap=True)
        return ""
    with one_thread():  # the text has seconds on one core
        return setup.method.last_phase(task.spec, model)


def doctor(address: Address = None, format: FormatOption = Format.table) -> None:
    """Show what is installed and what torch and Ray see; exit with 1 if there are problems."""
    claim()
    from actors.cluster.doctor import examine

    findings = examine(address)
    if format is Format.json:
        print_json(findings)
    else:
        table = Table(show_header=False)
        for key, value in findings.items():
            table.add_row(key, "none" if value == [] else str(value))
        out.print(table)
    if findings["problems"]:
        raise typer.Exit(1)
