"""`raylt debug`: the command."""

import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from raylt.errors import RayltError

out = Console(highlight=False)


def debug(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
          round: Annotated[int, typer.Option(min=0, help="The round; 0 for how clients join.")],
          client: Annotated[int, typer.Option(min=0, help="The client's id.")],
          function: Annotated[str | None, typer.Option(help="Its call of this function; else its first.")] = None,
          ) -> None:
    """Run one client's call of a run again in this process, with its traceback if it raises."""
    from raylt.runs.replay import replay
    try:
        found = replay(run_folder, round, client, function)
    except RayltError:
        raise
    except Exception:
        traceback.print_exc()
        raise typer.Exit(1) from None
    out.print(f"client {client}, round {round}, {found.function}: {found.seconds:.3f} s, weight {found.reply.weight:g}")
    table = Table("reply", "kind", "values")
    for row in found.entries():
        table.add_row(*row)
    out.print(table)
