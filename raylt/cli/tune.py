"""`raylt tune`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from raylt.cli.options import Address, FleetName, Format, FormatOption, Settings, TrackOption, divide, out
from raylt.config import Config, assign, check, read
from raylt.errors import ConfigError


def tune(context: typer.Context, settings: Settings = None,
         samples: Annotated[int | None, typer.Option(min=1, help="How many trials each method gets; by default 20, or "
                                                     "what --budget allows.")] = None,
         name: Annotated[str | None, typer.Option(help="The name of the search's folder.")] = None,
         folder: Annotated[Path, typer.Option("--out", help="The folder that it is made in.")] = Path("runs"),
         methods: Annotated[str | None, typer.Option(help="The methods to search, as in sfd,fedavg; by default the one "
                                                     "that the settings name.")] = None,
         fields: Annotated[str | None, typer.Option(help="The fields of the methods to search, as in gamma,tau; by "
                                                    "default all that are not given.")] = None,
         metric: Annotated[Literal["accuracy", "many", "medium", "few", "owned", "matched", "miou"], typer.Option(
             help="What is optimised, on validation samples.")] = "accuracy",
         searcher: Annotated[Literal["tpe", "random", "grid"], typer.Option(help="How values are chosen.")] = "tpe",
         scheduler: Annotated[Literal["asha", "none"], typer.Option(help="How trials are stopped early.")] = "asha",
         grace: Annotated[int | None, typer.Option(min=1, help="The rounds before trials are compared; by default a "
                                                   "ninth of all.")] = None,
         budget: Annotated[int | None, typer.Option(min=1, help="The client-steps that each method may spend.")] = None,
         seed: Annotated[int, typer.Option(min=0, help="The seed of the search.")] = 0,
         retries: Annotated[int, typer.Option(min=0, help="How many times a failed trial is taken up again.")] = 2,
         resume: Annotated[Path | None, typer.Option(help="The folder of a search to go on with.")] = None,
         parallel: Annotated[int | None, typer.Option(min=1, help="How many trials run at once at most.")] = None,
         track: TrackOption = None,
         fleet: Annotated[FleetName, typer.Option(help="Whether trials run on Ray, or one after another in this "
                                                  "process.")] = FleetName.ray,
         address: Address = None, format: FormatOption = Format.table) -> None:
    """Search the ranges of a method's fields, and settings given as ranges: local.lr=loguniform(0.01,0.3)."""
    place: dict[str, Any] = {"parallel": parallel, "fleet": fleet.value, "address": address, "track": track or []}
    if resume is not None:
        fixed = [key for key in context.params if key not in (*place, "resume", "format")
                 and getattr(context.get_parameter_source(key), "name", "") == "COMMANDLINE"]
        if fixed:
            raise ConfigError(f"--resume {resume}: a search goes on with the settings it was started with; leave out "
                              f"{', '.join(sorted(fixed)).replace('folder', 'out')}")
    elif name is not None and (Path(name).name != name or name in ("", ".", "..")):
        raise ConfigError(f"--name {name}: must be the name of one folder; give its place with --out")
    from tune import resume as resume_search
    from tune import search
    from tune.screen import Screen
    from tune.space import separate, spaces_of

    screen = Screen()
    if resume is not None:
        found = resume_search(resume, **place, watcher=screen)
    else:
        file, given = divide(settings)
        fixed, ranges = separate(given)
        config, names = _methods(read(file, fixed), _words(methods or ""))
        spaces = spaces_of(names, ranges, config, None if fields is None else _words(fields))
        found = search(config, spaces, samples, out=folder, name=name, metric=metric, searcher=searcher,
                       scheduler=scheduler, grace=grace, budget=budget, seed=seed, retries=retries, **place,
                       watcher=screen)
    if format is Format.json:
        sys.stdout.write(json.dumps({"best": found.best.id, "folder": str(found.folder),
                                     "trials": json.loads((found.folder / "trials.json").read_text())}) + "\n")
    else:
        out.print(screen.table())
        out.print(f"best: {found.best.id}; raylt run {found.folder / 'best.yaml'}", soft_wrap=True)


def _methods(tree: dict[str, Any], names: list[str]) -> tuple[Config, list[str]]:
    """The configuration, and the methods to search: those named, or its own."""
    if names and "method" not in tree:
        assign(tree, "method", names[0])
    config = check(Config, tree)
    return config, names or [config.method["name"]]


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
