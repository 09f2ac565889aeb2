"""`raylt run | resume | branch | debug`."""

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
)
from raylt.errors import RayltError

if TYPE_CHECKING:
    from raylt.runs.run import Run


def run(settings: Settings = None,
        name: Annotated[str | None, typer.Option(help="The name of the run folder.")] = None,
        folder: Annotated[Path, typer.Option("--out", help="The folder that run folders are made in.")] = Path("runs"),
        fleet: FleetOption = FleetName.ray, address: Address = None, track: TrackOption = None,
        format: FormatOption = Format.table) -> None:
    """Train; without any settings, a demonstration on scikit-learn's handwritten digits."""
    config = config_of(settings)
    if not settings:
        err.print("nothing was named, so this is the demonstration, recipe:demo; raylt recipes lists others",
                  soft_wrap=True)
    from raylt.runs.start import run as start
    from raylt.runs.trackers import trackers
    _show(start(config, folder, name, fleet.value, address, callbacks=trackers(track or [])), format)


def resume(run_folder: RunFolder,
           overrides: Annotated[list[str] | None, typer.Argument(
               metavar="[key=value ...]", help="resources.* and output.* may differ from the first start; and "
               "federation.rounds, which makes the run longer.")] = None,
           fleet: FleetOption = FleetName.ray, address: Address = None, track: TrackOption = None,
           format: FormatOption = Format.table) -> None:
    """Continue a run after its last committed round; the result is that of an undisturbed run, bit for bit. With more
    federation.rounds it goes on beyond its last one, in a folder beside it."""
    from raylt.runs.extension import resume as start
    from raylt.runs.trackers import trackers
    callbacks = trackers(track or [])
    _show(start(run_folder, overrides or [], fleet=fleet.value, address=address, callbacks=callbacks), format)


def branch(run_folder: RunFolder,
           overrides: Annotated[list[str], typer.Argument(
               metavar="key=value ...", help="Fields of the method that act in a later stage; raylt methods marks "
               "them. method=NAME takes another that trains in the same way, as ccvr does after fedavg.")],
           folder: Annotated[Path | None, typer.Option("--out", help="The new run's folder; by default one beside the "
                                                       "run's.")] = None,
           fleet: FleetOption = FleetName.ray, address: Address = None, format: FormatOption = Format.table) -> None:
    """Do what a run does late again with other fields, from the checkpoint before it: what the whole run would give."""
    from raylt.runs.branch import branch as start
    _show(start(run_folder, overrides, folder, fleet=fleet.value, address=address), format)


def debug(run_folder: RunFolder,
          round: Annotated[int, typer.Option(min=0, help="The round; 0 is how clients join.")],
          client: Annotated[int, typer.Option(min=0, help="The client's id.")],
          function: Annotated[str | None, typer.Option(help="The client function whose call is made again; by default "
                                                       "the first of the round.")] = None,
          device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(
              help="What to compute on, where that is another kind of device than the run was made on; the bits will "
              "differ.")] = None) -> None:
    """Run one client's call of a run again in this process, with its traceback if it raises."""
    from raylt.runs.replay import replay
    from raylt.runs.run import Run
    try:
        replayed = replay(Run.open(run_folder), round, client, function, device)
    except RayltError:
        raise
    except Exception:
        traceback.print_exc()
        raise typer.Exit(1) from None
    out.print(f"client {client}, round {round}, {replayed.function}: {replayed.seconds:.3f} s, "
              f"weight {replayed.reply.weight:g}")
    table = Table("reply", "kind", "values")
    for row in replayed.entries():
        table.add_row(*row)
    out.print(table)


def _show(run: "Run", format: Format) -> None:
    from raylt.runs.summary import table_of
    if format is Format.json:
        print_json(run.summary | {"folder": str(run.folder)})
    else:
        out.print(table_of(run.summary, str(run.folder)))
