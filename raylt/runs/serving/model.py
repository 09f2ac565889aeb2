"""`ServedModel`: an exported model as one value, with everything that a serving process needs."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from raylt import store
from raylt.disk import is_folder
from raylt.runs.export.artefact import read
from raylt.runs.export.export import card_of, export
from raylt.runs.export.graph_formats import GraphModel
from raylt.runs.export.load import load_model
from raylt.runs.export.trained_model import TrainedModel


@dataclass(frozen=True)
class ServedModel:
    """The content of an exported model file, to be sent to serving processes.

    Attributes:
        name: Name of the file.
        content: Content of the file.
        card: Its model card, in Markdown.
    """

    name: str
    content: bytes
    card: str

    def open(self) -> "OpenedModel":
        """Load the models in the file, ready to predict."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / self.name
            file.write_bytes(self.content)
            return OpenedModel(self, *_models_in(file))


@dataclass(frozen=True)
class OpenedModel:
    """The loaded models of an exported file, by client name; a single model has the key None.

    Attributes:
        clients: Names of the clients if each has its own model; otherwise empty.
    """

    served: ServedModel
    clients: list[str]
    models: dict[str | None, TrainedModel | GraphModel]

    @property
    def any(self) -> TrainedModel | GraphModel:
        """One of the models, which all take the same images and have the same classes."""
        return next(iter(self.models.values()))


def served_model(path: Path) -> ServedModel:
    """Return the model of a run folder or exported file, after loading it once as a check.

    Raises:
        ConfigError: The file is of another kind, the model cannot be exported, or a plugin or a package is missing.
        CheckpointError: The run has not committed a step, or a file cannot be read.
    """
    if is_folder(path):
        with tempfile.TemporaryDirectory() as folder:
            return _read(export(path, Path(folder) / f"{path.resolve().name}.safetensors"))
    return _read(path)


def _read(path: Path) -> ServedModel:
    """Return the content of an exported file and its model card.

    The models are loaded first, so that errors name the user's path.
    """
    _models_in(path)
    file = store.plain_file(path)
    card = card_of(path)
    text = store.read(card).decode("utf-8", "replace") if card.is_file() else f"# {path.name}\n"
    return ServedModel(path.name, file.read_bytes(), text)


def _models_in(path: Path) -> tuple[list[str], dict[str | None, TrainedModel | GraphModel]]:
    """Load the models of an exported file; return the clients' names and the models by name."""
    if path.suffix != ".safetensors":
        return [], {None: load_model(path)}
    artefact = read(path)
    clients = [client["name"] for client in artefact.clients]
    if len(clients) < 2:
        return [], {None: artefact.model()}
    return clients, {name: artefact.model(name) for name in clients}
