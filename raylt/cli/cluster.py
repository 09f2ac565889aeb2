"""The commands `raylt plan` and `raylt doctor`."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from raylt.cli.options import Address, Format, FormatOption, Settings, config_of, err, out, print_json
from raylt.config import Config
from raylt.errors import ConfigError, RayltError
from raylt.own_code.top_level_names import claim

if TYPE_CHECKING:
    from actors.capacity import PlacementPlan
    from raylt.core.setup import Setup
    from raylt.data.task import Task
    from raylt.models.split import SplitModel


def plan(
    settings: Settings = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="Plan for these nodes, as in 4x4gpu16cpu or server:1x8cpu,client:2x4gpu48cpu."),
    ] = None,
    address: Address = None,
    format: FormatOption = Format.table,
) -> None:
    """Show which actors a run would start, their resources and the server's node; start nothing."""
    if nodes is not None and address is not None:
        raise ConfigError(
            f"--nodes: cannot be combined with --address={address}, a running cluster ({nodes}). Leave one out.",
            code="config.conflict",
            key="--nodes",
            value=nodes,
            excludes="--address",
        )
    config = config_of(settings)
    claim()
    from actors.cluster.access import cluster_to_join
    from actors.launch import plan_placement
    from raylt.config.idle import idle_settings
    from raylt.runs.runner import notices

    previewed = _check_as_run_does(config)
    for notice in notices(*previewed) if previewed is not None else idle_settings(config):
        err.print(notice, markup=False, soft_wrap=True)
    placement = plan_placement(config, address, nodes)
    if previewed is not None:
        on_this_machine = nodes is None and cluster_to_join(address) is None
        placement = replace(placement, reasons=placement.reasons | _of_training(*previewed, placement, on_this_machine))
    if format is Format.json:
        print_json(asdict(placement))
        return
    table = Table(show_header=False)
    for decision, reason in placement.reasons.items():
        table.add_row(decision, reason)
    out.print(table)


def _check_as_run_does(config: Config) -> "tuple[Setup, Task, SplitModel] | None":
    """Check the settings as `raylt run` does before it starts.

    Plans can also be made without the data or weights, for example on a laptop for a cluster. Checks that need them are
    then skipped.

    Returns:
        The values that `preview_run` returns; None if data or weights are missing.
    """
    from raylt.runs.start import lacks_files, preview_run

    try:
        return preview_run(config)
    except RayltError as error:
        if config.data.clients is None or not lacks_files(error):
            raise
        err.print(f"checked without these files: {error}", markup=False, soft_wrap=True)
        return None


def _of_training(
    setup: "Setup", task: "Task", model: "SplitModel", placement: "PlacementPlan", on_this_machine: bool
) -> dict[str, str]:
    """Return a plan's notes on training: which clients train in stacks, and the phase after the last round.

    Args:
        setup: Values that the configuration names.
        task: The data and their split.
        model: The untrained model.
        placement: The plan.
        on_this_machine: Whether the run would use this machine.

    Returns:
        Descriptions by name. Stacks are left out unless `local.stacked` is "auto", and the last phase if it takes no
        longer than a round.
    """
    from raylt.core.device import one_thread

    described = {}
    if setup.config.local.stacked == "auto":
        described["stacks"] = _stacks(setup, task, model, bool(placement.placement.gpus), on_this_machine)
    with one_thread():  # the text gives seconds on one core
        if last_phase := setup.method.last_phase(task.spec, model):
            described["last phase"] = last_phase
    return described


def _stacks(setup: "Setup", task: "Task", model: "SplitModel", on_gpus: bool, on_this_machine: bool) -> str:
    """Describe which clients train in stacks (`local.stacked=auto`)."""
    import torch

    from raylt.core.training.stacked_sgd import MAX_STACKED_SAMPLES, why_alone

    device = torch.device("cuda" if on_gpus else "cpu")
    why = why_alone(
        setup.config, setup.method, model, task.spec, setup.augment, device, any_processor=not on_this_machine
    )
    if why is not None:
        return f"no client, because {why}"
    small = sum(0 < size <= MAX_STACKED_SAMPLES for size in task.sizes)
    where = "" if on_this_machine else ", where processors have AVX-512"
    return f"{small} of {task.clients} clients, those with at most {MAX_STACKED_SAMPLES} samples{where}"


def doctor(address: Address = None, format: FormatOption = Format.table) -> None:
    """Show what is installed and what torch and Ray see; exit with 1 if there are problems."""
    claim()
    from actors.cluster.doctor import examine

    findings = examine(address)
    if format is Format.json:
        print_json(findings)
    else:
        table = Table(show_header=False)
        for key, value in findings.items():
            table.add_row(key, "none" if value == [] else str(value))
        out.print(table)
    if findings["problems"]:
        raise typer.Exit(1)
