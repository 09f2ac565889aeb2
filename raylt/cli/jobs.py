"""The commands `raylt submit | stop`: run a command as a job on a cluster, and end a run at its next checkpoint."""

import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from raylt.cli.options import Format, config_of, err, out, print_json
from raylt.errors import ConfigError, quoted
from raylt.own_code.top_level_names import claim

RUNS = "~/raylt/runs"  # on the cluster
DATA = "~/raylt/data"  # on the cluster
TRACKERS = ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_MODE")  # environment variables to pass to a job
YAML = (".yaml", ".yml")
COMMANDS = ("run", "resume", "tune", "study")
OF_NEW_FOLDERS = ("run", "tune")  # commands with --name, which create a new folder
DashboardAddress = Annotated[
    str | None,
    typer.Option(help="Use the jobs of the cluster with this dashboard, such as http://head:8265."),
]


def submit(
    context: typer.Context,
    command: Annotated[
        str,
        typer.Argument(metavar="run|resume|tune|study ...", help="Command to run on the cluster, with its arguments."),
    ],
    address: Annotated[
        str | None, typer.Option(help="Dashboard of the cluster, such as http://head:8265; by default RAYLT_DASHBOARD.")
    ] = None,
) -> None:
    """Run a command on a cluster as a Ray job, which survives this terminal: raylt submit run method=sfd.

    raylt uploads the current folder, except runs, data and files that .gitignore matches.

    The default for --out is ~/raylt/runs on the cluster. For run and tune, the default for data.root is ~/raylt/data.
    """
    from raylt.own_code.commands import plugin_options
    from raylt.registry import resolve

    words = list(context.args)
    if command not in COMMANDS:
        raise ConfigError(
            f"submit: {command} cannot run as a job. Submit one of {', '.join(COMMANDS)}.",
            code="command.usage",
            key="command",
            value=command,
        )
    parsed = _parsed(context, command, words)
    words += plugin_options()
    _check_files(words)
    if command == "run":
        _ = resolve(config_of(parsed["settings"]))  # raises errors here instead of in the job's log
    folder = str(parsed["run_folder"]) if command == "resume" else complete(command, words)
    variables = {name: os.environ[name] for name in TRACKERS if name in os.environ}
    url = dashboard_of(address)
    claim()
    from actors.cluster.jobs import connect

    with connect(url) as jobs:
        id = jobs.submit([command, *words], folder, Path.cwd(), variables)
    out.print(f"{id}: raylt {command}{f', run folder {folder}' if folder else ''}", soft_wrap=True)
    out.print(f"raylt follow {id} --address {url}", soft_wrap=True)


def stop(
    run: Annotated[str, typer.Argument(metavar="RUN | JOB", help="Run folder; with --address a job, or its run.")],
    address: DashboardAddress = None,
) -> None:
    """End a run at its next checkpoint, so that raylt resume continues it without loss."""
    if address is None:
        from raylt.runs.run import Run
        from raylt.runs.stopping import ask_to_stop

        ask_to_stop(Run.open(run).folder)
        out.print(f"{run}: ends after its next checkpoint; follow it with raylt follow {quoted(run)}", soft_wrap=True)
        return
    claim()
    from actors.cluster.jobs import END_STATES, connect

    with connect(address) as jobs:
        job = jobs.find(run)
        if job.state in END_STATES:
            raise ConfigError(
                f"{job.id}: the job has already ended ({job.state}). Name a running job or run.",
                code="run.not-running",
                job=job.id,
            )
        if job.folder is None:  # a job with several runs is interrupted by a signal, and can be resumed
            jobs.interrupt(job)
            out.print(f"{job.id}: was interrupted", soft_wrap=True)
            return
        asked = jobs.wait(jobs.submit(["stop", job.folder], None, None, {}))
        if asked.state != "SUCCEEDED":
            err.print(jobs.output(asked.id).strip(), soft_wrap=True)
            raise typer.Exit(1)
    out.print(f"{job.id}: ends after its next checkpoint", soft_wrap=True)


def follow_job(name: str, address: str, every_s: float) -> None:
    """Print the output of a job until the job ends. Stopping this function does not stop the job."""
    claim()
    from actors.cluster.jobs import connect

    with connect(address) as jobs:
        job = jobs.find(name)
        try:
            for text in jobs.lines(job, every_s):
                out.print(text, end="", soft_wrap=True)
        except KeyboardInterrupt:
            again = f"raylt follow {job.id} --address {address}"
            out.print(f"{job.id}: continues on the cluster; follow it again with {again}", soft_wrap=True)
            return
        ended = jobs.find(job.id)
    out.print(f"{ended.id}: {ended.state.lower()}")


def list_jobs(address: str, format: Format) -> None:
    """Print a table of raylt's jobs on a cluster, without the helper jobs of `raylt stop`."""
    claim()
    from actors.cluster.jobs import connect

    with connect(address) as jobs:
        listed = [job for job in jobs.list() if job.command.split(maxsplit=1)[0] in COMMANDS]
    if format is Format.json:
        print_json([asdict(job) for job in listed])
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("job", no_wrap=True)  # so that ids can be copied
    for head in ("state", "command", "started"):
        table.add_column(head)
    for job in listed:
        started = "" if job.started is None else f"{datetime.fromtimestamp(job.started):%Y-%m-%d %H:%M}"
        table.add_row(job.id, job.state.lower(), job.command, started)
    out.print(table if listed else f"{address}: no raylt jobs")


def complete(command: str, words: list[str]) -> str | None:
    """Append options for folders on the cluster to a command's words, unless the user gave them.

    Args:
        command: `run`, `tune` or `study`.
        words: Options and arguments of the command, changed in place.

    Returns:
        The run folder on the cluster; None for a command with several runs.
    """
    if _has_option(words, "--resume"):  # a resumed search keeps its folders
        return None
    if not _has_option(words, "--out"):
        words += ["--out", RUNS]
    if command in OF_NEW_FOLDERS and not _has_option(words, "--name"):
        words += ["--name", f"{command}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]]
    if command in OF_NEW_FOLDERS and not any(word.startswith("data.root=") for word in words):
        words.append(f"data.root={DATA}")
    if command != "run":
        return None
    return f"{_option(words, '--out')}/{_option(words, '--name')}"


def dashboard_of(address: str | None) -> str:
    """Return the address of Ray's dashboard, from the option or from RAYLT_DASHBOARD.

    Raises:
        ConfigError: Neither is set.
    """
    address = address or os.environ.get("RAYLT_DASHBOARD")
    if address is None:
        raise ConfigError(
            "--address: missing. Give the dashboard of the cluster, as in http://head:8265, or set RAYLT_DASHBOARD.",
            code="config.missing",
            key="--address",
        )
    return address


def _parsed(context: typer.Context, command: str, words: list[str]) -> dict[str, Any]:
    """Return the parameters of a command; raise a usage error if it does not have these options and arguments."""
    group: Any = context.find_root().command
    return group.get_command(context, command).make_context(command, list(words), parent=context.find_root()).params


def _check_files(words: list[str]) -> None:
    """Raise ConfigError if a configuration or plugin is outside the folder that is uploaded to the cluster."""
    for word in words:
        value = word.removeprefix("--plugin=")
        if not value.endswith((*YAML, ".py")) or value.startswith("recipe:") or "=" in value:
            continue
        file = Path(value)
        if file.is_absolute() or not file.resolve().is_relative_to(Path.cwd().resolve()) or not file.is_file():
            raise ConfigError(
                f"{value}: is not a file in the current folder, which is uploaded to the cluster. Copy it here, and "
                "give its relative path.",
                code="job.file-elsewhere",
                path=value,
            )


def _has_option(words: list[str], name: str) -> bool:
    return any(word == name or word.startswith(f"{name}=") for word in words)


def _option(words: list[str], name: str) -> str:
    for place, word in enumerate(words):
        if word == name and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    raise ConfigError(
        f"{name}: needs a value ({' '.join(words)}). Write {name} VALUE or {name}=VALUE.",
        code="command.usage",
        key=name,
    )
