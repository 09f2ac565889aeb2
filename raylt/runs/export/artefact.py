"""The safetensors file that `raylt export` writes, and the models in it.

The file contains the models' state-dict entries and, as JSON under "raylt" in its metadata, a `ModelDescription`. This
describes the architecture by names and fields, the classes, the images, the origin of the model and its figures.
Reading the file needs no training data, no Ray and no run.

In a file of several clients' models, an entry that is the same for all clients is stored once, under its name. Each
distinct value of any other entry is stored once as NAME@ID, where ID is the first client with this value.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import safetensors.torch
import torch
from pydantic import AfterValidator, Field, TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from typing_extensions import TypedDict

from raylt import store
from raylt.config import Config, check
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.report import Fraction
from raylt.core.setup import Setup
from raylt.data.images.decoding import PIXELS
from raylt.data.task import JudgedImages, TaskSpec
from raylt.errors import CheckpointError, ConfigError, RayltError, did_you_mean, spoken
from raylt.methods.fedavg import FedAvg
from raylt.models.clip import TowerDescription, new_tower
from raylt.models.image_text import described_model
from raylt.models.split import CosineClassifier, SplitModel, StateDict, with_classifier, with_layer
from raylt.registry import check_origins, resolve, seek
from raylt.runs.export.trained_model import TrainedModel, joins_later, names_of
from raylt.runs.folder.identity import PluginRecord
from raylt.typed_json import as_json, closed, hash_json, printable

FORMAT = 2
KEY = "raylt"  # metadata key
MAX_DESCRIPTION_LENGTH = 64 * store.MIB  # maximum number of characters
Size = Annotated[int, Field(ge=1, le=2**16)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(printable)]
Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@closed
class Input(TypedDict):
    """The images that a model takes: uint8 [n, height, width, channels].

    `mean` and `std` are per channel, for pixels in [0, 1]. `fit` is the way in which image files are resized, see
    `raylt.data.images.decoding.fitted_image`. `depth` is the run's `data.depth`.
    """

    height: Size
    width: Size
    channels: Size
    mean: list[Number]
    std: list[Annotated[Number, Field(gt=0)]]
    fit: Literal["crop", "pad"]
    depth: int | None


@closed
class ClientEntry(TypedDict):
    """The description of one client's model in an exported file.

    `own` maps each entry that differs between clients to the id of the first client with the same value as this client.
    `figures` contains the client's accuracies by the names in `raylt.metrics.KINDS`. `tested` is the number of its own
    test images.
    """

    id: Annotated[int, Field(ge=0)]
    name: Name
    own: dict[str, int]
    figures: dict[Text, Fraction | None]
    tested: NotRequired[Annotated[int, Field(ge=0)] | None]


@closed
class Guarantee(TypedDict):
    """The differential privacy of the uploads behind a model, as in the run's summary, and the length `clip`.

    `clip` is the run's `privacy.clip` or `privacy.update_clip`. `sigma` is the standard deviation of the noise for
    sensitivity 1.
    """

    epsilon: Number
    delta: Number
    sigma: Number
    clip: Number
    unit: Text
    covers: Text
    against: Text
    not_covered: Text


@closed
class ModelDescription(TypedDict):
    """The description of the models in an exported file.

    `model`, `side` and `method` define the architecture; they are `model`, `input` and `method` of the run's
    configuration. `batch` is the batch size of evaluations. `run` and `split_sha256` identify the origin, and `figures`
    are those of the run. `guests` are the plugins that the architecture needs. `clients` is None in the file of a
    global model. `tests` contains the numbers of test images behind the figures, and is missing if the run had not
    ended. `tower` describes the image tower of an image-text model, so that the model can be built without the files
    that `model` names. `stage` says after which round the models were saved, and is missing if they are the run's last.
    `privacy` is missing if no upload had noise. `sha256` is the hash of the entries and of all other fields. In a .pt2
    or .onnx file, which has a hash over all its bytes, it covers only the other fields. It is missing in files of early
    versions.
    """

    format: int
    task: Literal["classification", "segmentation"]
    class_names: Annotated[list[Name], Field(min_length=1)]
    input: Input
    model: Name
    side: NotRequired[Annotated[int, Field(ge=8, le=8192)] | None]
    method: dict[str, Any]
    batch: Annotated[int, Field(ge=1, le=2**20)]
    source: Text
    rounds: Annotated[int, Field(ge=0)]
    run: Sha256
    split_sha256: Sha256
    figures: dict[Text, Fraction | None]
    versions: dict[Text, Text]
    guests: list[PluginRecord]
    clients: Annotated[list[ClientEntry], Field(min_length=1)] | None
    tests: NotRequired[JudgedImages | None]
    tower: NotRequired[TowerDescription | None]
    stage: NotRequired[Text]
    privacy: NotRequired[Guarantee]
    sha256: NotRequired[Sha256]


_DESCRIPTION = TypeAdapter(ModelDescription)


@dataclass(frozen=True)
class Artefact:
    """The content of a safetensors file that `raylt export` wrote."""

    path: Path
    description: ModelDescription
    tensors: dict[str, Tensor]

    @property
    def clients(self) -> list[ClientEntry]:
        """The clients whose models the file contains; empty if it contains a global model."""
        return self.description["clients"] or []

    def model(self, client: str | int | None = None) -> TrainedModel:
        """Return the global model, or the model of the client with this name or id.

        Raises:
            ConfigError: The client is unknown, or the file has several clients' models and none is named.
        """
        entries = self._entries(client)
        setup = setup_of(self.description, self.path)
        spec = task_spec_of(self.description)
        network = rebuild(setup, spec, entries)
        image = self.description["input"]
        batch = self.description["batch"]
        model = TrainedModel(setup.method, network, spec, batch, image["fit"], image["depth"])
        return model.requires_grad_(False)

    def _entries(self, client: str | int | None) -> StateDict:
        id = choose_client_in(self.description, client, self.path)
        if id is None:
            return self.tensors
        entry = next(each for each in self.clients if each["id"] == id)
        own = {f"{name}@{first}": name for name, first in entry["own"].items()}
        if missing := own.keys() - self.tensors.keys():
            raise CheckpointError(
                f"{self.path}: an entry is missing ({min(missing)}). Export it again.",
                code="export.malformed",
                path=str(self.path),
                entry=min(missing),
            )
        shared = {name: value for name, value in self.tensors.items() if "@" not in name}
        return shared | {name: self.tensors[stored] for stored, name in own.items()}


def read(path: Path) -> Artefact:
    """Read a safetensors file that `raylt export` wrote.

    Raises:
        CheckpointError: The file cannot be read, or `raylt export` did not write it.
    """
    try:
        with safe_open(store.plain_file(path), framework="pt") as file:
            text = (file.metadata() or {}).get(KEY, "")
            description = parse(text, path)
            tensors = {name: file.get_tensor(name) for name in [*file.keys()]}
    except (OSError, ValueError, SafetensorError) as error:
        raise unreadable(path, error) from None
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(
                f"{path}: has values that are infinite or not a number ({name}). Export a model that did not diverge.",
                code="model.not-finite",
                path=str(path),
                entry=name,
            )
    if "sha256" in description and description["sha256"] != _hash(description, tensors):
        raise changed(path)
    return Artefact(path, description, tensors)


def write(path: Path, tensors: Mapping[str, Tensor], description: ModelDescription) -> None:
    """Write a safetensors file.

    Args:
        path: The file.
        tensors: Tensors by their names in the file.
        description: Description of the models.

    Raises:
        CheckpointError: The file cannot be written.
    """
    store.write(path, safetensors.torch.save(dict(tensors), {KEY: to_json(sealed(description, tensors))}))


def sealed(description: ModelDescription, tensors: Mapping[str, Tensor]) -> ModelDescription:
    """Return a description with the hash that links it to the entries of its models."""
    return {**description, "sha256": _hash(description, tensors)}


def changed(path: Path) -> CheckpointError:
    """Return the error for an exported file whose content does not match its hash."""
    return CheckpointError(
        f"{path}: the file was changed after it was exported. Export it again.", code="export.changed", path=str(path)
    )


def _hash(description: ModelDescription, tensors: Mapping[str, Tensor]) -> str:
    """Return the hash over a description and the entries of its models."""
    content = json.loads(to_json(description))
    content.pop("sha256", None)
    return hash_json([content, hash_tensors(dict(tensors))])


class DistinctEntries:
    """The state-dict entries of several models, with equal values stored once."""

    def __init__(self) -> None:
        # the first model with each value, and the value, by entry and hash of the value
        self._values: dict[str, dict[str, tuple[int, Tensor]]] = {}
        # the first model with the same value, by model and entry
        self._first: dict[int, dict[str, int]] = {}

    def add(self, id: int, entries: Mapping[str, Tensor]) -> None:
        """Add a model's entries, storing only values that no earlier model has."""
        self._first[id] = {}
        for name, value in entries.items():
            copied = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            stored = self._values.setdefault(name, {})
            self._first[id][name], _ = stored.setdefault(hash_tensors({name: copied}), (id, copied))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to store, by their names in the file."""
        return {
            self._stored_name(name, id): value for name, values in self._values.items() for id, value in values.values()
        }

    def own_of(self, id: int) -> dict[str, int]:
        """Map the name of each entry that not all models share to the id of the first model with the same value.

        Entries that are the same in all models are left out.
        """
        return {name: first for name, first in self._first[id].items() if self._stored_name(name, first) != name}

    def _stored_name(self, name: str, id: int) -> str:
        shared = len(self._values[name]) == 1 and all(name in first for first in self._first.values())
        return name if shared else f"{name}@{id}"


def parse(text: str, path: Path) -> ModelDescription:
    """Parse the description of an exported file from JSON.

    Raises:
        CheckpointError: The description is missing, or has another format.
    """
    if not text:
        raise CheckpointError(
            f"{path}: has no description of its model. Give a file that raylt export wrote.",
            code="export.malformed",
            path=str(path),
        )
    if len(text) > MAX_DESCRIPTION_LENGTH:
        raise CheckpointError(
            f"{path}: its description has more than {MAX_DESCRIPTION_LENGTH:,} characters ({len(text):,}). Give a file "
            "that raylt export wrote.",
            code="file.too-large",
            path=str(path),
        )
    description = as_json(text, _DESCRIPTION, str(path))
    if description["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: this raylt reads only format {FORMAT} ({description['format']}). Export it again.",
            code="export.other-format",
            path=str(path),
            value=description["format"],
        )
    if problem := _contradiction(description):
        raise CheckpointError(
            f"{path}: {problem}. Give a file that raylt export wrote.", code="export.malformed", path=str(path)
        )
    return description


def _contradiction(description: ModelDescription) -> str | None:
    """Return the contradiction between fields of a description, or None if there is none."""
    image = description["input"]
    if image["height"] * image["width"] > PIXELS:
        return f"images of {image['height']}x{image['width']} pixels, more than {PIXELS:,}"
    if not len(image["mean"]) == len(image["std"]) == image["channels"]:
        return f"mean and std have {len(image['mean'])} and {len(image['std'])} values for {image['channels']} channels"
    if len(set(description["class_names"])) < len(description["class_names"]):
        return "duplicate class name"
    clients = description["clients"] or []
    if len({entry["id"] for entry in clients}) < len(clients):
        return "duplicate client id"
    words = [word for plugin in description["guests"] for word in (plugin["kind"], plugin["name"], plugin["origin"])]
    if not all(word.isprintable() for word in words):
        return "a plugin's kind, name or origin is not printable"
    return None


def to_json(description: ModelDescription) -> str:
    """Return a description as JSON."""
    return _DESCRIPTION.dump_json(description).decode()


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for an exported file that cannot be read."""
    reason = " ".join(str(error).split())[:200]
    return CheckpointError(
        f"{path}: cannot be read ({reason}). Give a file that raylt export wrote.",
        code="export.malformed",
        path=str(path),
        reason=reason,
    )


def task_spec_of(description: ModelDescription) -> TaskSpec:
    """Return the task spec that the model was built for."""
    image = description["input"]
    return TaskSpec(
        description["source"],
        tuple(description["class_names"]),
        (image["height"], image["width"], image["channels"]),
        tuple(image["mean"]),
        tuple(image["std"]),
        kind=description["task"],
    )


def setup_of(description: ModelDescription, path: Path) -> Setup:
    """Return a setup with the method and the model that the description of an exported file names.

    Args:
        description: The description.
        path: Path of the file, for error messages.

    Raises:
        ConfigError: A plugin that the file needs is not installed or has changed.
    """
    sections = {
        "model": description["model"],
        "input": description.get("side"),
        "method": description["method"],
        "augment": "none",
        "evaluation": {"batch": description["batch"]},
    }
    config = check(Config, sections)
    seek(config)
    check_origins([{**plugin} for plugin in description["guests"]], path)
    setup = resolve(config)
    tower = description.get("tower")
    if tower is None:
        return setup
    try:
        with torch.device("meta"):
            new_tower(tower)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: raylt cannot build its image tower ({error}). Give a file that raylt export wrote.",
            code="export.malformed",
            path=str(path),
        ) from None
    # a method that learns prompts deploys their text features as a linear classifier, like a model of FedAvg
    method = FedAvg() if setup.method.learns_prompts else setup.method
    return replace(setup, method=method, model=partial(described_model, description=tower))


def rebuild(setup: Setup, spec: TaskSpec, entries: StateDict) -> nn.Module:
    """Return the network that a setup builds, with the given state-dict entries loaded.

    Raises:
        ConfigError: The entries fit neither the network of method and model, nor that network with another linear
            classifier.
    """
    _check_sizes(setup, spec, entries)
    model = setup.new_model(spec)
    if entries.keys() != model.state_dict().keys() and "classifier.weight" in entries:
        model = _with_classifier_of(model, entries)
    try:
        model.load_state_dict(entries)
    except RuntimeError as error:
        raise _not_rebuildable(setup, " ".join(str(error).split())[:200]) from None
    return model


def _with_classifier_of(model: SplitModel, entries: StateDict) -> SplitModel:
    """Return the model with the kind of classifier to which the entries belong."""
    weight = entries["classifier.weight"]
    if "classifier.log_scale" in entries:
        return with_layer(model, CosineClassifier(weight, entries["classifier.log_scale"]))
    return with_classifier(model, weight, entries.get("classifier.bias"), entries.get("classifier.longest"))


def _check_sizes(setup: Setup, spec: TaskSpec, entries: StateDict) -> None:
    """Check that a network's layers match the sizes of the entries, before memory is allocated for it.

    Raises:
        ConfigError: A layer has another size, or is missing.
    """
    try:
        with torch.device("meta"):
            expected = setup.new_model(spec).state_dict()
    except RayltError:
        raise
    except Exception:  # the network of a plugin may compute while it is built
        return
    for name, value in expected.items():
        if name.startswith("classifier."):
            continue
        if name not in entries and name.startswith("encoder."):
            raise _not_rebuildable(setup, f"{name} is missing")
        if name in entries and value.shape != entries[name].shape:
            raise _not_rebuildable(setup, f"{name} is {list(entries[name].shape)}, not {list(value.shape)}")


def _not_rebuildable(setup: Setup, reason: str) -> ConfigError:
    return ConfigError(
        f"method: its model cannot be built from its entries ({setup.method.name}: {reason}). Export it with "
        f"{spoken('--format pt2', 'format=' + repr('pt2'))}.",
        code="export.not-rebuildable",
        key="method",
        value=setup.method.name,
    )


def choose_client_in(description: ModelDescription, client: str | int | None, path: Path) -> int | None:
    """Return the id of a client in an exported file, by name or id; None if the file has only a global model.

    Raises:
        ConfigError: The client is unknown, or there are several clients and none is named.
    """
    if description["clients"] is not None:
        return choose_client(client, [(entry["id"], entry["name"]) for entry in description["clients"]], str(path))
    if client is not None:
        raise ConfigError(
            f"{path}: has only the global model. Leave out the client ({client}).", code="client.unknown", client=client
        )
    return None


def choose_client(
    client: str | int | None,
    choices: Iterable[tuple[int, str]],
    where: str,
    joining: Iterable[tuple[int, str]] = (),
) -> int:
    """Return the id of a client, by name or id, among the clients that have a model.

    Args:
        client: Name or id; None if there is only one client.
        choices: Id and name of each client.
        where: The run or file, for error messages.
        joining: Id and name of each client that joins after training, and so has no model.

    Raises:
        ConfigError: The client is unknown, or there are several clients and none is named.
    """
    choices = list(choices)
    shown = names_of(choices)
    if client is None:
        if len(choices) > 1:
            raise ConfigError(
                f"{where}: each client has a model of its own. Give {spoken('--client', 'client')}, one of {shown}.",
                code="client.not-named",
            )
        return choices[0][0]
    by_name = {name: id for id, name in reversed(choices)}
    by_id = {str(id): id for id, _ in choices}
    ids = by_id | by_name  # names take precedence over ids
    if str(client) not in ids:
        for id, name in joining:
            if str(client) in (name, str(id)):
                raise joins_later(where, name, shown)
        raise ConfigError(
            f"{where}: has no model of this client ({client}). {did_you_mean(str(client), by_name)}"
            f"Give one of {shown}.",
            code="client.unknown",
            client=client,
        )
    return ids[str(client)]
