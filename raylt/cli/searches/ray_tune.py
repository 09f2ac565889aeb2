"""The part of `raylt tune` that uses Ray Tune's own schedulers, see tune/ray_tune/search.py."""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylt.cli.options import Format, err, out, print_json, say_how_to_resume
from raylt.config import Config
from raylt.disk import check_name
from raylt.errors import ConfigError, count_of
from raylt.formatting import in_percent
from raylt.store import resolved_path

if TYPE_CHECKING:
    from tune.ray_tune.search import RaySearchResult

PLAN = "ray_search.json"
SHOWN_TRIALS = 20  # maximum number of rows in the table


def is_one(folder: Path) -> bool:
    """Return whether a folder contains a search that uses one of Ray Tune's schedulers."""
    return (folder / PLAN).is_file()


def search(
    config: Config,
    spaces: Mapping[str, Any],
    folder: Path,
    name: str | None,
    address: str | None,
    choices: Mapping[str, Any],
    format: Format,
) -> None:
    """Run a search in a new folder, and print the trials.

    Args:
        config: The configuration to start from.
        spaces: The search space, by name of the method.
        folder: Folder in which to create the search's folder.
        name: Name of the search's folder; None to compose a name.
        address: Address of a running Ray cluster.
        choices: Fields of a `RaySearchPlan`, and `metrics`. Without `samples`, there are 20 trials.
        format: Format of the output.

    Raises:
        ConfigError: An option cannot be used with Ray's schedulers.
        CheckpointError: The folder exists.
    """
    from tune.changes import check_exchangeable
    from tune.checks import check_judged, check_metrics, check_trials
    from tune.plan import DEFAULT_SAMPLES, default_metric, with_validation
    from tune.search import already_exists
    from tune.space import to_text

    if len(spaces) > 1:
        raise ConfigError(
            f"--methods: Ray's schedulers search one method only ({', '.join(spaces)}). Give one method, or "
            "--scheduler asha.",
            code="config.conflict",
            key="--methods",
            value=",".join(spaces),
        )
    [(method, space)] = spaces.items()
    fields = dict(choices)
    metrics: list[Any] = fields.pop("metrics") or [default_metric(config, spaces)]
    check_metrics(metrics)
    _check_comparisons(config, choices)
    if choices["scheduler"] == "pbt":
        check_exchangeable(space, method)
    if name is not None:
        check_name(name, "--name")
    name = name or f"search-{method}-{choices['scheduler']}-{datetime.now():%Y%m%d-%H%M%S-%f}"[:-3]
    target = resolved_path(folder / name)
    if target.exists():
        raise already_exists(target)

    base = with_validation(config)
    check_trials(base, method, space, choices["seed"])
    check_judged(metrics, base)

    def run() -> "RaySearchResult":
        from tune.ray_tune.search import RaySearchPlan, ray_search

        plan = RaySearchPlan(
            config=config.model_dump(mode="json"),
            space={key: to_text(axis) for key, axis in space.items()},
            metric=metrics[0],
            other_metrics=tuple(metrics[1:]),
            **{**fields, "samples": fields["samples"] or DEFAULT_SAMPLES},
        )
        trials = "all trials of the grid" if plan.searcher == "grid" else count_of(plan.samples, "trial")
        err.print(f"search of {method} with Ray's {plan.scheduler}: {trials}, folder {target}", soft_wrap=True)
        return ray_search(target, plan, lambda: started.on_search_start(target, [method], plan.samples, 0))

    with say_how_to_resume() as started:
        result = _in_session(address, run)
    _show(result, format)


def resume(folder: Path, address: str | None, format: Format) -> None:
    """Continue an interrupted search, and print the trials."""

    def run() -> "RaySearchResult":
        from tune.ray_tune.search import resume_ray_search

        return resume_ray_search(resolved_path(folder))

    with say_how_to_resume() as started:
        started.on_search_start(folder, [], None, 0)
        result = _in_session(address, run)
    _show(result, format)


def check_options(
    fleet: str, budget: int | None, count: str, splits: int, track: Sequence[str], scheduler: str, chosen: str | None
) -> None:
    """Raise ConfigError for options that Ray's schedulers do not support.

    Args:
        fleet: "ray" or "local".
        budget: Budget of the search.
        count: Unit of the budget.
        splits: Number of splits.
        track: Names of trackers.
        scheduler: Name of the scheduler.
        chosen: Searcher that the user gave.
    """
    given = {
        "--searcher tpe": scheduler == "pbt" and chosen == "tpe",
        "--fleet local": fleet == "local",
        "--budget": budget is not None,
        "--count": count != "steps",
        "--splits": splits != 1,
        "--track": bool(track),
    }
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{option}: is not supported by this scheduler of Ray (--scheduler {scheduler}). Leave it out, or give "
                "--scheduler asha.",
                code="config.conflict",
                key=option,
                value=scheduler,
            )


def _check_comparisons(config: Config, choices: Mapping[str, Any]) -> None:
    """Raise ConfigError if a scheduler cannot compare trials with these settings, or ignores them."""
    scheduler, grace, samples = choices["scheduler"], choices["grace"], choices["samples"]
    rounds = config.federation.rounds
    if scheduler == "hyperband" and grace is not None:
        raise ConfigError(
            f"--grace: hyperband uses its own brackets instead ({grace}). Leave it out, or give --scheduler median.",
            code="config.conflict",
            key="--grace",
            value=grace,
        )
    if grace is not None and grace >= rounds:
        raise ConfigError(
            f"--grace: {scheduler} would never compare trials before their last round, {rounds} ({grace}). Give at "
            f"most {rounds - 1}, or more rounds.",
            code="search.no-rungs",
            key="--grace",
            value=grace,
            rounds=rounds,
        )
    if scheduler == "pbt" and samples == 1 and choices["searcher"] != "grid":
        raise ConfigError(
            f"--samples: pbt replaces bad trials by good ones, so it needs several ({samples}). Give at least 2.",
            code="config.out-of-range",
            key="--samples",
            value=samples,
        )


def _in_session(address: str | None, run: Callable[[], "RaySearchResult"]) -> "RaySearchResult":
    """Run a search in a Ray session, after setting the environment variables that Tune reads on import."""
    from actors.cluster.session import environment, session
    from tune.search import QUIET

    names = ("RAY_CHDIR_TO_TRIAL_DIR", "TUNE_DISABLE_SIGINT_HANDLER")
    variables = {"RAY_AIR_NEW_OUTPUT": "0"} | {name: QUIET[name] for name in names}
    with environment({key: os.environ.get(key, value) for key, value in variables.items()}), session(address):
        return run()


def _show(result: "RaySearchResult", format: Format) -> None:
    from raylt.studies.report.text_table import TextTable
    from tune.report.results import run_command

    if format is Format.json:
        print_json({"folder": str(result.folder), "trials": result.rows})
        return
    title = (
        f"{count_of(len(result.rows), 'trial')}, best first; percent: {', '.join(result.metrics)} on validation samples"
    )
    columns = [column for column in result.rows[0] if column != "failed"]
    rows = [
        [in_percent(row[column]) if column in result.metrics else _text(row[column]) for column in columns]
        for row in result.rows[:SHOWN_TRIALS]
    ]
    hidden = [f"{len(result.rows) - SHOWN_TRIALS} more, in trials.csv"] if len(result.rows) > SHOWN_TRIALS else []
    table = TextTable(
        f"{title}; front: on the Pareto front" if len(result.metrics) > 1 else title,
        [column.rpartition(".")[2] for column in columns],
        rows,
        "l" + "r" * (len(columns) - 1),
        grouped=False,
        naming=1,
        notes={"trials not shown": hidden},
    )
    out.print(table.screen())
    failed = [row for row in result.rows if row["failed"]]
    for row in failed:
        out.print(f"{row['trial']} failed: {row['failed']}", soft_wrap=True)
    out.print(f"best: {result.rows[0]['trial']}; {run_command(result.folder)}", soft_wrap=True)
    if result.exchanged:
        out.print("pbt changed values during the trials; best.yaml has the final values of the best trial")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
