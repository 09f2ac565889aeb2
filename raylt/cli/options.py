"""Options that several commands share, and helpers for printing."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from raylt.config import DEMO, Config, load
from raylt.runs.callbacks.base import Callback
from raylt.runs.callbacks.console import PlainConsole
from raylt.signals import STOPPED

# Modules that import torch are imported inside the commands, so that --help and errors in keys appear quickly.


class Output(PlainConsole):
    """A console whose tables wrap long words instead of cutting them."""

    def print(self, *objects: Any, **how: Any) -> None:
        for each in objects:
            for table in each.renderables if isinstance(each, Group) else [each]:
                for column in table.columns if isinstance(table, Table) else ():
                    column.overflow = "fold"
        super().print(*objects, **how)


out, err = Output(), Output(stderr=True)


class _Started(Callback):
    """Remembers the folder of the run or search that a command has started."""

    folder: Path | None = None
    command = ""
    options: Sequence[str] = ()

    def on_start(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.command = "resume"

    def on_search_start(self, folder: Path, methods: Sequence[str], trials: int | None, at_once: int) -> None:
        self.folder = folder
        self.command = "tune"
        self.options = ("--resume",)


@contextmanager
def say_how_to_resume() -> Iterator[_Started]:
    """Wrap a block: on an interrupt, print the command that continues the run or search, and exit with `STOPPED`."""
    started = _Started()
    try:
        yield started
    except KeyboardInterrupt:
        if started.folder is None:
            err.print("stopped before it began; repeat the same command", soft_wrap=True)
        else:
            from raylt.own_code.commands import own_command

            command = own_command(started.command, *started.options, started.folder)
            err.print(f"stopped; continue with {command}", soft_wrap=True)
        raise SystemExit(STOPPED) from None


class FleetName(StrEnum):
    ray = "ray"
    local = "local"
    processes = "processes"


class SearchFleetName(StrEnum):
    ray = "ray"
    local = "local"


class Format(StrEnum):
    table = "table"
    json = "json"


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.yaml | recipe:NAME] [key=value ...]", help="Configuration, and settings that override it."
    ),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
FleetOption = Annotated[
    FleetName,
    typer.Option("--fleet", help="Run clients as actors on Ray, in this process (local), or in forks of it."),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Use this running Ray cluster, HOST:PORT or auto; by default RAYLT_ADDRESS, the cluster of a Ray job, or "
        "a new local cluster."
    ),
]
ClientOption = Annotated[
    str | None, typer.Option(metavar="NAME | ID", help="Client, if each client has its own model.")
]
TrackOption = Annotated[
    list[str] | None, typer.Option("--track", help="Also log to mlflow or wandb. TensorBoard needs no option.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="Format of the result.")]


def divide(settings: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """Split a command's arguments into a configuration, if the first argument names one, and the settings."""
    given = list(settings or [])
    return (given.pop(0), given) if given and ("=" not in given[0] or Path(given[0]).exists()) else (None, given)


def config_of(settings: Sequence[str] | None) -> Config:
    """Return the configuration that a command's arguments define; by default the demonstration."""
    return load(*divide(settings)) if settings else load(f"recipe:{DEMO}")


def print_json(tree: Any) -> None:
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")
