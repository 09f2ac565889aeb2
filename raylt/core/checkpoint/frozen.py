"""The frozen part of a model, which no checkpoint holds: its hash, and the check that a run continues with the same."""

from torch import nn

from raylt.config import Config
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.errors import CheckpointError
from raylt.models.image_text import tower_of
from raylt.models.trainable import frozen_entries
from raylt.tree import Tree
from raylt.typed_json import hash_json


def hash_frozen(model: nn.Module) -> str | None:
    """Return the hash of a model's frozen part, which its state dict does not contain; None if it has no such part.

    The frozen part is the model's frozen entries and the image preprocessing of an image tower.
    """
    entries = frozen_entries(model)
    tower = tower_of(model)
    if not entries and tower is None:
        return None
    entries_sha256 = hash_tensors({name: value.detach().cpu().contiguous() for name, value in entries.items()})
    return entries_sha256 if tower is None else hash_json([entries_sha256, tower.description])


def check_frozen(server_part: Tree, model: nn.Module, config: Config) -> None:
    """Check that a model has the entries and the frozen part with which a checkpoint was written.

    Args:
        server_part: The part "server" of the checkpoint.
        model: The model of the run that continues.
        config: Configuration of this run.

    Raises:
        CheckpointError: The weights or the image preprocessing in the model's files have changed, or the checkpoint has
            other entries than the model.
    """
    other = server_part["model"].keys() ^ model.state_dict().keys()
    if other:
        raise CheckpointError(
            f"model: the checkpoint's entries differ from {config.model}'s (such as {min(other)}). Continue with the "
            "version of raylt that made the run, or start a new run.",
            code="model.weights-mismatch",
            key="model",
            value=config.model,
            entry=min(other),
        )
    if server_part.get("frozen") == hash_frozen(model):
        return
    key, file = ("model", config.model) if config.weights is None else ("weights", config.weights)
    raise CheckpointError(
        f"{key}: the frozen weights or the image preprocessing have changed since the run started ({file}). Put the "
        "original file back, or start a new run.",
        code="model.weights-mismatch",
        key=key,
        value=file,
    )
