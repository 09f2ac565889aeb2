"""`raylt export`: the models of a run as a file that needs neither the run nor its data."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from raylt import store
from raylt.errors import ConfigError
from raylt.runs import artefact, graphs
from raylt.runs.about import FORMAT, About, ClientEntry, Input, choose, facts_of, setup_of
from raylt.runs.card import card
from raylt.runs.export import TrainedModel
from raylt.runs.identity import version
from raylt.runs.run import Run

Format = Literal["safetensors", "pt2", "onnx"]
FORMATS: tuple[Format, ...] = ("safetensors", "pt2", "onnx")


def export(run: Run | Path | str, to: Path | str | None = None, *, client: str | int | None = None,
           format: Format = "safetensors") -> Path:
    """Writes a run's model, with a model card in Markdown beside it.

    Of a method whose clients have models of their own, all of them go into one safetensors file.

    Args:
        run: or its folder. Its data need not be there, unless the method is one's own.
        to: the file; by default exported.FORMAT in the run folder.
        client: whose model alone, by name or id.
        format: pt2 (torch.export) and onnx hold the computation itself, of one model, from the images' bytes on.

    Returns:
        The file's path.

    Raises:
        ConfigError: no such client, format or place; or a file of one model is asked for, and there are several.
        CheckpointError: nothing was committed yet.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    if format not in FORMATS:
        raise ConfigError(f"format = {format!r}: must be {', '.join(FORMATS)}")
    alone = client is not None or not has_client_models(run)
    if format != "safetensors" and not alone:
        client, alone = choose(None, clients_of(run), f"--format {format}: a file holds one model, and here"), True
    path = run.folder / f"exported.{format}" if to is None else Path(to)
    if path.suffix != f".{format}":
        raise ConfigError(f"--out {path}: must end in .{format}, which says what it is")
    values, entries = artefact.Values(), []
    first: TrainedModel | None = None
    for id, model in _models(run, client, alone):
        values.add(id, model.network.state_dict())
        first = first or model
        entries += [] if id == GLOBAL else [id]
    assert first is not None
    names, reports = dict(clients_of(run)), _reports(run)
    own = [ClientEntry(id=id, name=names[id], own=values.own_of(id), figures=_figures_of(reports[-1], id))
           for id in entries]
    about = _about(run, reports, own or None)
    if format == "safetensors":
        _check(first, about, path)
        artefact.write(path, values.tensors(), about)
    else:
        graphs.write(path, first, about)
    store.write(card_of(path), card(about, path.name))
    return path


def card_of(path: Path) -> Path:
    """Where the model card of a file lies: named after all of it, so that README.onnx leaves README.md alone."""
    return path.with_name(f"{path.name}.md")


GLOBAL = -1                 # in the place of a client's id


def has_client_models(run: Run) -> bool:
    """Whether each client has a model of its own: of personal methods, or where it keeps its running statistics."""
    return run.method.personal or run.config.federation.batchnorm == "local"


def clients_of(run: Run) -> list[tuple[int, str]]:
    """Id and name of each client that holds samples."""
    return [(id, name) for id, name in enumerate(run.outline.client_names) if run.outline.sizes[id]]


def model_of(run: Run, client: str | int | None = None) -> TrainedModel:
    """The global model, or a client's own, by name or id; one must be named where clients have models of their own."""
    if client is None and not has_client_models(run):
        return run.model()
    return run.client_model(choose(client, clients_of(run), str(run.folder)))


def _models(run: Run, client: str | int | None, alone: bool) -> Iterator[tuple[int, TrainedModel]]:
    if not alone:
        yield from run.client_models()
    elif client is None:
        yield GLOBAL, run.model()
    else:
        id = choose(client, clients_of(run), str(run.folder))
        yield id, run.client_model(id)


def _about(run: Run, reports: list[dict[str, Any]], clients: list[ClientEntry] | None) -> About:
    facts, config = run.outline.facts, run.config
    height, width, channels = facts.shape
    return About(
        format=FORMAT, task=facts.kind, class_names=list(facts.class_names),
        input=Input(height=height, width=width, channels=channels, mean=list(facts.mean),
                             std=list(facts.std), fit=config.data.fit),
        model=config.model, method=config.method, batch=config.evaluation.batch, source=facts.name,
        rounds=len([report for report in reports if report["phase"] == "round"]), run=run.sha256,
        split_sha256=run.split.sha256, figures=_figures(reports[-1]), versions=_versions(),
        guests=[guest for guest in run.origins if guest["kind"] in ("method", "model")], clients=clients)


def _reports(run: Run) -> list[dict[str, Any]]:
    """Of the steps up to the model that is exported: of a run that stopped, that of its last checkpoint."""
    saved = None if run.state == "done" else run.checkpoint()
    return run.reports if saved is None else run.reports[:saved.facts["step"]]


def _figures(judged: dict[str, Any]) -> dict[str, float | None]:
    """What this model was judged to be, of everybody, and the means over clients; nothing where it was not judged."""
    if judged["accuracy"] is None:
        return {}
    over_clients = {f"clients_{kind}": spread["mean"] for kind, spread in judged["clients"].items()}
    return {name: judged[name] for name in ("accuracy", "global_accuracy", "macro", "miou")} | over_clients


def _figures_of(judged: dict[str, Any], id: int) -> dict[str, float | None]:
    by_client = judged["by_client"] or {}
    return {kind: values[id] for kind, values in by_client.items()}


def _versions() -> dict[str, str]:
    return {"raylt": version(), "torch": torch.__version__, "python": platform.python_version()}


@torch.no_grad()
def _check(model: TrainedModel, about: About, path: Path) -> None:
    """Whether what will be read from the file says what the model says, to the bit.

    Raises:
        ConfigError: it does not, as of a network that `Method.build` does not make.
    """
    facts = facts_of(about)
    setup = setup_of(about, str(path))
    network = artefact.rebuild(setup, facts, model.network.state_dict())
    again = TrainedModel(setup.method, network, facts, about["batch"])
    height, width, channels = facts.shape
    images = torch.randint(0, 256, (2, height, width, channels), dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(0))
    again = again.to(model.mean.device)
    if not torch.equal(model(model.preprocess(images)), again(again.preprocess(images))):
        raise ConfigError(f"method = {setup.method.name}: its model does something that its entries do not say; export "
                          "it with --format pt2")
