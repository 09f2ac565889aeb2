"""The command line: raylt run | resume | tune | plan | debug | features | clusters | show | clients | methods |
settings | data | doctor. Exit code 2 for input that cannot be used, 1 for a failed run."""

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from raylt.cli.debug import debug
from raylt.cli.plot import clients, clusters, features, show
from raylt.cli.reproduce import register as register_reproduce
from raylt.cli.study import register as register_study
from raylt.cli.tune import tune
from raylt.config import Config, load
from raylt.errors import ConfigError, RayltError, one_line

if TYPE_CHECKING:
    from raylt.core.experiment import Report

# Modules that import torch are imported inside the commands: --help and a mistyped key should not wait for it.

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Federated learning for non-IID, long-tailed data, on Ray.")
out, err = Console(highlight=False), Console(stderr=True, highlight=False)
ClickException: Any = typer.BadParameter.__mro__[2]     # of the copy of click that typer may bring


class FleetName(StrEnum):
    ray = "ray"
    local = "local"


class Format(StrEnum):
    table = "table"
    json = "json"


Settings = Annotated[list[str] | None, typer.Argument(
    metavar="[CONFIG.yaml] [key=value ...]", help="A configuration file, then settings that change it.")]
FleetOption = Annotated[FleetName, typer.Option("--fleet", help="Client actors on Ray, or all in this process.")]
Address = Annotated[str | None, typer.Option(help="A running Ray cluster, HOST:PORT or auto; else a new local one. "
                                             "RAYLT_ADDRESS sets it, and in a Ray job it is the job's cluster.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print the result.")]


@app.command()
def run(settings: Settings = None,
        name: Annotated[str | None, typer.Option(help="Name of the run folder.")] = None,
        folder: Annotated[Path, typer.Option("--out", help="Folder that run folders are made in.")] = Path("runs"),
        fleet: FleetOption = FleetName.ray, address: Address = None, format: FormatOption = Format.table) -> None:
    """Train; without a configuration, on scikit-learn's handwritten digits."""
    config = _config(settings)
    if name is not None and (Path(name).name != name or name in ("", ".", "..")):
        raise ConfigError(f"--name {name}: must be the name of one folder; give its place with --out")
    from raylt.runs.runner import start
    with Screen() as screen:
        summary, place = start(config, folder, name, fleet.value, address, screen)
    _show_summary(summary, place, format)


@app.command()
def resume(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
           overrides: Annotated[list[str] | None, typer.Argument(
               metavar="[key=value ...]", help="resources.* and output.* may differ from the first start.")] = None,
           fleet: FleetOption = FleetName.ray, address: Address = None, format: FormatOption = Format.table) -> None:
    """Continue a run after its last committed round; the result is that of an undisturbed run, bit for bit."""
    from raylt.runs.runner import resume as resume_run
    with Screen() as screen:
        summary, place = resume_run(run_folder, overrides or [], fleet.value, address, screen)
    _show_summary(summary, place, format)


app.command()(tune)
app.command()(debug)
app.command()(features)
app.command()(clusters)
app.command()(show)
app.command()(clients)
register_study(app)
register_reproduce(app)


@app.command()
def methods(format: FormatOption = Format.table) -> None:
    """List the methods with their fields: default, search range and equation."""
    from raylt.hyper import range_of
    from raylt.methods import METHODS
    listing = {name: {"paper": method.paper, "problems": list(method.problems), "fields": {
        field: {"default": info.default, "range": str(range_of(info)), "source": info.description}
        for field, info in method.model_fields.items()}} for name, method in METHODS.items()}
    if format is Format.json:
        _print_json(listing)
        return
    for name, entry in listing.items():
        out.print(f"[bold]{name}[/bold]  {entry['paper']}; {' and '.join(entry['problems'])}")
        table = Table("field", "default", "range", "what", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.columns[0].no_wrap = True
        for field, f in entry["fields"].items():
            table.add_row(field, str(f["default"]), f["range"], f["source"])
        if entry["fields"]:
            out.print(table)
        out.print()


@app.command("settings")
def list_settings(format: FormatOption = Format.table) -> None:
    """List all settings with their defaults and meaning."""
    from raylt.config import settings
    listing = {key: {"default": field.default, "what": field.description} for key, field in settings()}
    if format is Format.json:
        _print_json(listing)
        return
    table = Table("setting", "default", "what")
    for key, entry in listing.items():
        table.add_row(key, str(entry["default"]), entry["what"])
    out.print(table)


@app.command()
def data(settings: Settings = None,
         export: Annotated[Path | None, typer.Option(help="Write the split to this file.")] = None,
         split: Annotated[Path | None, typer.Option("--import", help="Use the split in this file.")] = None,
         format: FormatOption = Format.table) -> None:
    """Build the split of a configuration and show who holds what."""
    from raylt.data.task import build_task
    config = _config(settings).data
    if split is not None:
        config = config.model_copy(update={"split": str(split)})
    task = build_task(config)
    if export is not None:
        try:
            task.split.save(export)
        except OSError as error:
            raise ConfigError(f"--export {export}: {error.strerror}; give a file that can be written") from None
    if format is Format.json:
        _print_json({"sha256": task.split.sha256, "names": task.class_names, "groups": task.groups,
                     "classes": task.counts.tolist(), "clients": task.client_counts.tolist()})
        return
    from raylt.runs.summary import split_table
    out.print(f"split {task.split.sha256}", soft_wrap=True)
    out.print(split_table(task, out.width))
    unit = {"classification": "samples", "segmentation": "pixels"}[task.kind]
    for group in ("many", "medium", "few"):
        sizes = [int(n) for n, its in zip(task.counts, task.groups, strict=True) if its == group]
        out.print(f"{group}: {len(sizes)} classes, {sum(sizes)} {unit}")


@app.command()
def plan(settings: Settings = None,
         nodes: Annotated[str | None, typer.Option(help="Nodes that one does not have, as in 4x4gpu16cpu or "
                                                   "server:1x8cpu,client:2x4gpu48cpu.")] = None,
         address: Address = None, format: FormatOption = Format.table) -> None:
    """Show which actors a run would start, what each takes and where the server goes; start nothing."""
    from dataclasses import asdict

    from actors.launch import foresee
    plan = foresee(_config(settings), address, nodes)
    if format is Format.json:
        _print_json(asdict(plan))
        return
    table = Table(show_header=False)
    for what, why in plan.reasons.items():
        table.add_row(what, why)
    out.print(table)


@app.command()
def doctor(address: Address = None, format: FormatOption = Format.table) -> None:
    """Say what is installed and what torch and Ray see here."""
    from actors.doctor import examine
    findings = examine(address)
    if format is Format.json:
        _print_json(findings)
    else:
        table = Table(show_header=False)
        for key, value in findings.items():
            table.add_row(key, str(value))
        out.print(table)
    if findings["problems"]:
        raise typer.Exit(1)


class Screen:
    """Shows a run as it goes: a bar on a terminal, a line per round elsewhere."""

    def __init__(self) -> None:
        self._bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(
            "{task.fields[accuracy]}"), TextColumn("ETA"), TimeRemainingColumn(), console=err,
            disable=not err.is_terminal)
        self._task: TaskID | None = None
        self._total = 0

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def says(self, text: str, minor: bool = False) -> None:
        if err.is_terminal or not minor:
            err.print(text, soft_wrap=True, markup=False)

    def starts(self, folder: Path, config: Config, reports: list[dict[str, Any]]) -> None:
        self._total = config.federation.rounds
        taken = len(reports)
        self.says(f"{config.method['name']} on {config.data.source}, run folder {folder}"
                  + (f", continuing after step {taken}" if taken else ""))
        self._task = self._bar.add_task("round", total=self._total, completed=min(taken, self._total),
                                        accuracy="starting")

    def steps(self, report: "Report") -> None:
        assert self._task is not None
        accuracy = "" if report.accuracy is None else f"accuracy {100 * report.accuracy:.2f} %"
        troubles = [f"client {id}: reply rejected ({why})" for id, why in report.rejected.items()]
        troubles += [f"client {id}: no reply" for id in report.lost]
        for trouble in troubles:
            self.says(f"round {report.step}, {trouble}")
        if err.is_terminal:
            self._bar.update(self._task, completed=min(report.step, self._total), accuracy=accuracy)
        else:
            what = f"round {report.step}/{self._total}" if report.phase == "round" else report.phase
            self.says(f"{what}  {accuracy}  {report.seconds:.2f} s".replace("    ", "  "))


def main() -> None:
    """The entry point: every error that raylt foresees is one line, and `--debug` shows where it came from."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    code = 0
    try:
        code = app([a for a in arguments if a != "--debug"], standalone_mode=False) or 0
    except ClickException as error:
        if message := error.format_message():           # none where the help was printed
            said = message.replace("Value error, ", "").rstrip(".")
            err.print(f"error: {said}; raylt --help shows what there is", soft_wrap=True, markup=False)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if debug:
            raise
        known = isinstance(error, RayltError)
        err.print(f"error: {error}" if known else f"error: {one_line(error)}; --debug shows the traceback",
                  soft_wrap=True, markup=False)
        code = error.exit_code if isinstance(error, RayltError) else 1
    if code == 130:                                     # typer makes Ctrl-C an exit
        err.print("stopped; to go on: raylt resume RUN, raylt tune --resume SEARCH, or the same raylt study again")
    sys.exit(code)


def _config(settings: Sequence[str] | None) -> Config:
    settings = list(settings or [])
    path = Path(settings.pop(0)) if settings and "=" not in settings[0] else None
    return load(path, settings)


def _print_json(tree: Any) -> None:
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")


def _show_summary(summary: dict[str, Any], folder: Path, format: Format) -> None:
    from raylt.runs.summary import table_of
    if format is Format.json:
        _print_json(summary | {"folder": str(folder)})
    else:
        out.print(table_of(summary, str(folder)))

