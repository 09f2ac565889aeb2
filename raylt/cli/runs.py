"""The commands `raylt run | resume | branch | debug`: train, continue, branch and replay runs."""

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from raylt.cli.options import (
    Address,
    FleetName,
    FleetOption,
    Format,
    FormatOption,
    RunFolder,
    Settings,
    TrackOption,
    config_of,
    err,
    out,
    print_json,
    say_how_to_resume,
)
from raylt.errors import RayltError

if TYPE_CHECKING:
    from raylt.runs.run import Run


def run(
    settings: Settings = None,
    name: Annotated[str | None, typer.Option(help="Name of the run folder.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder in which to create the run folder.")] = Path("runs"),
    fleet: FleetOption = FleetName.ray,
    address: Address = None,
    track: TrackOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Train a federation; without settings, run a demonstration on scikit-learn's handwritten digits."""
    config = config_of(settings)
    if not settings:
        err.print(
            "no settings given; running the demonstration recipe:demo (raylt recipes lists others)",
            soft_wrap=True,
        )
    from raylt.runs.callbacks.trackers import trackers
    from raylt.runs.start import run as start

    with say_how_to_resume() as started:
        done = start(config, folder, name, fleet.value, address, callbacks=[*trackers(track or []), started])
    _show(done, format)


def resume(
    run_folder: RunFolder,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]",
            help="Settings to change: resources.*, output.*, or a larger federation.rounds for a longer run.",
        ),
    ] = None,
    fleet: FleetOption = FleetName.ray,
    address: Address = None,
    track: TrackOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Continue a run after its last committed round; the result is bitwise equal to that of an uninterrupted run.

    A larger federation.rounds continues a finished run in a new folder next to it.
    """
    from raylt.runs.callbacks.trackers import trackers
    from raylt.runs.continuation import resume as start

    with say_how_to_resume() as started:
        callbacks = [*trackers(track or []), started]
        done = start(run_folder, overrides or [], fleet=fleet.value, address=address, callbacks=callbacks)
    _show(done, format)


def branch(
    run_folder: RunFolder,
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="key=value ...",
            help="Method fields of a later stage, which raylt methods marks. method=NAME selects another method that "
            "trains in the same way, such as ccvr after fedavg.",
        ),
    ],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the new run; by default next to the old run's folder.")
    ] = None,
    fleet: FleetOption = FleetName.ray,
    address: Address = None,
    format: FormatOption = Format.table,
) -> None:
    """Repeat the last stage of a run with changed fields; the result equals that of a new run with these fields."""
    from raylt.runs.continuation import branch as start

    with say_how_to_resume() as started:
        done = start(run_folder, overrides, folder, fleet=fleet.value, address=address, callbacks=[started])
    _show(done, format)


def debug(
    run_folder: RunFolder,
    round: Annotated[int, typer.Option(min=0, help="Round; 0 for the joining of clients.")],
    client: Annotated[str, typer.Option(help="Id or name of the client.")],
    function: Annotated[
        str | None,
        typer.Option(help="Client function to call; by default the first one in the round."),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Compute on this kind of device; results differ slightly from the run on another kind."),
    ] = None,
) -> None:
    """Repeat one client's call of a run in this process, and print its traceback if it raises."""
    from raylt.runs.debug import replay
    from raylt.runs.run import Run

    try:
        replayed = replay(Run.open(run_folder), round, client, function, device)
    except RayltError:
        raise
    except Exception:
        traceback.print_exc()
        raise typer.Exit(1) from None
    out.print(
        f"client {client}, round {round}, {replayed.function}: {replayed.seconds:.3f} s, "
        f"weight {replayed.reply.weight:g}"
    )
    table = Table("reply", "kind", "values")
    for row in replayed.entries():
        table.add_row(*row)
    out.print(table)


def _show(run: "Run", format: Format) -> None:
    from raylt.runs.folder.summary import table_of

    if format is Format.json:
        print_json(run.summary | {"folder": str(run.folder)})
    else:
        out.print(table_of(run.summary))
        out.print(f"run folder: {run.folder}", soft_wrap=True, markup=False)  # on one line, so that it can be copied
