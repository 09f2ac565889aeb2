"""`Config`: everything that defines a run, checked once, immutable. Knows no method and imports no torch.

`method` stays a mapping here: its fields belong to the method, which checks them.
"""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from raylt.config.typed import as_typed

MOST = 10**7                # of anything that is counted; what is beyond is a slip, and would be found out by memory
LAST_SEED = 2**63 - 1


def setting(default: Any, what: str, takes: str | None = None, **checks: Any) -> Any:
    """A field that says what it means, for `raylt settings`, and what it takes where its type does not say so."""
    return Field(default=default, description=what, json_schema_extra=None if takes is None else {"takes": takes},
                 **checks)


class Section(BaseModel):
    """A part of the configuration: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_typed(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return as_typed(cls.model_fields[info.field_name].annotation, value)


class DataConfig(Section):
    """Which data, how it is made long-tailed and who gets what."""

    source: str = setting("digits", "The data set. Those from shapes on, and npz:PATH, have label maps.",
                          "digits, cifar10, cifar100, fashion_mnist, cinic10, imagenet_lt, shapes, camvid, cityscapes, "
                          "folder:PATH, npz:PATH, or one's own")
    root: str = setting("data", "The folder that holds the data sets and the cache of decoded images.")
    download: bool = setting(False, "Whether torchvision may fetch a data set that is not under data.root.")
    size: int = setting(224, "The side in pixels to which trees of image files (folder:, imagenet_lt) are decoded; for "
                        "camvid and cityscapes it is the height.", ge=8, le=8192)
    imbalance: float = setting(20.0, "How many times more samples the first class has than the last (IF); 1 keeps the "
                               "data as it is. With label maps it compares the first client with the last.", ge=1,
                               le=MOST)
    partition: Literal["creff", "dirichlet", "dirichlet_min", "hsu", "iid", "by_id", "classes"] = setting(
        "dirichlet", "How the training samples are dealt to the clients.")
    beta: int = setting(1, "With data.partition=classes, how many classes of the label maps a client keeps; all others "
                        "are erased from its maps.", ge=1, le=MOST)
    erased: Literal["background", "unlabelled"] = setting(
        "background", "What the pixels of an erased class become: of one further class, or without a label, as FedSeg "
        "has it.")
    alpha: float = setting(0.5, "The concentration of the Dirichlet draws: the smaller, the more the clients differ.",
                           gt=0, le=MOST)
    min_size: int | None = setting(None, "How many samples every client gets at least; null stands for 0 with "
                                   "dirichlet and for 10 with dirichlet_min.", ge=0, le=MOST)
    clients: int = setting(10, "How many clients there are (K).", ge=1, le=MOST)
    seed: int = setting(0, "The seed of the long-tailed subset and of the partition.", ge=0, le=LAST_SEED)
    split: str | None = setting(None, "The path of a split.json to use; null draws a new split.")
    normalise: bool = setting(True, "Whether pixels are brought to mean 0 and deviation 1 per channel; otherwise they "
                              "lie in 0..1.")
    validation: float = setting(0.0, "The share of each class's training samples that no client gets, so that a search "
                                "can judge on them.", ge=0, lt=1)
    groups: tuple[int, int] | None = setting(
        None, "Two numbers of samples: classes with fewer than the first are few-shot, those with more than the second "
        "many-shot. Null takes the literature's for the source, and 1 % and 5 % of the labelled pixels for label maps.")


class FederationConfig(Section):
    """Who takes part in a round and what happens when some do not answer."""

    rounds: int = setting(30, "How many rounds are run (R).", ge=1, le=MOST)
    participation: float = setting(1.0, "The share of the clients that take part in a round.", gt=0, le=1)
    over_select: float = setting(0.0, "The share of clients asked beyond that; the round ends with the first replies "
                                 "that are enough, so it cannot be repeated exactly.", ge=0, le=10)
    quorum: float = setting(0.8, "The share of the clients asked whose replies must be usable, or the run ends.", gt=0,
                            le=1)
    deadline_s: float | None = setting(None, "The seconds after which a round goes on without the clients that are "
                                       "late; null waits for all.", gt=0, le=MOST)
    retries: int = setting(2, "How many times a client that was lost or failed is asked again for the same reply.",
                           ge=0, le=1000)
    batchnorm: Literal["average", "local"] = setting(
        "average", "What happens to BatchNorm's running statistics: they are averaged like parameters, or each client "
        "keeps its own.")


class LocalConfig(Section):
    """SGD at a client."""

    epochs: int = setting(2, "How many times a client goes through its data in a round.", ge=1, le=MOST)
    batch: int = setting(32, "How many samples a step takes; a last batch of one is dropped, since BatchNorm cannot "
                         "train on it.", ge=2, le=MOST)
    lr: float = setting(0.05, "The learning rate.", gt=0, le=MOST)
    lr_decay: float = setting(0.0, "The share of the learning rate that is taken off every local.lr_decay_every "
                              "rounds.", ge=0, lt=1)
    lr_decay_every: int = setting(1, "The number of rounds between two steps of local.lr_decay.", ge=1, le=MOST)
    momentum: float = setting(0.9, "The momentum of SGD.", ge=0, lt=1)
    weight_decay: float = setting(0.0, "The weight decay of SGD.", ge=0, le=MOST)
    unlabelled: Literal["ignored", "absent"] = setting(
        "ignored", "What pixels without a label teach: nothing; or that they are of one of the classes that the "
        "batch's labels do not show (FedSeg's BackCE).")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "The precision of local training and of features; bfloat16 (autocast) is about twice as fast on "
        "CPUs and GPUs that have it.")

    def steps(self, samples: int, epochs: int | None = None, batch: int | None = None) -> int:
        """How many SGD steps a client with so many samples takes; a last batch of one is dropped.

        Args:
            epochs, batch: these settings by default.
        """
        size = self.batch if batch is None else batch
        return (self.epochs if epochs is None else epochs) * (samples // size + (samples % size > 1))


class ResourcesConfig(Section):
    """How many client actors there are and what each takes. Results do not depend on it."""

    actors: int | Literal["auto"] = setting("auto", "How many client actors are started; auto fills the cluster.")
    clients_per_actor: int | Literal["auto"] = setting("auto", "How many clients an actor holds where "
                                                       "resources.actors is auto.")
    gpus_per_client: float | Literal["auto"] = setting("auto", "The share of a GPU that one client actor takes.")
    cpus_per_client: float = setting(1.0, "The CPUs, and so the threads, that one client actor takes.", gt=0,
                                     le=MOST)

    @field_validator("actors", "clients_per_actor")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= MOST:
            raise ValueError("must be at least 1" if value < 1 else f"must be at most {MOST}")
        return value

    @field_validator("gpus_per_client")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 <= value <= MOST:
            raise ValueError(f"must be at most {MOST}" if value > MOST else "must be at least 0")
        return value


class EvaluationConfig(Section):
    """When models are judged on the balanced test set; after the last round they always are."""

    every: int = setting(1, "The number of rounds between two evaluations of the global model.", ge=1, le=MOST)
    personal: int = setting(0, "The number of rounds between two evaluations of every client's own model, for "
                            "personalised methods; 0 judges them only at the end.", ge=0, le=MOST)
    batch: int = setting(500, "How many images are judged at a time.", ge=1, le=MOST)


class OutputConfig(Section):
    """What is kept of a run."""

    checkpoint_every: int = setting(1, "The number of rounds between two checkpoints.", ge=1, le=MOST)
    keep: int = setting(2, "How many checkpoints are kept; the one before the last is the fallback.", ge=2, le=MOST)


class Config(Section):
    """Everything that defines a run. Only the method has no default: it must be named."""

    seed: int = setting(0, "The seed of initial weights, sampling, batches and augmentation.", ge=0,
                        le=LAST_SEED)
    data: DataConfig = DataConfig()
    model: str = setting("small", "The network; lraspp gives label maps, the others classes.",
                         "resnet8, resnet8_proj, resnet18, resnet50, resnet50_proj, cnn, small, lraspp, "
                         "torchvision:NAME, timm:NAME, or one's own")
    weights: str | None = setting(None, "Where the weights of lraspp's encoder come from: imagenet fetches "
                                  "torchvision's for mobilenet_v3_small, a path names such a file on every node; null "
                                  "starts from random weights.")
    method: dict[str, Any] = setting(..., "The method's name, as in method=sfd; its own fields are written "
                                     "method.FIELD, and raylt methods lists them.")
    augment: str = setting("none", "How training images, and their label maps alike, are varied.",
                           "none, crop_flip, resized_crop_flip, scale_crop_flip, or one's own")
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


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting by its key, in the order of the file."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field


def allowed(field: FieldInfo) -> str:
    """The values that a setting takes, as a person reads them: words, or a kind of number and its bounds."""
    if isinstance(field.json_schema_extra, dict):
        return str(field.json_schema_extra["takes"])
    branches = typing.get_args(field.annotation) if typing.get_origin(field.annotation) in (
        typing.Union, types.UnionType) else (field.annotation,)
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = " and ".join(f"{sign} {getattr(check, name):g}" for check in field.metadata
                          for name, sign in signs.items() if hasattr(check, name))
    return " or ".join(_kind(branch, bounds) for branch in branches)


def _kind(branch: Any, bounds: str) -> str:
    if typing.get_origin(branch) is Literal:
        return ", ".join(map(str, typing.get_args(branch)))
    if branch in (int, float):
        return f"{'a whole number' if branch is int else 'a number'} {bounds}".strip()
    if typing.get_origin(branch) is tuple:
        return "[number, number]"
    words = {bool: "true, false", str: "text", types.NoneType: "null"}
    return words.get(branch, "a name, or a mapping with name and fields")
