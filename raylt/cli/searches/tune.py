"""The command `raylt tune`."""

import json
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from raylt.cli.options import (
    Address,
    Format,
    FormatOption,
    SearchFleetName,
    Settings,
    TrackOption,
    divide,
    out,
    print_json,
    say_how_to_resume,
)
from raylt.cli.searches import ray_tune
from raylt.config import Config, assign, check, read
from raylt.errors import ConfigError
from raylt.own_code.top_level_names import claim

if TYPE_CHECKING:
    from tune import SearchResult


class MetricName(StrEnum):
    """The metrics of a search, see `tune.records.Metric`."""

    accuracy = "accuracy"
    many = "many"
    medium = "medium"
    few = "few"
    owned = "owned"
    matched = "matched"
    miou = "miou"
    local = "local"
    worst_decile = "worst_decile"


def tune(
    context: typer.Context,
    settings: Settings = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Trials of each method; by default 20, or as many as --budget allows."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the search's folder.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder in which the search's folder is made.")] = Path("runs"),
    methods: Annotated[
        str | None,
        typer.Option(help="Methods to search, as in sfd,fedavg; by default the method of the settings."),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(help="Fields of the methods to search, as in gamma,tau; by default all that are not given."),
    ] = None,
    metric: Annotated[
        list[MetricName] | None,
        typer.Option(
            help="Metric to optimise, on validation samples; by default accuracy, or where clients have models of "
            "their own local, the mean over the clients on the samples taken from them; worst_decile is that of the "
            "worst tenth of the clients. If repeated, the first metric decides and all give the Pareto front."
        ),
    ] = None,
    searcher: Annotated[Literal["tpe", "random", "grid"], typer.Option(help="Rule that chooses values.")] = "tpe",
    scheduler: Annotated[
        Literal["asha", "none", "pbt", "hyperband", "median"],
        typer.Option(
            help="Rule that stops trials early. asha and none give the same search for the same seed, and with tpe the "
            "same --parallel; pbt, hyperband and median are Ray Tune's own, whose decisions depend on timing."
        ),
    ] = "asha",
    grace: Annotated[
        int | None, typer.Option(min=1, help="Rounds before trials are compared; by default a ninth of all.")
    ] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Client-steps that each method may spend.")] = None,
    count: Annotated[
        Literal["steps", "passes"],
        typer.Option(
            help="Unit of --budget: steps, or passes, where a step costs the passes over samples that its method "
            "makes, as a multiple of FedAvg's. The server's own work counts as FedAvg's steps."
        ),
    ] = "steps",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search; pbt uses it for the first values only.")] = 0,
    splits: Annotated[
        int,
        typer.Option(
            min=1,
            max=20,
            help="Splits on which a trial runs, with data.seed and the seeds that follow it. The worst of them is the "
            "score of a finished trial.",
        ),
    ] = 1,
    retries: Annotated[int, typer.Option(min=0, help="Number of times to continue a failed trial.")] = 2,
    resume: Annotated[Path | None, typer.Option(help="Folder of a search to continue.")] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of trials at once; by default as many as the cluster holds, and 1 with --fleet local. "
            "With tpe, another number gives another search.",
        ),
    ] = None,
    track: TrackOption = None,
    fleet: Annotated[
        SearchFleetName, typer.Option(help="Run trials on Ray, or one after another in this process (local).")
    ] = SearchFleetName.ray,
    address: Address = None,
    format: FormatOption = Format.table,
) -> None:
    """Search for the best values of method fields and of settings given as ranges: local.lr=loguniform(0.01,0.3).

    Trials are judged on a fifth of the training samples, or on the share data.validation if it is above 0.
    """
    claim()
    execution: dict[str, Any] = {"parallel": parallel, "fleet": fleet.value, "address": address, "track": track or []}
    if resume is not None:
        _check_resumed(context, resume, [*execution, "resume", "format"])
        if ray_tune.is_one(resume):
            ray_tune.resume(resume, address, format)
        else:
            _resume(resume, execution, format)
        return
    config, spaces = _searched(settings, _words(methods or ""), None if fields is None else _words(fields))
    choices: dict[str, Any] = {"searcher": searcher, "scheduler": scheduler, "grace": grace, "seed": seed}
    choices |= {"samples": samples, "retries": retries}
    metrics = [metric.value for metric in metric or []]
    if scheduler in ("asha", "none"):
        choices |= {"out": folder, "name": name, "budget": budget, "count": count, "splits": splits}
        _search(config, spaces, choices | execution, metrics, format)
        return
    chosen = searcher if _is_given(context, "searcher") else None
    ray_tune.check_options(fleet.value, budget, count, splits, track or [], scheduler, chosen)
    choices |= {"metrics": metrics, "parallel": parallel}
    ray_tune.search(config, spaces, folder, name, address, choices, format)


def _check_resumed(context: typer.Context, folder: Path, allowed: Collection[str]) -> None:
    """Raise ConfigError if the command changes settings of the search that it continues."""
    fixed = [key for key in context.params if key not in allowed and _is_given(context, key)]
    if fixed:
        names = ", ".join(sorted(fixed)).replace("folder", "out")
        raise ConfigError(
            f"--resume: a search keeps the settings that it was started with ({folder}). Leave out {names}.",
            code="config.conflict",
            key="--resume",
            value=str(folder),
            options=names,
        )


def _is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user gave a parameter on the command line."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _resume(folder: Path, execution: Mapping[str, Any], format: Format) -> None:
    from tune import resume
    from tune.report.screen import SearchProgress

    with say_how_to_resume() as started:
        result = resume(folder, **execution, callbacks=[SearchProgress(), started])
    _print_result(result, format)


def _search(
    config: Config, spaces: Mapping[str, Any], options: Mapping[str, Any], metrics: list[Any], format: Format
) -> None:
    from tune import search
    from tune.report.screen import SearchProgress

    with say_how_to_resume() as started:
        result = search(config, spaces, metric=metrics or None, **options, callbacks=[SearchProgress(), started])
    _print_result(result, format)


def _searched(
    settings: Sequence[str] | None, methods: list[str], fields: list[str] | None
) -> tuple[Config, dict[str, Any]]:
    """Return the configuration that all trials share, and the spaces by method.

    Args:
        settings: The settings of the command; a value can be a range.
        methods: Methods to search. If empty, the method of the settings is searched.
        fields: Fields to search. By default, all fields that the settings do not set.
    """
    from tune.space import separate, spaces_of

    file, given = divide(settings)
    fixed, ranges = separate(given)
    tree = read(file, fixed)
    if methods and "method" not in tree:
        assign(tree, "method", methods[0])
    config = check(Config, tree)
    return config, spaces_of(methods or [config.method["name"]], ranges, config, fields)


def _print_result(result: "SearchResult", format: Format) -> None:
    from tune.report.results import front_lines, importance_lines, run_command, table_of

    if format is Format.json:
        trials = json.loads((result.folder / "trials.json").read_text())
        print_json({"best": result.best.id, "folder": str(result.folder), "trials": trials})
        return
    out.print(table_of(result.plan, result.state).screen())
    for line in (*importance_lines(result.folder), *front_lines(result.folder, result.plan, result.state)):
        out.print(line, soft_wrap=True)
    out.print(f"best: {result.best.id}; {run_command(result.folder)}", soft_wrap=True)


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
