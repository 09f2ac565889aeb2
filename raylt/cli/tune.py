"""The command `raylt tune`."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from raylt.cli import ray_searches
from raylt.cli.options import (
    Address,
    FleetName,
    Format,
    FormatOption,
    Settings,
    TrackOption,
    divide,
    out,
    say_how_to_resume,
)
from raylt.config import Config, assign, check, read
from raylt.errors import ConfigError
from raylt.own_code.top_level_names import claim
from raylt.runs.callbacks.base import Callbacks


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
            help="Rule that stops trials early. asha and none give the same search for the same seed; pbt, hyperband "
            "and median are Ray Tune's own, whose decisions depend on timing."
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
            "makes, as a multiple of FedAvg's."
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
    parallel: Annotated[int | None, typer.Option(min=1, help="Largest number of trials at once.")] = None,
    track: TrackOption = None,
    fleet: Annotated[
        FleetName, typer.Option(help="Run trials on Ray, or one after another in this process (local).")
    ] = FleetName.ray,
    address: Address = None,
    format: FormatOption = Format.table,
) -> None:
    """Search for the best values of method fields and of settings given as ranges: local.lr=loguniform(0.01,0.3)."""
    metrics: list[Any] = [name.value for name in metric or []]
    execution: dict[str, Any] = {"parallel": parallel, "fleet": fleet.value, "address": address, "track": track or []}
    if resume is not None:
        fixed = [
            key for key in context.params if key not in (*execution, "resume", "format") and _is_given(context, key)
        ]
        if fixed:
            names = ", ".join(sorted(fixed)).replace("folder", "out")
            raise ConfigError(
                f"--resume: a search keeps the settings that it was started with ({resume}). Leave out {names}.",
                code="config.conflict",
                key="--resume",
                value=str(resume),
                options=names,
            )
    elif name is not None and (Path(name).name != name or name in ("", ".", "..")):
        raise ConfigError(
            f"--name: not the name of one folder ({name}). Give the folder that it is made in with --out.",
            code="config.malformed",
            key="--name",
            value=name,
        )
    claim()
    from tune import resume as resume_search
    from tune import search
    from tune.report import front_lines, importance_lines, run_command, table_of
    from tune.screen import SearchProgress
    from tune.space import separate, spaces_of

    if resume is not None and ray_searches.is_one(resume):
        ray_searches.resume(resume, address, format)
        return
    if resume is not None:
        with say_how_to_resume() as started:
            result = resume_search(resume, **execution, callback=Callbacks([SearchProgress(), started]))
    else:
        file, given = divide(settings)
        fixed, ranges = separate(given)
        config, names = _methods(read(file, fixed), _words(methods or ""))
        spaces = spaces_of(names, ranges, config, None if fields is None else _words(fields))
        if scheduler not in ("asha", "none"):
            choices = {"metrics": metrics, "searcher": searcher, "scheduler": scheduler, "grace": grace, "seed": seed}
            choices |= {"samples": samples, "retries": retries, "parallel": parallel}
            ray_searches.check_options(
                fleet.value,
                budget,
                count,
                splits,
                track or [],
                scheduler,
                searcher if _is_given(context, "searcher") else None,
            )
            ray_searches.search(config, spaces, folder, name, address, choices, format)
            return
        with say_how_to_resume() as started:
            result = search(
                config,
                spaces,
                samples,
                out=folder,
                name=name,
                metric=metrics or None,
                searcher=searcher,
                scheduler=scheduler,
                grace=grace,
                budget=budget,
                count=count,
                seed=seed,
                retries=retries,
                splits=splits,
                **execution,
                callback=Callbacks([SearchProgress(), started]),
            )
    if format is Format.json:
        sys.stdout.write(
            json.dumps(
                {
                    "best": result.best.id,
                    "folder": str(result.folder),
                    "trials": json.loads((result.folder / "trials.json").read_text()),
                }
            )
            + "\n"
        )
    else:
        out.print(table_of(result.plan, result.state).screen())
        for line in (*importance_lines(result.folder), *front_lines(result.folder, result.plan, result.state)):
            out.print(line, soft_wrap=True)
        out.print(f"best: {result.best.id}; {run_command(result.folder)}", soft_wrap=True)


def _is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user gave a parameter on the command line."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def _methods(tree: dict[str, Any], names: list[str]) -> tuple[Config, list[str]]:
    """Return the configuration and the methods to search, by default the method in the configuration."""
    if names and "method" not in tree:
        assign(tree, "method", names[0])
    config = check(Config, tree)
    return config, names or [config.method["name"]]


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
