"""`Config`: everything that defines a run, checked once, immutable. Knows no method and imports no torch.

A configuration is a YAML file and `key=value` overrides; without a file it is the embedded default, scikit-learn's
handwritten digits. `method` stays a mapping here: its fields belong to the method, which checks them.
"""

import difflib
import math
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from raylt.errors import ConfigError

# of a run without arguments, which should be over in a minute: fewer random features than the paper's 5000
DIGITS_METHOD = {"name": "sfd", "rf_dim": 1000}


def setting(default: Any, what: str, **checks: Any) -> Any:
    """A field that says what it means, for `raylt settings`."""
    return Field(default=default, description=what, **checks)


class Section(BaseModel):
    """A part of the configuration: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(Section):
    """Which data, how it is made long-tailed and who gets what."""

    source: str = setting("digits", "digits, cifar10, cifar100, fashion_mnist, cinic10, imagenet_lt, folder:PATH, "
                          "npz:PATH; with label maps: shapes, camvid, cityscapes, npz:PATH")
    root: str = setting("data", "folder that holds the data sets and the cache of decoded images")
    download: bool = setting(False, "whether torchvision may fetch a data set that is not under root")
    size: int = setting(224, "side in pixels to which image trees (folder:, imagenet_lt) are decoded; of camvid and "
                        "cityscapes the height", ge=8)
    imbalance: float = setting(20.0, "IF: size of the first class over that of the last, 1 keeps the data as it is; "
                               "with label maps, of the first client over the last", ge=1, allow_inf_nan=False)
    partition: Literal["creff", "dirichlet", "dirichlet_min", "iid", "by_id", "classes"] = setting(
        "dirichlet", "how the samples are dealt to clients")
    beta: int = setting(1, "of partition classes: classes of label maps that a client keeps, all others are background "
                        "to it", ge=1)
    alpha: float = setting(0.5, "concentration of the Dirichlet draws", gt=0, allow_inf_nan=False)
    min_size: int | None = setting(None, "samples that every client gets at least; by default 0 for dirichlet and 10 "
                                   "for dirichlet_min", ge=0)
    clients: int = setting(10, "K", ge=1)
    seed: int = setting(0, "of the long-tailed subset and the partition", ge=0)
    split: str | None = setting(None, "a split.json to use instead of drawing one")
    normalise: bool = setting(True, "whether pixels are brought to mean 0 and deviation 1 per channel; else they are "
                              "in 0..1")
    validation: float = setting(0.0, "share of each class's training samples that no client gets: a search judges on "
                                "them", ge=0, lt=1)
    groups: tuple[int, int] | None = setting(None, "few-shot classes have fewer samples than the first, many-shot ones "
                                             "more than the second; by default the literature's for the source, and of "
                                             "label maps 1 % and 5 % of the labelled pixels")


class FederationConfig(Section):
    """Who takes part in a round and what happens when some do not answer."""

    rounds: int = setting(30, "R", ge=1)
    participation: float = setting(1.0, "share of the clients asked in a round", gt=0, le=1)
    over_select: float = setting(0.0, "so much more are asked; the round ends with the first participation * K usable "
                                 "replies, so it cannot be repeated exactly", ge=0, le=10)
    quorum: float = setting(0.8, "share of a call's clients whose replies must be usable", gt=0, le=1)
    deadline_s: float | None = setting(None, "seconds after which a call goes on without those that are late", gt=0)
    retries: int = setting(2, "times a client that was lost or raised is asked again in the same call", ge=0)
    batchnorm: Literal["average", "local"] = setting("average", "running statistics: averaged like parameters, or kept "
                                                     "by each client")


class LocalConfig(Section):
    """SGD at a client."""

    epochs: int = setting(2, "passes over the client's data in a round", ge=1)
    batch: int = setting(32, "samples per step; a last batch of one is dropped, BatchNorm cannot train on it", ge=2)
    lr: float = setting(0.05, "learning rate", gt=0, allow_inf_nan=False)
    lr_decay: float = setting(0.0, "share of lr that is taken off every lr_decay_every rounds", ge=0, lt=1)
    lr_decay_every: int = setting(1, "rounds between steps of lr_decay", ge=1)
    momentum: float = setting(0.9, "of SGD", ge=0, lt=1)
    weight_decay: float = setting(0.0, "of SGD", ge=0, allow_inf_nan=False)
    precision: Literal["float32", "bfloat16"] = setting("float32", "bfloat16: autocast in local training and of "
                                                        "features, twice as fast on CPUs and GPUs that have it")


class ResourcesConfig(Section):
    """How many client actors there are and what each takes. Results do not depend on it."""

    actors: int | Literal["auto"] = setting("auto", "client actors")
    clients_per_actor: int | Literal["auto"] = setting("auto", "used when actors is auto")
    gpus_per_client: float | Literal["auto"] = setting("auto", "share of a GPU of one client actor")
    cpus_per_client: float = setting(1.0, "CPUs, and threads, of one client actor", gt=0, allow_inf_nan=False)

    @field_validator("actors", "clients_per_actor")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1")
        return value

    @field_validator("gpus_per_client")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise ValueError("must be at least 0")
        return value


class EvaluationConfig(Section):
    """When models are judged on the balanced test set; after the last round they always are."""

    every: int = setting(1, "rounds between evaluations of the global model", ge=1)
    personal: int = setting(0, "rounds between evaluations of every client's own model, for personalised methods; 0: "
                            "only at the end", ge=0)
    batch: int = setting(500, "images at a time", ge=1)


class OutputConfig(Section):
    """What is kept of a run."""

    checkpoint_every: int = setting(1, "rounds between checkpoints", ge=1)
    keep: int = setting(2, "checkpoints kept; the one before the last is the fallback", ge=2)


class Config(Section):
    """Everything that defines a run."""

    seed: int = setting(0, "of initial weights, sampling, batches and augmentation", ge=0)
    data: DataConfig = DataConfig()
    model: str = setting("small", "resnet8, resnet8_proj, resnet18, resnet50, resnet50_proj, cnn, small, lraspp, "
                         "torchvision:NAME, timm:NAME, or one's own: " "a model; lraspp gives label maps")
    weights: str | None = setting(None, "of lraspp's encoder at the start: imagenet fetches torchvision's of "
                                  "mobilenet_v3_small, a path is such a file on every node; else random")
    method: dict[str, Any] = setting(DIGITS_METHOD, "a method's name; its own fields as method.FIELD")
    augment: str = setting("none", "none, crop_flip, resized_crop_flip, scale_crop_flip, or one's own: of training images, and of their label maps alike")
    federation: FederationConfig = FederationConfig()
    local: LocalConfig = LocalConfig()
    resources: ResourcesConfig = ResourcesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    output: OutputConfig = OutputConfig()

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("must be a method's name, or a mapping with its name and fields")
        return value


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file (or the embedded default), changed by `key=value` overrides.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or range; names the value and the remedy.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give a YAML file that exists") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
        tree = {} if tree is None else tree             # an empty file
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: must be a mapping of settings, is a {type(tree).__name__}")
    tree.setdefault("method", dict(DIGITS_METHOD))      # here, so that method.FIELD=... needs no method=NAME
    # the method first: its name drops the fields of another, not those given beside it
    for override in sorted(overrides, key=lambda text: not text.startswith(("method=", "method.name="))):
        _set(tree, override)
    return check(Config, tree)


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting by its key, in the order of the file."""
    for name, field in Config.model_fields.items():
        part = field.annotation
        if isinstance(part, type) and issubclass(part, Section):
            yield from ((f"{name}.{key}", inner) for key, inner in part.model_fields.items())
        else:
            yield name, field


def check(kind: type[BaseModel], tree: dict[str, Any], prefix: str = "") -> Any:
    """`kind` built from a mapping; the first thing that is wrong becomes one `ConfigError`."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(kind, error, prefix)) from None


def _set(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = "method" if key == "method.name" else key
    if not equals or not key:
        raise ConfigError(f"{override!r}: an override is written key=value, as in federation.rounds=50")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{override!r}: {text!r} is not a YAML value; quote it") from None
    if isinstance(value, str):
        value = _number(value)
    *parents, last = key.split(".")
    for name in parents:
        below = tree.setdefault(name, {})
        if name == "method" and isinstance(below, str):     # method: fedprox, then method.mu=0.1
            below = tree[name] = {"name": below}
        if not isinstance(below, dict):
            raise ConfigError(f"{override!r}: {name} is {below!r}, which has no fields")
        tree = below
    if key == "method" and isinstance(value, str):          # another method: the fields of the one before do not apply
        value = {"name": value}
    tree[last] = value


def _number(text: str) -> str | float:
    """YAML 1.1 reads 1e-5 as a string; people mean the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _explain(kind: type[BaseModel], error: ValidationError, prefix: str) -> str:
    first = error.errors()[0]
    # pydantic adds the branch of a union to the path; names of settings never hold brackets or capitals
    names = [str(part) for part in first["loc"]]
    where, model = [], kind
    for name in names:
        field = model.model_fields.get(name)
        where.append(name)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        model = inner
    key = prefix + ".".join(where)
    if first["type"] == "extra_forbidden":
        if not model.model_fields:
            return f"{key}: no such setting; there are none here."
        nearest = _nearest(key, prefix, model)
        hint = f"; did you mean {nearest}?" if nearest else "."
        return f"{key}: no such setting{hint} There are: {', '.join(model.model_fields)}."
    said = first["msg"].removeprefix("Value error, ")
    said = said[0].lower() + said[1:]
    expected = _expected(model, where[-1])
    return f"{key} = {first['input']!r}: {said}{expected}"


def _nearest(key: str, prefix: str, model: type[BaseModel]) -> str | None:
    """The setting that was probably meant: of this section, or of the same name in another."""
    section, _, name = key.rpartition(".")
    close = difflib.get_close_matches(name, model.model_fields, 1)
    if close or prefix:
        return f"{section}.{close[0]}".strip(".") if close else None
    return next((known for known, _ in settings() if known.rpartition(".")[2] == name), None)


def _expected(model: type[BaseModel], name: str) -> str:
    """For a choice between words, the words: pydantic lists only one branch of a union."""
    field = model.model_fields.get(name)
    if field is None or typing.get_origin(field.annotation) not in (typing.Union, types.UnionType):
        return ""
    words = [str(v) for branch in typing.get_args(field.annotation) if typing.get_origin(branch) is Literal
             for v in typing.get_args(branch)]
    return f", or {', '.join(words)}" if words else ""
