"""What the commands share: their options, and how they print."""

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table

from raylt.config import DEMO, Config, load

# Modules that import torch are imported inside the commands: --help and a mistyped key should not wait for it.

# what is printed are names and figures, and names may have brackets and colons
class Output(Console):
    """A console whose tables fold a word that is longer than its column: one that was cut could not be copied."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def print(self, *objects: Any, **how: Any) -> None:
        for each in objects:
            for table in each.renderables if isinstance(each, Group) else [each]:
                for column in table.columns if isinstance(table, Table) else ():
                    column.overflow = "fold"
        super().print(*objects, **how)


out, err = Output(), Output(stderr=True)


class FleetName(StrEnum):
    ray = "ray"
    local = "local"


class Format(StrEnum):
    table = "table"
    json = "json"


Settings = Annotated[list[str] | None, typer.Argument(
    metavar="[FILE.yaml | recipe:NAME] [key=value ...]", help="A configuration, then settings that change it.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")]
FleetOption = Annotated[FleetName, typer.Option("--fleet", help="Whether clients are actors on Ray, or all in this "
                                                "process.")]
Address = Annotated[str | None, typer.Option(help="The address of a running Ray cluster, HOST:PORT or auto; otherwise "
                                             "a new local one is started. RAYLT_ADDRESS sets it, and in a Ray job it "
                                             "is the job's cluster.")]
ClientOption = Annotated[str | None, typer.Option(metavar="NAME | ID", help="The client, where each has a model of its "
                                                  "own.")]
TrackOption = Annotated[list[str] | None, typer.Option("--track", help="Where else it is logged: mlflow or wandb.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How the result is printed.")]


def divide(settings: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """The configuration that is named first, if any, and the settings after it."""
    given = list(settings or [])
    return (given.pop(0), given) if given and ("=" not in given[0] or Path(given[0]).exists()) else (None, given)


def config_of(settings: Sequence[str] | None) -> Config:
    """The configuration of a command; the demonstration where nothing at all is named."""
    return load(*divide(settings)) if settings else load(f"recipe:{DEMO}")


def print_json(tree: Any) -> None:
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")
