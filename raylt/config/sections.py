"""`Config`: everything that defines a run, checked once, immutable. Knows no method and imports no torch.

`method` stays a mapping here: its fields belong to the method, which checks them.
"""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from raylt.config.data import DataConfig
from raylt.config.federation import FederationConfig, PrivacyConfig
from raylt.config.section import LAST_SEED, MOST, Section, setting


class LocalConfig(Section):
    """Training at a client."""

    epochs: int = setting(2, "How many times a client goes through its data in a round.", ge=1, le=MOST)
    batch: int = setting(32, "How many samples a step takes; a last batch of one is dropped, since BatchNorm cannot "
                         "train on it.", ge=2, le=MOST)
    lr: float = setting(0.05, "The learning rate.", gt=0, le=MOST)
    lr_decay: float = setting(0.0, "The share of the learning rate that is taken off every local.lr_decay_every "
                              "rounds.", ge=0, lt=1)
    lr_decay_every: int = setting(1, "The number of rounds between two steps of local.lr_decay.", ge=1, le=MOST)
    schedule: Literal["step", "cosine"] = setting(
        "step", "How the learning rate falls over the rounds: by local.lr_decay, or along a cosine that would reach 0 "
        "after federation.rounds.")
    optimiser: Literal["sgd", "adam", "adamw"] = setting(
        "sgd", "What trains a client's model; Adam and AdamW begin anew in each call, with moments of 0.9 and 0.999.")
    momentum: float = setting(0.9, "The momentum of SGD.", ge=0, lt=1)
    weight_decay: float = setting(0.0, "The weight decay; with AdamW it is decoupled from the gradient.", ge=0,
                                  le=MOST)
    unlabelled: Literal["ignored", "absent"] = setting(
        "ignored", "What pixels without a label teach: nothing; or that they are of one of the classes that the "
        "batch's labels do not show (FedSeg's BackCE).")
    precision: Literal["float32", "tf32", "bfloat16"] = setting(
        "float32", "The precision of local training and of features; tf32 rounds the factors of a GPU's products to 10 "
        "bits, on a CPU it is float32; bfloat16 (autocast) is about twice as fast on CPUs and GPUs that have it.")

    def steps(self, samples: int, epochs: int | None = None, batch: int | None = None) -> int:
        """How many SGD steps a client with so many samples takes; a last batch of one is dropped.

        Args:
            epochs, batch: these settings by default.
        """
        size = self.batch if batch is None else batch
        return (self.epochs if epochs is None else epochs) * (samples // size + (samples % size > 1))


class ResourcesConfig(Section):
    """What is computed on, how many client actors there are and what each takes. Results depend on the kind of device
    alone, and on a GPU, without resources.deterministic, in their last bits on the order in which its threads end."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "What is computed on: auto takes the GPUs that are there, on Ray those that it leases; cuda refuses to "
        "compute anywhere else. A resumed or branched run changes to another kind only where this names it.")
    deterministic: bool = setting(
        False, "Whether a GPU gives the same bits every time: deterministic kernels alone, of cuDNN, cuBLAS and torch, "
        "which are slower and need more memory. Operations without one are refused. A CPU always does.")
    graphs: Literal["auto", "off"] = setting(
        "auto", "Whether a GPU replays the steps of training as CUDA graphs, in one launch each: auto, where a "
        "method's steps are declared fit for it; off, never. It is to change no result.")
    actors: int | Literal["auto"] = setting("auto", "How many client actors are started; auto fills the cluster.")
    clients_per_actor: int | Literal["auto"] = setting("auto", "How many clients an actor holds where "
                                                       "resources.actors is auto.")
    gpus_per_client: float | Literal["auto"] = setting("auto", "The share of a GPU that one client actor takes; "
                                                        "0 keeps all off the GPUs, the server too.")
    cpus_per_client: float = setting(1.0, "The CPUs, and so the threads, that one client actor takes.", gt=0,
                                     le=MOST)

    @field_validator("actors", "clients_per_actor")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= MOST:
            raise ValueError("must be at least 1" if value < 1 else f"must be at most {MOST}")
        return value

    @property
    def gpu_share(self) -> float | Literal["auto"]:
        """The share of a GPU that one client actor takes; 0 keeps everything off the GPUs, the server too."""
        return 0.0 if self.device == "cpu" else self.gpus_per_client

    @field_validator("gpus_per_client")
    @classmethod
    def _not_negative(cls, value: float | str, info: ValidationInfo) -> float | str:
        if isinstance(value, float) and not 0 <= value <= MOST:
            raise ValueError(f"must be at most {MOST}" if value > MOST else "must be at least 0")
        if value == 0 and info.data.get("device") == "cuda":
            raise ValueError("keeps everything off the GPUs, and resources.device = cuda asks for them")
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
                         "resnet8, resnet8_proj, resnet18, resnet32, resnet34, resnet50, resnet50_proj, cnn, cnn_proj, "
                         "small, lraspp, torchvision:NAME, timm:NAME, or one's own")
    weights: str | None = setting(None, "Where the weights of an encoder come from, of lraspp, torchvision:NAME and "
                                  "timm:NAME: imagenet fetches the library's (mobilenet_v3_small's for lraspp), a path "
                                  "names a file with such a state dict on every node; the classifier starts anew. Null "
                                  "starts from random weights.")
    method: dict[str, Any] = setting(..., "The method's name, as in method=sfd; its own fields are written "
                                     "method.FIELD, and raylt methods lists them.")
    augment: str = setting("none", "How training images are varied: crops, scales and flips, with their label maps, "
                           "and torchvision's transforms of colours or of everything; several are joined by +, as in "
                           "crop_flip+color_jitter.",
                           "none, crop_flip, resized_crop_flip, scale_crop_flip, color_jitter, rand_augment, "
                           "trivial_augment, auto_augment, or one's own")
    federation: FederationConfig = FederationConfig()
    privacy: PrivacyConfig = PrivacyConfig()
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
    if isinstance(field.json_schema_extra, dict) and "takes" in field.json_schema_extra:
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
