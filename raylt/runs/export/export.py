"""`raylt export`: write the models of a run to a file that needs neither the run nor its data."""

import platform
from pathlib import Path
from typing import Any, Literal

import torch

from raylt import store
from raylt.config import Config
from raylt.data.task import JudgedImages
from raylt.disk import as_path, check_name, check_target
from raylt.errors import ConfigError, spoken
from raylt.models.clip import TowerDescription
from raylt.models.image_text import tower_of
from raylt.runs.export import artefact, graph_formats
from raylt.runs.export.artefact import (
    FORMAT,
    ClientEntry,
    DistinctEntries,
    Guarantee,
    Input,
    ModelDescription,
    choose_client,
    setup_of,
    task_spec_of,
)
from raylt.runs.export.model_card import model_card
from raylt.runs.export.trained_model import TrainedModel, trained_clients
from raylt.runs.folder.identity import version
from raylt.runs.run import Run

Format = Literal["safetensors", "pt2", "onnx"]
FORMATS: tuple[Format, ...] = ("safetensors", "pt2", "onnx")
GLOBAL = -1  # stands for the global model; clients' models have the client's id


def export(
    run: Run | Path | str,
    to: Path | str | None = None,
    *,
    client: str | int | None = None,
    format: Format = "safetensors",
    round: int | Literal["best"] | None = None,
) -> Path:
    """Write a run's model into a file, with a model card in Markdown next to it.

    If clients have models of their own, all of them are written into one safetensors file.

    Args:
        run: A run or its folder. Its data need not be present, unless the method is a plugin.
        to: The file to write; by default exported.FORMAT in the run folder, with the given client and round in its
            name, such as exported-client-3-round-20.safetensors.
        client: Name or id of the client whose model to write; by default the models of all clients.
        format: "safetensors" for weights, or "pt2" (torch.export) or "onnx" for the computation graph of one model,
            starting from uint8 images.
        round: Round whose model to write, which must have a checkpoint. "best" is the round with the highest accuracy
            on validation images, whose checkpoint is always kept. By default the last step.

    Returns:
        The path of the file.

    Raises:
        ConfigError: The client or the format is unknown, the file's name does not end in the format or its folder does
            not exist, or the format holds one model and there are several.
        CheckpointError: The run has not committed a step, or the round's checkpoint was not kept.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    _check_format(format)
    names = dict(clients_of(run))
    id = _model_to_export(run, client, format)
    step = run.best_step() if round == "best" else round
    path = _path_of(run, to, format, None if client is None else id, step)
    if id == GLOBAL:
        models = iter([(GLOBAL, run.model(step))])
    else:
        models = run.client_models(None if id is None else [id], step)

    first: TrainedModel | None = None
    entries = DistinctEntries()
    ids: list[int] = []
    for number, model in models:
        first = first or model
        entries.add(number, model.network.state_dict())
        ids.append(number)
    assert first is not None

    reports = _reports(run) if step is None else run.reports[:step]
    tests = run.summary["tests"] if run.state == "done" else None
    tested = (tests and tests["own"]) or [None] * len(run.outline.client_names)
    clients = [
        ClientEntry(
            id=each,
            name=names[each],
            own=entries.own_of(each),
            figures=_figures_of(reports[-1], each),
            tested=tested[each],
        )
        for each in ids
        if each != GLOBAL
    ]
    tower = tower_of(first.network)
    description = _describe(run, reports, clients or None, tests, None if tower is None else tower.description)
    if format == "safetensors":
        _check_rebuilt(first, description, path)
        artefact.write(path, entries.tensors(), description)
    else:
        graph_formats.write(path, first, description)
    store.write(card_of(path), model_card(description, path.name))
    return path


def card_of(path: Path) -> Path:
    """Return the path of the model card that belongs to an exported file: NAME.md.

    The suffix is kept, so that the card of README.onnx does not replace README.md.
    """
    return path.with_name(f"{path.name}.md")


def has_client_models(run: Run) -> bool:
    """Return whether clients have their own models: the method is personal, or running statistics are local."""
    return run.method.personal or run.config.federation.batchnorm == "local"


def clients_of(run: Run) -> list[tuple[int, str]]:
    """Return id and name of each client with samples; if clients have their own models, only of those that train."""
    if has_client_models(run):
        return trained_clients(run.outline)
    return [(id, name) for id, name in enumerate(run.outline.client_names) if run.outline.sizes[id]]


def joining_clients_of(run: Run) -> list[tuple[int, str]]:
    """Return id and name of each client that joins after training, and so has no model of its own."""
    return [(id, run.outline.client_names[id]) for id in run.outline.new_clients] if has_client_models(run) else []


def choose_client_of(run: Run, client: str | int | None, where: str | None = None) -> int:
    """Return the id of a client of a run, by name or id.

    Args:
        run: The run.
        client: Name or id; None if there is only one client.
        where: Name for error messages; by default the run folder.

    Raises:
        ConfigError: The client is unknown or joins after training, or there are several clients and none is named.
    """
    return choose_client(client, clients_of(run), where or str(run.folder), joining_clients_of(run))


def model_of(run: Run, client: str | int | None = None) -> TrainedModel:
    """Return the global model, or the model of the client with this name or id.

    Raises:
        ConfigError: The client is unknown, or each client has its own model and none is named.
    """
    if client is None and not has_client_models(run):
        return run.model()
    return run.client_model(choose_client_of(run, client))


def unfinished(run: Run) -> str | None:
    """Return which part of an unfinished run its newest model is from, or None if that model is the run's last."""
    return _stage(run, _reports(run))


def _stage(run: Run, reports: list[dict[str, Any]]) -> str | None:
    """Return the part of a run after which the model of a step was saved, or None if the step is the run's last.

    Args:
        run: The run.
        reports: The reports up to the step.
    """
    done = sum(report["phase"] == "round" for report in reports)
    planned = run.summary["rounds"] if run.state == "done" else run.config.federation.rounds
    without = run.method.finishes and not any(report["phase"] == "finish" for report in reports)
    if done == planned and not without:
        return None
    return f"round {done} of {planned}{', without the last phase' if without else ''}"


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ConfigError(
            f"format: must be {', '.join(FORMATS)} ({format!r}). Give one of these.",
            code="config.unknown-name",
            key="format",
            value=format,
        )


def _path_of(run: Run, to: Path | str | None, format: Format, client: int | None, step: int | None) -> Path:
    """Return the path of the file to write, whose suffix gives the format.

    Args:
        run: The run.
        to: The path, if it was given.
        format: The format.
        client: Id of the client that was named; None if none was.
        step: Step of the model, if a round was given.
    """
    parts = [*([] if client is None else [f"client-{client}"]), *([] if step is None else [f"round-{step}"])]
    default = run.folder / f"{'-'.join(['exported', *parts])}.{format}"
    path = default if to is None else as_path(to, "to")
    check_name(path.name, "--out")
    if path.suffix != f".{format}":
        raise ConfigError(
            f"{spoken('--out', 'to')}: must end in .{format} ({path}). Give a name with that ending.",
            code="config.conflict",
            key="--out",
            path=str(path),
        )
    check_target(path, spoken("--out", "to"))
    return path


def _model_to_export(run: Run, client: str | int | None, format: Format) -> int | None:
    """Return the client to export, GLOBAL for the global model, or None for the models of all clients."""
    if client is not None:
        return choose_client_of(run, client)
    if not has_client_models(run):
        return GLOBAL
    if format == "safetensors":
        return None
    return choose_client_of(run, None, spoken(f"--format {format}", f"format={format!r}"))


def _describe(
    run: Run,
    reports: list[dict[str, Any]],
    clients: list[ClientEntry] | None,
    tests: JudgedImages | None,
    tower: TowerDescription | None,
) -> ModelDescription:
    spec = run.outline.spec
    config = run.config
    height, width, channels = spec.shape
    image = Input(
        height=height,
        width=width,
        channels=channels,
        mean=list(spec.mean),
        std=list(spec.std),
        fit=config.data.fit,
        depth=config.data.depth,
    )
    description = ModelDescription(
        format=FORMAT,
        task=spec.kind,
        class_names=list(spec.class_names),
        input=image,
        model=config.model,
        side=config.input,
        method=config.method,
        batch=config.evaluation.batch,
        source=spec.name,
        rounds=len([report for report in reports if report["phase"] == "round"]),
        run=run.sha256,
        split_sha256=run.split.sha256,
        figures=_figures(reports[-1]),
        versions={"raylt": version(), "torch": torch.__version__, "python": platform.python_version()},
        guests=[plugin for plugin in run.origins if plugin["kind"] in ("method", "model")],
        clients=clients,
        tests=tests,
        tower=tower,
    )
    stage = _stage(run, reports)
    if stage is not None:
        description["stage"] = stage
    guarantee = _guarantee(config, reports)
    if guarantee is not None:
        description["privacy"] = guarantee
    return description


def _guarantee(config: Config, reports: list[dict[str, Any]]) -> Guarantee | None:
    """Return the guarantee for all uploads up to the model's step, or None if no upload had noise.

    Args:
        config: Configuration of the run.
        reports: The reports up to the step.
    """
    statements = [report["figures"]["privacy"] for report in reports if "privacy" in report["figures"]]
    if not statements:
        return None
    privacy = config.privacy
    return Guarantee(**statements[-1], clip=privacy.clip if privacy.update_epsilon is None else privacy.update_clip)


def _reports(run: Run) -> list[dict[str, Any]]:
    """Return a run's reports up to the exported model's step, which is the last checkpoint in an unfinished run."""
    saved = None if run.state == "done" else run.checkpoint()
    return run.reports if saved is None else run.reports[: saved.facts["step"]]


def _figures(report: dict[str, Any]) -> dict[str, float | None]:
    """Return the model's accuracies and IoU, and their means over clients, or an empty dict without an evaluation."""
    if report["accuracy"] is None:
        return {}
    over_clients = {f"clients_{kind}": spread["mean"] for kind, spread in report["clients"].items()}
    return {name: report[name] for name in ("accuracy", "global_accuracy", "macro", "miou")} | over_clients


def _figures_of(report: dict[str, Any], client: int) -> dict[str, float | None]:
    by_client = report["by_client"] or {}
    return {kind: values[client] for kind, values in by_client.items()}


@torch.no_grad()
def _check_rebuilt(model: TrainedModel, description: ModelDescription, path: Path) -> None:
    """Check that the model gives exactly the same logits after it is rebuilt from its entries.

    Raises:
        ConfigError: It does not, for example because `Method.build` did not create the network.
    """
    spec = task_spec_of(description)
    setup = setup_of(description, path)
    network = artefact.rebuild(setup, spec, model.network.state_dict())
    rebuilt = TrainedModel(setup.method, network, spec, description["batch"]).to(model.mean.device)
    height, width, channels = spec.shape
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, height, width, channels), dtype=torch.uint8, generator=generator)
    if not torch.equal(model(model.preprocess(images)), rebuilt(rebuilt.preprocess(images))):
        raise ConfigError(
            f"method: its model cannot be rebuilt from its entries alone ({setup.method.name}). Export it with "
            f"{spoken('--format pt2', 'format=' + repr('pt2'))}.",
            code="export.not-rebuildable",
            key="method",
            value=setup.method.name,
        )
