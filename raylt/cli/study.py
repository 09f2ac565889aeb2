"""`raylt study | ls | follow`: many runs, how far they are, and carrying them out."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from raylt.cli.options import err, out
from raylt.errors import ConfigError, RayltError

if TYPE_CHECKING:
    from raylt.studies.records import Record
    from raylt.studies.study import Study

Parallel = Annotated[int | None, typer.Option(min=1, help="Runs at once; by default one per core, or per GPU.")]
Fleet = Annotated[Literal["local", "ray"], typer.Option(
    help="A whole run per process, or client actors on Ray, one run after another.")]
Address = Annotated[str | None, typer.Option(help="With --fleet ray: a running cluster, HOST:PORT or auto.")]
Out = Annotated[Path, typer.Option("--out", help="Folder that the study's folder is made in.")]
MixVersions = Annotated[bool, typer.Option(
    "--mix-versions", help="Go on although runs were made by code that computes something else.")]
Keep = Annotated[bool, typer.Option(
    "--record", help="Keep the finished runs in results/NAME.json beside the study's file, which counts them as done.")]


def study(file: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="What is compared.")],
          folder: Out = Path("runs"),
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and the time left; run nothing.")
                             ] = False,
          parallel: Parallel = None, fleet: Fleet = "local", address: Address = None,
          mix_versions: MixVersions = False, record: Keep = False,
          format: Annotated[Literal["table", "json"], typer.Option(help="How to print the result.")] = "table") -> None:
    """Run every arm in every cell with every seed, as far as that has not been done, and compare them."""
    from raylt.studies.definition import read_definition
    from raylt.studies.recorded import place_of
    from raylt.studies.study import Study
    definition = read_definition(file)
    place = place_of(file, definition)
    begin = Study.preview if dry_run else Study.create
    begun = begin(definition, folder, place, mix_versions)
    for line in begun.recorded.passed_over:
        err.print(line, soft_wrap=True)
    if dry_run:
        show_plan(begun, parallel, fleet, format)
    else:
        carry_out(begun, parallel, fleet, address, mix_versions, place if record else None, format)


def carry_out(made: "Study", parallel: int | None, fleet: Literal["local", "ray"], address: str | None,
              mix_versions: bool, record_file: Path | None, format: str) -> None:
    """Runs a study with a bar and prints its comparison; exit code 1 where runs failed."""
    from raylt.studies.tables import of_comparison
    with Screen() as screen:
        failed = made.run(screen, parallel, fleet, address, mix_versions, record_file)
    comparison = made.compare(mix_versions=mix_versions)
    if format == "json":
        sys.stdout.write(json.dumps({"folder": str(made.folder), "failed": failed, **comparison.to_json()}) + "\n")
    else:
        out.print(of_comparison(comparison).screen())
        out.print(f"{made.folder}; raylt report {made.folder} draws it", soft_wrap=True)
    elsewhere = [record.folder for record in made.records if record.state == "running"]
    if elsewhere:
        err.print(f"{len(elsewhere)} runs are held by another process and are not in these tables", soft_wrap=True)
    if failed:
        raise RayltError(f"{made.folder}: {len(failed)} runs failed, the first is {failed[0]}; the same command tries "
                         "them again")


def show_plan(planned: "Study", parallel: int | None, fleet: str, format: str = "table") -> None:
    """The runs of a study, their states and the time that is left, as far as any has been timed."""
    from raylt.studies.estimate import Pace
    from raylt.studies.places import slots
    from raylt.studies.schedule import makespan
    from raylt.studies.stems import stems
    pace, plans = Pace(planned.records), planned.planned
    here = [plan for plan, record in zip(plans, planned.records, strict=True) if not planned.is_on_record(record)]
    shared = stems(here)
    table = Table("run", "state", "round", "left", *(["trained as"] if shared else []), box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), show_edge=False)
    left, entries = [], []
    for plan, record in zip(plans, planned.records, strict=True):
        stem = shared.get(plan.folder)
        seconds = 0.0 if record.state == "done" else pace.left(plan, max(record.steps, stem.steps if stem else 0))
        left.append(seconds)
        state = "on record" if planned.is_on_record(record) else record.state
        table.add_row(plan.folder, state, f"{record.steps}/{record.planned_steps}",
                      "" if record.state == "done" else duration(seconds) if pace.measured else "?",
                      *([stem.folder if stem else ""] if shared else []))
        entries.append({"run": plan.folder, "state": state, "steps": record.steps,
                        "planned_steps": record.planned_steps, "left_s": seconds if pace.measured else None,
                        "trained_as": stem.folder if stem else None})
    at_once = slots(parallel, fleet, [plan.config for plan in plans])
    if format == "json":
        sys.stdout.write(json.dumps({"runs": entries, "at_once": at_once,
                                     "left_s": makespan(left, at_once) if pace.measured else None}) + "\n")
        return
    out.print(table)
    open_ = sum(record.state != "done" for record in planned.records)
    time_left = (f"about {duration(makespan(left, at_once))}, {at_once} at once" if pace.measured else
                 "how long they take is known when the first has taken a round")
    trained = len(here) - len(shared)
    trainings = f"{trained} training{'s' * (trained != 1)}, which the others go on from; " if shared else ""
    out.print(f"{len(planned.records)} runs, {trainings}{open_} to do: {time_left if open_ else 'nothing is left'}")


def ls(folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where run folders are.")] = Path("runs"),
       format: Annotated[Literal["table", "json"], typer.Option(help="How to print it.")] = "table") -> None:
    """List runs and studies: state, round, accuracy and age."""
    from raylt.studies.listing import listing
    entries = listing(folder)
    if format == "json":
        sys.stdout.write(json.dumps([entry.to_json() for entry in entries], indent=1) + "\n")
        return
    table = Table("name", "method", "state", "round", "accuracy", "age", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                  show_edge=False)
    for entry in entries:
        accuracy = "" if entry.accuracy is None else f"{100 * entry.accuracy:.2f} %"
        table.add_row(entry.name, entry.method, entry.state, entry.progress, accuracy,
                      "" if entry.age_s is None else duration(entry.age_s))
    out.print(table if entries else f"{folder}: no runs")


def follow(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that another process "
                                                      "does.")],
           every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0) -> None:
    """Show a run that another terminal started, until it ends; stopping this does not stop the run."""
    from raylt.studies.records import read_run
    record = read_run(run_folder)
    if not record.config:
        raise ConfigError(f"{run_folder}: not a run folder that can be read ({record.problem or 'no config.yaml'}); "
                          "raylt ls shows what there is")
    shown = 0
    what = TextColumn("{task.fields[what]}", markup=False)
    with Progress(TextColumn("{task.description}"), BarColumn(), what, console=err,
                  disable=not err.is_terminal) as bar:
        task = bar.add_task("round", total=record.planned_steps, what="")
        while True:
            for place in range(shown, record.steps):
                show_step(record, place, bar, task)
            shown = record.steps
            if record.state != "running":
                break
            time.sleep(every)
            record = read_run(run_folder)
    out.print({"done": "done", "damaged": f"damaged: {record.problem}"}.get(
        record.state, f"stopped after step {record.steps}; raylt resume {run_folder} goes on"), soft_wrap=True)
    if record.state == "damaged":
        raise typer.Exit(1)


def show_step(record: "Record", place: int, bar: Progress, task: Any) -> None:
    """One committed step: a line, or on a terminal the bar."""
    step, accuracy = record.curve["step"][place], record.curve["accuracy"][place]
    judged = "" if accuracy is None else f"  accuracy {100 * accuracy:.2f} %"
    bar.update(task, completed=min(step, record.planned_steps), what=judged.strip())
    if not err.is_terminal:
        out.print(f"round {step}/{record.planned_steps}{judged}" if step <= record.planned_steps
                  else f"finish{judged}")


def duration(seconds: float) -> str:
    """Seconds in the unit that a person would use."""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"


class Screen:
    """Shows a study as it goes: one bar with the time left on a terminal, a line per run elsewhere."""

    def __init__(self) -> None:
        what = TextColumn("{task.fields[what]}", markup=False)
        self._bar = Progress(TextColumn("runs"), BarColumn(), what, console=err, disable=not err.is_terminal)
        self._task = self._bar.add_task("", total=1.0, what="starting")

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def says(self, text: str) -> None:
        err.print(text, soft_wrap=True)

    def progress(self, done: int, total: int, running: Sequence[str], share: float, left_s: float | None) -> None:
        left = "" if left_s is None else f"  ETA {duration(left_s)}"
        self._bar.update(self._task, completed=share, what=f"{done}/{total}{left}  {', '.join(running)}")
