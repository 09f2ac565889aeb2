"""`raylt.load_model`: a model from what `raylt export` wrote."""

from pathlib import Path

from raylt.errors import ConfigError
from raylt.runs import artefact, graphs
from raylt.runs.about import choose_in
from raylt.runs.export import TrainedModel
from raylt.runs.graphs import GraphModel

READERS = (".safetensors", ".pt2", ".onnx")


def has_several(path: Path) -> bool:
    """Whether a file has the models of several clients."""
    return path.suffix == ".safetensors" and len(artefact.read(path).clients) > 1


def load_model(file: Path | str, client: str | int | None = None) -> TrainedModel | GraphModel:
    """The model in a file of `raylt export`; neither its run nor its data are needed.

    Args:
        client: whose model, by name or id, where the file has several.

    Raises:
        ConfigError: another kind of file, no such client, or code of one's own that it needs is not here.
        CheckpointError: the file cannot be read.
    """
    path = Path(file)
    if path.suffix not in READERS:
        raise ConfigError(f"{path}: must be a file of raylt export, which ends in {', '.join(READERS)}")
    if path.suffix == ".safetensors":
        return artefact.read(path).model(client)
    model = graphs.read(path)
    choose_in(model.about, client, path)
    return model
