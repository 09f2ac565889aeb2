"""The commands `raylt study | ls | follow`: run studies, list runs, and show the progress of a run."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from raylt.cli.jobs import DashboardAddress, follow_job, list_jobs
from raylt.cli.options import Format, err, out
from raylt.errors import ConfigError, RayltError, count_of, quoted
from raylt.runs.callbacks.base import Callback, StudyStatus

if TYPE_CHECKING:
    from raylt.studies.definition import Planned
    from raylt.studies.records.record import RunRecord
    from raylt.studies.running.shared_training import Stem
    from raylt.studies.running.time_left import Pace
    from raylt.studies.study import Study

Parallel = Annotated[
    int | None,
    typer.Option(min=1, help="Number of simultaneous runs; by default one per GPU, or per core without GPUs."),
]
Fleet = Annotated[
    Literal["local", "ray"],
    typer.Option(help="Do each run in one process, or one run after another with client actors on Ray."),
]
OF_CLIENTS: dict[str | None, str] = {"matched": " own mix", "local": " own images"}  # marks in the list of runs
Address = Annotated[str | None, typer.Option(help="Use this Ray cluster, HOST:PORT or auto; needs --fleet ray.")]
Out = Annotated[Path, typer.Option("--out", help="Folder in which to create the study's folder.")]
MixVersions = Annotated[
    bool, typer.Option("--mix-versions", help="Continue even if another version of the code made some of the runs.")
]
Record = Annotated[
    bool,
    typer.Option(
        "--record",
        help="Add finished and diverged runs to results/NAME.json next to the study's file; finished runs in it count "
        "as done.",
    ),
]


def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Definition of the study.")],
    folder: Out = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the runs and the time left; run nothing.")] = False,
    parallel: Parallel = None,
    fleet: Fleet = "local",
    address: Address = None,
    mix_versions: MixVersions = False,
    record: Record = False,
    format: Annotated[Literal["table", "json"], typer.Option(help="Format of the result.")] = "table",
) -> None:
    """Run every arm in every cell with every seed, and compare the arms; finished runs are not repeated."""
    from raylt.studies.definition import read_definition
    from raylt.studies.records.recorded_runs import record_path
    from raylt.studies.study import Study

    definition = read_definition(file)
    if definition.tune is not None:
        from tune.arm import check_searches

        check_searches(definition)
    record_file = record_path(file, definition)
    prepare = Study.preview if dry_run else Study.create
    prepared = prepare(definition, folder, record_file, mix_versions)
    for line in prepared.recorded.passed_over:
        err.print(line, soft_wrap=True)
    if unplanned := prepared.unplanned:
        err.print(
            f"{prepared.folder}: the study no longer plans {count_of(len(unplanned), 'run')} in its folder (the first "
            f"is {unplanned[0]}). Tables leave out such runs.",
            soft_wrap=True,
        )
    if dry_run:
        show_plan(prepared, parallel, fleet, format)
    else:
        carry_out(prepared, parallel, fleet, address, mix_versions, record_file if record else None, format)


def ls(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder that contains run folders.")] = Path(
        "runs"
    ),
    address: DashboardAddress = None,
    format: Annotated[Literal["table", "json"], typer.Option(help="Format of the list.")] = "table",
) -> None:
    """List runs, studies and searches: state, round, accuracy, age, and the number n of finished runs' test images.

    With --address, list the jobs of a cluster.
    """
    if address is not None:
        list_jobs(address, Format(format))
        return
    from raylt.studies.report.listing import listing

    entries = listing(folder)
    if format == "json":
        sys.stdout.write(json.dumps([entry.to_json() for entry in entries], indent=1) + "\n")
        return
    table = plain_table("name", "method", "state", "round", "accuracy", "n", "age")
    table.columns[4].no_wrap = True  # names and methods wrap first
    for entry in entries:
        accuracy = "" if entry.accuracy is None else f"{100 * entry.accuracy:.2f} %{OF_CLIENTS.get(entry.figure, '')}"
        age = "" if entry.age_s is None else duration(entry.age_s)
        images = "" if entry.images is None else str(entry.images)
        state = entry.state if entry.error is None else f"{entry.state} ({entry.error})"
        table.add_row(entry.name, entry.method, state, entry.progress, accuracy, images, age)
    out.print(table if entries else f"{folder}: no runs")


def follow(
    run_folder: Annotated[
        Path,
        typer.Argument(metavar="RUN | JOB", help="Run folder; with --address, a job or its run."),
    ],
    every: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds between two updates.")] = 1.0,
    address: DashboardAddress = None,
) -> None:
    """Show the progress of a run in another process until it ends; stopping this command does not stop the run."""
    if address is not None:
        follow_job(str(run_folder), address, every)
        return
    from raylt.own_code.commands import own_command
    from raylt.runs.folder.reader import Files
    from raylt.studies.records.record import read_run

    record = read_run(run_folder)
    if not record.config:
        raise ConfigError(
            f"{run_folder}: is not a run folder that can be read ({record.problem or 'no config.yaml'}). "
            "List the runs with raylt ls.",
            code="run.not-found",
            path=str(run_folder),
        )
    shown = 0
    text = TextColumn("{task.fields[what]}", markup=False)
    with Progress(TextColumn("{task.description}"), BarColumn(), text, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("round", total=record.planned_steps, what="")
        while True:
            for index in range(shown, len(record.curve.get("step", []))):  # a damaged run has no curve
                show_step(record, index, bar, task)
            shown = record.steps
            if record.state != "running":
                break
            time.sleep(every)
            record = read_run(run_folder)
    if record.state == "damaged":
        out.print(f"damaged: {record.problem}", soft_wrap=True)
        raise typer.Exit(1)
    if record.state == "failed":
        code = "" if record.error is None else f" ({record.error})"
        out.print(f"failed{code} after step {record.steps}: {record.problem}", soft_wrap=True)
        raise typer.Exit(1)
    plugins = dict.fromkeys(each["origin"] for each in Files(run_folder).plugins() if each["origin"].endswith(".py"))
    stopped = f"stopped after step {record.steps}; continue with {own_command('resume', run_folder, plugins=plugins)}"
    out.print("done" if record.state == "done" else stopped, soft_wrap=True)


def carry_out(
    prepared: "Study",
    parallel: int | None,
    fleet: Literal["local", "ray"],
    address: str | None,
    mix_versions: bool,
    record_file: Path | None,
    format: str,
) -> None:
    """Run a study with a progress bar, and print its comparison.

    Raises:
        RayltError: Runs failed.
    """
    from raylt.studies.report.comparison_tables import comparison_table

    with StudyProgress() as progress:
        failed = prepared.run([progress], parallel, fleet, address, mix_versions, record_file)
    comparison = prepared.compare(mix_versions=mix_versions)
    if format == "json":
        content = {"folder": str(prepared.folder), "failed": failed, **comparison.to_json()}
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        out.print(comparison_table(comparison).screen())
        out.print(f"{prepared.folder}; draw it with raylt report {quoted(prepared.folder)}", soft_wrap=True)
    elsewhere = [record.folder for record in prepared.records if record.state == "running"]
    if elsewhere:
        runs = count_of(len(elsewhere), "run")
        err.print(f"not in these tables: {runs} that another process is doing", soft_wrap=True)
    raise_if_failed(prepared, failed)


def raise_if_failed(study: "Study", failed: Sequence[str]) -> None:
    """Raise an error that names the first failed run, if any run failed."""
    if failed:
        raise RayltError(
            f"{study.folder}: {count_of(len(failed), 'run')} failed (the first is {failed[0]}). Repeat the command to "
            "try again.",
            code="study.runs-failed",
            path=str(study.folder),
            runs=list(failed),
        )


def show_plan(
    planned: "Study",
    parallel: int | None,
    fleet: str,
    format: str = "table",
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Print the runs of a study with their states, and the estimated time left if rounds were timed.

    Args:
        planned: The study.
        parallel: Number of simultaneous runs.
        fleet: "local" or "ray".
        format: "table" or "json".
        more: Further fields of the JSON document.
    """
    from raylt.studies.running.scheduler import makespan
    from raylt.studies.running.shared_training import stems
    from raylt.studies.running.time_left import Pace
    from raylt.studies.running.worker_slots import slot_count

    pace = Pace(planned.records)
    plans = planned.planned
    not_on_record = [
        plan for plan, record in zip(plans, planned.records, strict=True) if not planned.is_on_record(record)
    ]
    shared = stems(not_on_record)
    left = [_time_left(pace, plan, record, shared) for plan, record in zip(plans, planned.records, strict=True)]
    at_once = slot_count(parallel, fleet, [plan.config for plan in plans])
    searches = _open_searches(planned)
    searching = [_search_time(pace, planned, cell) for cell, _ in searches]
    total = makespan(searching, at_once) + makespan(left, at_once) if pace.measured else None
    entries = [
        {
            "run": plan.folder,
            "state": "on record" if planned.is_on_record(record) else record.state,
            "steps": record.steps,
            "planned_steps": record.planned_steps,
            "left_s": seconds if pace.measured else None,
            "trained_as": shared[plan.folder].folder if plan.folder in shared else None,
        }
        for plan, record, seconds in zip(plans, planned.records, left, strict=True)
    ]
    if format == "json":
        open_searches = [{"cell": cell, "arm": arm} for cell, arm in searches]
        content = {"runs": entries, "searches": open_searches, "at_once": at_once, "left_s": total, **more}
        sys.stdout.write(json.dumps(content) + "\n")
        return
    untimed = [
        plan
        for plan, record in zip(plans, planned.records, strict=True)
        if record.state != "done" and pace.lacks_finish(plan, record.steps)
    ]
    open_runs = sum(record.state != "done" for record in planned.records)
    out.print(_plan_table(entries, bool(shared)))
    trainings = ""
    if shared:
        count = len(not_on_record) - len(shared)
        trainings = f"{count_of(count, 'training')} that the others branch from; "
    time_left = "the time is unknown until a run has finished a round"
    if not open_runs and not searches:
        time_left = "all are done"
    elif total is not None:
        last_phases = ", without last phases that were not timed yet" if untimed else ""
        time_left = f"about {duration(total)}, {at_once} at once{last_phases}"
    out.print(f"{count_of(len(entries), 'run')}, {trainings}{open_runs} to do: {time_left}")
    if searches:
        out.print(_searches_text(planned, searches), soft_wrap=True)
    for line in _last_phases(untimed):
        out.print(line, soft_wrap=True)


def _open_searches(planned: "Study") -> list[tuple[str, str]]:
    """Return the cell and the arm of each search that a study has to make before its runs."""
    if planned.definition.tune is None:
        return []
    from tune.arm import open_searches

    return open_searches(planned.definition, planned.tuned)


def _search_time(pace: "Pace", planned: "Study", cell: str) -> float:
    """Predict the duration of a search in a cell: its budget is a number of runs of the reference arm."""
    definition = planned.definition
    assert definition.tune is not None
    reference = definition.run(cell, definition.compared_to, definition.all_seeds[0], planned.tuned)
    return definition.tune.runs * pace.left(reference, 0)


def _searches_text(planned: "Study", searches: Sequence[tuple[str, str]]) -> str:
    """Name the searches that a study has to make before its runs, with their budget."""
    tuning = planned.definition.tune
    assert tuning is not None
    names = "; ".join(f"{arm} in {cell}" if cell else arm for cell, arm in searches)
    budget = f"{count_of(tuning.runs, 'run')} of {planned.definition.compared_to}"
    count = count_of(len(searches), "search", "searches")
    return f"{count} before these runs, each with the budget of {budget}: {names}"


def _last_phases(plans: "Sequence[Planned]") -> list[str]:
    """Describe the phase after the last round, for each arm whose last phase takes long.

    Args:
        plans: Runs whose last phase was not timed yet.
    """
    from raylt.core.device import one_thread
    from raylt.core.method import Method
    from raylt.registry import resolve
    from raylt.runs.start import lacks_files, preview_run

    lines = []
    for arm, config in {plan.arm: plan.config for plan in reversed(plans)}.items():
        if type(resolve(config).method).last_phase is Method.last_phase:
            continue
        try:
            setup, task, model = preview_run(config)
        except RayltError as error:
            if not lacks_files(error):
                raise
            continue
        with one_thread():  # the text gives seconds on one core
            text = setup.method.last_phase(task.spec, model)
        if text:
            lines.append(f"last phase of {arm}: {text}")
    return lines


def _time_left(pace: "Pace", plan: "Planned", record: "RunRecord", shared: "Mapping[str, Stem]") -> float:
    if record.state == "done":
        return 0.0
    stem = shared.get(plan.folder)
    return pace.left(plan, max(record.steps, stem.steps if stem else 0))


def _plan_table(entries: Sequence[dict[str, Any]], shared: bool) -> Table:
    table = plain_table("run", "state", "round", "left", *(["trained as"] if shared else []))
    for entry in entries:
        left = "?" if entry["left_s"] is None else duration(entry["left_s"])
        if entry["state"] in ("done", "on record"):
            left = ""
        trained_as = [entry["trained_as"] or ""] if shared else []
        table.add_row(entry["run"], entry["state"], f"{entry['steps']}/{entry['planned_steps']}", left, *trained_as)
    return table


def show_step(record: "RunRecord", index: int, bar: Progress, task: Any) -> None:
    """Show one committed step on the progress bar, or as a line if the output is not a terminal."""
    step = record.curve["step"][index]
    accuracy = record.curve["accuracy"][index]
    judged = "" if accuracy is None else f"  accuracy {100 * accuracy:.2f} %"
    bar.update(task, completed=min(step, record.planned_steps), what=judged.strip())
    if not err.is_terminal:
        out.print(f"round {step}/{record.planned_steps}{judged}" if step <= record.planned_steps else f"finish{judged}")


def plain_table(*columns: str) -> Table:
    """Return an empty table with a rule below its heading."""
    return Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def duration(seconds: float) -> str:
    """Return a duration as text, in the largest unit that fits."""
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} s"


class StudyProgress(Callback):
    """Shows the progress of a study: a bar with the time left on a terminal, otherwise a line per run."""

    def __init__(self) -> None:
        text = TextColumn("{task.fields[what]}", markup=False)
        self._bar = Progress(TextColumn("runs"), BarColumn(), text, console=err, disable=not err.is_terminal)
        self._task = self._bar.add_task("", total=1.0, what="starting")

    def __enter__(self) -> "StudyProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_message(self, text: str, minor: bool = False) -> None:
        err.print(text, soft_wrap=True)

    def on_study_progress(self, status: StudyStatus) -> None:
        last_phases = " and last phases" if status.untimed_finish else ""
        left = "" if status.left_s is None else f"  ETA {duration(status.left_s)}{last_phases}"
        what = f"{status.done}/{status.total}{left}  {', '.join(status.running)}"
        self._bar.update(self._task, completed=status.share, what=what)
