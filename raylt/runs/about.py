"""`About`: what an exported file says of itself, as JSON in its metadata."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from raylt.config import Config, check
from raylt.core.setup import Setup
from raylt.data.task import Facts
from raylt.errors import CheckpointError, ConfigError
from raylt.registry import check_origins, resolve, seek
from raylt.runs.identity import Guest
from raylt.typed import as_json, closed

FORMAT = 1
KEY = "raylt"               # of the metadata
Size = Annotated[int, Field(ge=1)]


@closed
class Input(TypedDict):
    """Images: uint8 [n, height, width, channels]; mean and deviation are per channel, of pixels in [0, 1]; `fit` is how
    a file is brought to that size, see `raylt.data.decoding.fitted_image`."""

    height: Size
    width: Size
    channels: Size
    mean: list[float]
    std: list[float]
    fit: Literal["crop", "pad"]


@closed
class ClientEntry(TypedDict):
    """One client's model: which value of each entry that differs between clients is its own, by the id of the first
    client that has it; and how well it did, by the names of `raylt.metrics.KINDS`."""

    id: int
    name: str
    own: dict[str, int]
    figures: dict[str, float | None]


@closed
class About(TypedDict):
    """What a file says of itself.

    Fields: `model` and `method` are the architecture, as a configuration names it; `batch` how many images were judged
    at a time; `run` and `split_sha256` what it comes from; `figures` how well the run did; `clients` is None in the
    file of a global model.
    """

    format: int
    task: Literal["classification", "segmentation"]
    class_names: list[str]
    input: Input
    model: str
    method: dict[str, Any]
    batch: Size
    source: str
    rounds: int
    run: str
    split_sha256: str
    figures: dict[str, float | None]
    versions: dict[str, str]
    guests: list[Guest]
    clients: list[ClientEntry] | None


_ABOUT = TypeAdapter(About)


def facts_of(about: About) -> Facts:
    """What the model was told of its task."""
    image = about["input"]
    return Facts(about["source"], tuple(about["class_names"]), (image["height"], image["width"], image["channels"]),
                 tuple(image["mean"]), tuple(image["std"]), kind=about["task"])


def setup_of(about: About, what: str) -> Setup:
    """Method and model, as values.

    Args:
        what: what errors call the file.

    Raises:
        ConfigError: what was not raylt's own is not here, or has changed since.
    """
    config = check(Config, {"model": about["model"], "method": about["method"], "augment": "none",
                            "evaluation": {"batch": about["batch"]}})
    seek(config)
    check_origins([{**guest} for guest in about["guests"]], Path(what))
    return resolve(config)


def choose_in(about: About, client: str | int | None, path: Path) -> int | None:
    """The id of a client among those of a file; None where it has the global model.

    Raises:
        ConfigError: there is no such, or several and none is named.
    """
    if about["clients"] is not None:
        return choose(client, [(each["id"], each["name"]) for each in about["clients"]], str(path))
    if client is not None:
        raise ConfigError(f"{path}: has the global model alone; leave out client {client}")
    return None


def choose(client: str | int | None, known: Iterable[tuple[int, str]], what: str) -> int:
    """The id of a client, by its name or its id, among those that have a model.

    Args:
        client: None where there is only one.
        known: id and name of each.
        what: what errors call where they are from.

    Raises:
        ConfigError: there is no such, or several and none is named.
    """
    known = list(known)
    names = ", ".join(name for _, name in known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
    if client is None:
        if len(known) > 1:
            raise ConfigError(f"{what}: each client has a model of its own; give --client, one of {names}")
        return known[0][0]
    for id, called in [*known, *((id, str(id)) for id, _ in known)]:       # names come first
        if str(client) == called:
            return id
    raise ConfigError(f"{what}: has no model of a client {client}; it has {names}")


def parse(text: str, path: Path) -> About:
    """What a file says of itself, from JSON."""
    about = as_json(text, _ABOUT, str(path))
    if about["format"] != FORMAT:
        raise CheckpointError(f"{path}: has format {about['format']}, this raylt reads {FORMAT}; export it again")
    return about


def text_of(about: About) -> str:
    """The JSON of what a file says of itself."""
    return _ABOUT.dump_json(about).decode()
