"""`raylt tune`: the command, and what it shows of a search as it goes."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from raylt.config import load
from raylt.errors import ConfigError

if TYPE_CHECKING:
    from tune.plan import Plan, State
    from tune.record import Record

out, err = Console(highlight=False), Console(stderr=True, highlight=False)


def tune(context: typer.Context,
         settings: Annotated[list[str] | None, typer.Argument(
             metavar="[CONFIG.yaml] [key=value ...]", help="Settings; a value may be a range.")] = None,
         samples: Annotated[int | None, typer.Option(min=1, help="Trials of each method; 20, or what --budget "
                                                     "allows.")] = None,
         name: Annotated[str | None, typer.Option(help="Name of the search's folder.")] = None,
         folder: Annotated[Path, typer.Option("--out", help="Folder that it is made in.")] = Path("runs"),
         methods: Annotated[str | None, typer.Option(help="Methods to search, as in sfd,fedavg.")] = None,
         fields: Annotated[str | None, typer.Option(help="Fields of the methods to search, as in gamma,tau; else all "
                                                    "that are not given.")] = None,
         metric: Annotated[Literal["accuracy", "many", "medium", "few", "owned", "matched", "miou"], typer.Option(
             help="What is optimised, on validation samples.")] = "accuracy",
         searcher: Annotated[Literal["tpe", "random", "grid"], typer.Option(help="How values are chosen.")] = "tpe",
         scheduler: Annotated[Literal["asha", "none"], typer.Option(help="How trials are stopped early.")] = "asha",
         grace: Annotated[int | None, typer.Option(min=1, help="Rounds before trials are compared; R/9.")] = None,
         budget: Annotated[int | None, typer.Option(min=1, help="Client-steps that each method may spend.")] = None,
         seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
         retries: Annotated[int, typer.Option(min=0, help="Times that a failed trial is taken up again.")] = 2,
         resume: Annotated[Path | None, typer.Option(help="Go on with the search in this folder.")] = None,
         parallel: Annotated[int | None, typer.Option(min=1, help="Trials at once at most.")] = None,
         track: Annotated[list[str] | None, typer.Option(help="Also log to mlflow or wandb.")] = None,
         fleet: Annotated[Literal["ray", "local"], typer.Option(
             help="Trials on Ray, or one after another in this process.")] = "ray",
         address: Annotated[str | None, typer.Option(help="A running Ray cluster, HOST:PORT or auto.")] = None,
         format: Annotated[Literal["table", "json"], typer.Option(help="How to print the result.")] = "table") -> None:
    """Search the ranges of a method's fields, and settings given as ranges: local.lr=loguniform(0.01,0.3)."""
    place: dict[str, Any] = {"parallel": parallel, "fleet": fleet, "address": address, "track": track or []}
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
    from tune.space import separate, spaces_of

    with Screen() as screen:
        if resume is not None:
            found = resume_search(resume, **place, watcher=screen)
        else:
            given = list(settings or [])
            path = Path(given.pop(0)) if given and "=" not in given[0] else None
            fixed, ranges = separate(given)
            config = load(path, fixed)
            names = _words(methods) if methods else [config.method["name"]]
            spaces = spaces_of(names, ranges, config, None if fields is None else _words(fields))
            found = search(config, spaces, samples, out=folder, name=name, metric=metric,
                           searcher=searcher, scheduler=scheduler, grace=grace, budget=budget, seed=seed,
                           retries=retries, **place, watcher=screen)
    if format == "json":
        sys.stdout.write(json.dumps({"best": found.best.id, "folder": str(found.folder),
                                     "trials": json.loads((found.folder / "trials.json").read_text())}) + "\n")
    else:
        out.print(screen.table())
        out.print(f"best: {found.best.id}; raylt run {found.folder / 'best.yaml'}", soft_wrap=True)


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class Screen:
    """Shows a search as it goes: a bar on a terminal, a line per trial."""

    def __init__(self) -> None:
        self._bar = Progress(TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[best]}"),
                             TimeElapsedColumn(), console=err, disable=not err.is_terminal)
        self._plan: Plan
        self._state: State
        self._task: Any = None

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def says(self, text: str) -> None:
        err.print(text, soft_wrap=True, markup=False)

    def starts(self, folder: Path, plan: "Plan", state: "State", at_once: int) -> None:
        self._plan, self._state = plan, state
        total = sum(track.total for track in state.tracks.values())
        many = "as many trials as the budget allows" if total == float("inf") else f"{total:.0f} trials"
        self.says(f"search of {', '.join(plan.methods)}: {many}, {at_once} at once, folder {folder}")
        self._task = self._bar.add_task("", total=None if total == float("inf") else total, best="")

    def ends(self, record: "Record", state: "State") -> None:
        outcome = record.outcome
        values = " ".join(f"{key}={value}" for key, value in record.values.items())
        if record.failed is not None:
            said = f"failed: {record.failed}"
        elif outcome is None or outcome.score is None:
            said = "ended, to be compared with earlier trials"
        else:
            said = f"{outcome.state} after round {outcome.step}  {100 * outcome.score:.2f} %"
        self.says(f"{record.id}  {said}  {values}")
        best = state.best()
        self._bar.update(self._task, completed=sum(r.closed for r in state.trials),
                         best="" if best is None or best.outcome is None or best.outcome.score is None
                         else f"best {best.id} {100 * best.outcome.score:.2f} %")

    def table(self) -> Any:
        from tune.report import table_of
        return table_of(self._plan, self._state)
