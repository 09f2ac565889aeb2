"""The settings of a run: `Config` and its sections.

Each setting declares its default, its allowed values and its meaning, which `raylt settings` prints. This module does
not import torch or any method: `Config.method` is a mapping whose fields `raylt.methods` checks.
"""

import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from raylt.config.typed import as_typed
from raylt.notebook import html_table

MAX_COUNT = 10**7  # Maximum of counts and sizes; larger numbers are mistakes that would exhaust the memory.
LAST_SEED = 2**63 - 1
UNSHOWN_BOUNDS = (MAX_COUNT, LAST_SEED)  # Bounds that only catch mistakes, so the entries of settings omit them.
UNLISTED = f"Numbers without an upper bound here are at most {MAX_COUNT:,}, and seeds at most {LAST_SEED:,}."
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}  # By pydantic's names of bounds.
MAX_THREADS = 256  # Maximum number of threads of a process; OpenMP crashes with many more.


def setting(default: Any, description: str, takes: str | None = None, **checks: Any) -> Any:
    """Declare a setting with its default, help text and bounds, as a pydantic field.

    Args:
        default: Default; `...` for none.
        description: Meaning, in sentences.
        takes: Allowed values, if the type does not define them.
        checks: Constraints of pydantic (`ge`, `gt`, `le`, `lt`).
    """
    extra: Any = None if takes is None else {"takes": takes}
    return Field(default=default, description=description, json_schema_extra=extra, **checks)


class Section(BaseModel):
    """Base class of the configuration's sections, which are immutable and reject unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_typed(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return as_typed(cls.model_fields[info.field_name].annotation, value)


BENCHMARKS = (
    "digits",
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "cinic10",
    "imagenet_lt",
    "shapes",
    "camvid",
    "cityscapes",
)
USUAL = {"imbalance": 20.0, "partition": "dirichlet", "clients": 10}  # Defaults of benchmarks.
SCENES = ("shapes", "camvid", "cityscapes")  # Benchmarks with label maps.


class DataConfig(Section):
    """Settings of the data: the data set, its long tail and its partition over clients.

    A setting that is None takes its value from the data, because a user's own data have their own clients and long
    tail. Benchmarks have defaults for all settings but `test`.
    """

    source: str = setting(
        "digits",
        "Data set. shapes, camvid, cityscapes and npz:PATH may have label maps.",
        "digits, cifar10, cifar100, fashion_mnist, cinic10, imagenet_lt, shapes, camvid, cityscapes, "
        "folder:PATH, npz:PATH, hf:NAME@REVISION, hf:PATH, ray:PATH, or your own",
    )
    root: str = setting("data", "Folder with the data sets and the cache of decoded images.")
    download: bool = setting(False, "Let torchvision fetch a data set that is not under data.root.")
    size: int = setting(
        224,
        "Side in pixels of images decoded from files (folder:, hf:, ray:, imagenet_lt). For camvid and cityscapes it "
        "is the height. Images of other sources keep their size.",
        ge=8,
        le=8192,
    )
    image_column: str | None = setting(
        None, "Column of images, for hf: and ray:. Null takes the only column of images."
    )
    label_column: str | None = setting(
        None, "Column of classes, for hf: and ray:. Null takes the only column of classes."
    )
    client_column: str | None = setting(
        None, "Column with each image's client, for hf: and ray:. Null means that there is no such column."
    )
    channels: Literal["auto", 1, 3] = setting(
        "auto",
        "Channels of images from folder:, hf: and ray:; 1 is grey, 3 is colour. auto is 1 if all images are grey.",
    )
    fit: Literal["crop", "pad"] = setting(
        "crop",
        "Way to make images from folder:, hf: and ray: square. crop keeps the centre; pad adds black borders.",
    )
    depth: int | None = setting(
        None,
        "Bits of grey images that have more than 8: white is 2^depth - 1 in every file. Null is the full scale of the "
        "type: 65535 for 16 bits, 1 for floating-point numbers. Integers of 32 bits need a depth.",
        ge=1,
        le=32,
    )
    bad: Literal["stop", "skip"] = setting(
        "stop",
        "Treatment of images from folder:, hf: and ray: that cannot be decoded. stop names all of them and ends the "
        "run; skip counts them and leaves them out.",
    )
    doubles: Literal["keep", "drop", "refuse"] = setting(
        "keep",
        "Treatment of test images that are also training images, pixel by pixel. keep counts them in a notice. drop "
        "leaves them out; without a test part it keeps one copy of every image. refuse ends the run.",
    )
    imbalance: float | None = setting(
        None,
        "Imbalance factor: samples of the first class over samples of the last. In a user's own data the "
        "largest class counts as first. With label maps it compares clients, not classes. 1 keeps all samples. Null is "
        "20 for benchmarks, and 1 for imagenet_lt, a user's own data, and label maps with data.partition=by_id or iid.",
        ge=1,
        le=MAX_COUNT,
    )
    tail: Literal["global", "local", "mixed"] = setting(
        "global",
        "Samples that data.imbalance makes long-tailed. global: the samples of all clients together. local: the "
        "samples of each client, with its own order of classes. mixed: both.",
    )
    partition: str | None = setting(
        None,
        "Rule that divides the training samples between clients. Null is by_id for data that record each image's "
        "client, otherwise dirichlet. imported is the rule of index lists in data.split.",
        "creff, dirichlet, dirichlet_min, exdir, hsu, iid, by_id, classes, pathological, shards, quantity, imported, "
        "null, or your own",
    )
    per_client: int = setting(
        2,
        "Classes of a client with data.partition=pathological (with exdir at most these); shards of a client with "
        "data.partition=shards.",
        ge=1,
        le=MAX_COUNT,
    )
    beta: int = setting(
        1,
        "Classes that a client keeps in its label maps, with data.partition=classes. The others are erased.",
        ge=1,
        le=MAX_COUNT,
    )
    erased: Literal["background", "unlabelled"] = setting(
        "background",
        "Label of the pixels of an erased class: an additional class, or no label (FedSeg).",
    )
    alpha: float = setting(
        0.5, "Concentration of the Dirichlet draws. A smaller value makes clients differ more.", gt=0, le=MAX_COUNT
    )
    min_size: int | None = setting(
        None,
        "Smallest number of samples of a client. Null is 0 with dirichlet, and 10 with dirichlet_min and exdir.",
        ge=0,
        le=MAX_COUNT,
    )
    clients: int | None = setting(
        None,
        "Number of clients (K). Null is the number of clients in the data with by_id, otherwise 10.",
        ge=1,
        le=MAX_COUNT,
    )
    new_clients: int = setting(
        0,
        "Number of clients, drawn at random, that join after training. They take no part in training and are evaluated "
        "separately.",
        ge=0,
        le=MAX_COUNT,
    )
    test: float | None = setting(
        None,
        "Share of each client's images that is kept as its test images, if the data name clients and have no test "
        "part. Null is 0.2 for such data.",
        gt=0,
        lt=1,
    )
    test_share: float | None = setting(
        None,
        "Share of each class's images that becomes the test set, if the data name no clients and have no test part. "
        "Null is 0.2 for such data.",
        gt=0,
        lt=1,
    )
    test_part: str | None = setting(
        None,
        "Part that is the test set, for folder:, hf: and ray:. Null is test; folder: and hf: use validation if there "
        "is no test part.",
    )
    seed: int = setting(0, "Seed of the long-tailed subset and of the partition.", ge=0, le=LAST_SEED)
    split: str | None = setting(
        None, "Path of a split.json to use, or of index lists from another tool. Null draws a new split."
    )
    normalise: bool = setting(
        True, "Scale each channel to mean 0 and standard deviation 1. false leaves pixels in [0, 1]."
    )
    validation: float = setting(
        0.0,
        "Share of each class's training samples that no client gets, on which searches evaluate.",
        ge=0,
        lt=1,
    )
    auxiliary: int = setting(
        0,
        "Number of training images of each class that the server holds, for methods that need some (ratioloss). They "
        "are images that no client has and, if there are too few, copies of clients' images.",
        ge=0,
        le=MAX_COUNT,
    )
    groups: tuple[int, int] | None = setting(
        None,
        "Two numbers of samples [low, high]. Classes below low are few-shot, classes above high many-shot. Null "
        "depends on the largest class of the training images: 20 and 60 below 200 images, 20 and 100 below 2000, else "
        "200 and 1000. For label maps it is 1 % and 5 % of the labelled pixels.",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_usual(cls, tree: Any) -> Any:
        """Fill in the literature's usual imbalance, partition and number of clients for benchmark data sets.

        Values that the user has set are kept.
        """
        source = tree.get("source", "digits") if isinstance(tree, dict) else None
        if not isinstance(source, str) or source not in BENCHMARKS:
            return tree
        partition = tree.get("partition")
        whole = source == "imagenet_lt" or (source in SCENES and partition in ("by_id", "iid"))
        usual = USUAL | ({"imbalance": 1.0} if whole else {})
        if tree.get("split") is not None or partition == "by_id":
            usual = {key: value for key, value in usual.items() if key != "clients"}  # the file or the data define it
        return tree | {key: value for key, value in usual.items() if tree.get(key) is None}


class FederationConfig(Section):
    """Settings of a round: the clients that take part, and how their replies are handled."""

    rounds: int = setting(
        30,
        "Number of rounds (R). 0 runs only the exchange after the last round, for methods that fit a classifier to "
        "statistics, with trainable=classifier.",
        ge=0,
        le=MAX_COUNT,
    )
    patience: int | None = setting(
        None,
        "End the rounds early once the accuracy on validation samples (data.validation) has not risen for this many "
        "rounds. The last phase of a method then follows as usual. Null runs all rounds.",
        ge=1,
        le=MAX_COUNT,
    )
    participation: float = setting(
        1.0, "Share of the clients that take part in a round. Their number is rounded up.", gt=0, le=1
    )
    sampling: Literal["fixed", "poisson"] = setting(
        "fixed",
        "Rule that draws a round's clients. fixed: always the same number. poisson: each client independently, with "
        "probability federation.participation, so the number varies.",
    )
    over_select: float = setting(
        0.0,
        "Share of additional clients to ask. The round ends when enough replies have arrived, so the run cannot be "
        "repeated exactly.",
        ge=0,
        le=10,
    )
    quorum: float = setting(
        0.8, "Minimum share of the asked clients with usable replies. With fewer, the run ends.", gt=0, le=1
    )
    deadline_s: float | None = setting(
        None,
        "Seconds after which a round continues without late clients. Null waits for all. With the local fleet, whose "
        "clients run one after another, it is a client's own time.",
        gt=0,
        le=MAX_COUNT,
    )
    retries: int = setting(2, "Number of further attempts to get a reply from a lost or failed client.", ge=0, le=1000)
    batchnorm: Literal["average", "local"] = setting(
        "average",
        "Treatment of BatchNorm's running statistics: average them like parameters, or keep each client's own.",
    )
    robust: Literal["median", "trimmed_mean", "norm_clipped_mean"] | None = setting(
        None,
        "Rule for means against hostile clients. median: of each entry. trimmed_mean: without the largest and "
        "smallest fifth. norm_clipped_mean: of replies clipped to the median distance from the median. Null is the "
        "plain mean. Sums over samples follow the rule for each class. The server then holds all replies of a round.",
    )
    secure: bool = setting(
        False,
        "Give the server only sums of masked uploads, as in secure aggregation. Methods that need each client's "
        "upload are rejected. It simulates the protocol's arithmetic, failures and cost; see SECURITY.md.",
    )


class PrivacyConfig(Section):
    """Settings of differential privacy, for samples (epsilon) or for clients (update_epsilon)."""

    epsilon: float | None = setting(
        None,
        "Epsilon of differential privacy for each sample, for the sums that clients upload after the last round. "
        "Null adds no noise.",
        gt=0,
        le=1000,
    )
    delta: float = setting(
        1e-5,
        "Probability with which epsilon may be exceeded. Choose less than one over the number of samples, or of "
        "clients with privacy.update_epsilon.",
        gt=0,
        lt=1,
    )
    clip: float = setting(1.0, "Norm to which longer features are clipped, with privacy.epsilon.", gt=0, le=MAX_COUNT)
    update_epsilon: float | None = setting(
        None,
        "Epsilon of differential privacy for each client, for the models of all rounds. A run whose rounds would "
        "exceed it does not start. Null adds no noise.",
        gt=0,
        le=1000,
    )
    noise_multiplier: float = setting(
        1.0,
        "Noise in a sum of updates in units of privacy.update_clip, with privacy.update_epsilon.",
        ge=0.01,  # less noise spends more than the largest budget in one round
        le=MAX_COUNT,
    )
    update_clip: float = setting(
        1.0, "Norm to which longer updates are clipped, with privacy.update_epsilon.", gt=0, le=MAX_COUNT
    )

    @property
    def longest(self) -> float | None:
        """The norm to which features are clipped, or None if they are not clipped."""
        return None if self.epsilon is None else self.clip


class LocalConfig(Section):
    """Settings of the training at a client."""

    epochs: int | float = setting(
        2,
        "Passes of a client over its data in a round. A fraction such as 0.5 ends within a pass, at the nearest whole "
        "step but after at least one step.",
        "a number > 0",
        gt=0,
        le=MAX_COUNT,
    )
    steps: int | None = setting(
        None,
        "Steps of a client in a round, the same for every client, in place of local.epochs. Null uses local.epochs.",
        ge=1,
        le=MAX_COUNT,
    )
    batch: int = setting(
        32,
        "Samples per step. A last batch of one sample is dropped, because BatchNorm cannot train on it.",
        ge=2,
        le=MAX_COUNT,
    )
    lr: float = setting(0.05, "Learning rate.", gt=0, le=MAX_COUNT)
    lr_decay: float = setting(
        0.0, "Share by which the learning rate falls every local.lr_decay_every rounds.", ge=0, lt=1
    )
    lr_decay_every: int = setting(1, "Rounds between two steps of local.lr_decay.", ge=1, le=MAX_COUNT)
    schedule: str = setting(
        "step",
        "Schedule of the learning rate over the rounds: decay by local.lr_decay, or a cosine that reaches 0 after "
        "federation.rounds.",
        "step, cosine, or your own",
    )
    warm_up: int = setting(
        0,
        "Rounds in which the learning rate rises to its full value in equal steps. In round r of W it is the share "
        "r / (W + 1) of its full value.",
        ge=0,
        le=MAX_COUNT,
    )
    optimiser: Literal["sgd", "adam", "adamw"] = setting(
        "sgd",
        "Optimiser of a client's model. Adam and AdamW start each call with empty moments (decay 0.9 and 0.999).",
    )
    momentum: float = setting(0.9, "Momentum of SGD. It starts at 0 in each local training.", ge=0, lt=1)
    weight_decay: float = setting(
        0.0, "Weight decay; with AdamW it is decoupled from the gradient.", ge=0, le=MAX_COUNT
    )
    stacked: Literal["auto", "off"] = setting(
        "off",
        "Training of small clients as one network, up to four times as fast on a CPU with AVX-512. auto: clients of at "
        "most 128 samples train in stacks if method, model, batch and processor allow it; the last bits change. off: "
        "every client trains alone.",
    )
    unlabelled: Literal["ignored", "absent"] = setting(
        "ignored",
        "Treatment of pixels without a label. ignored: they have no loss. absent: they belong to one of the classes "
        "that the batch's labels do not show (BackCE of FedSeg).",
    )
    precision: Literal["float32", "tf32", "bfloat16"] = setting(
        "float32",
        "Precision of local training and of features. tf32 rounds factors to 10 bits on a GPU; on a CPU it is "
        "float32. bfloat16 (autocast) is about twice as fast where the hardware has it.",
    )

    @field_validator("epochs")
    @classmethod
    def _whole(cls, value: float) -> float:
        """Convert a float with a whole number of epochs to an integer, so that 2.0 and 2 give the same run."""
        return int(value) if value == int(value) else value

    def step_count(self, samples: int, epochs: float | None = None, batch: int | None = None) -> int:
        """Return the number of SGD steps for this many samples. A last batch of one sample is dropped.

        Args:
            samples: Number of samples of the client.
            epochs: Number of passes; by default from local.steps and local.epochs.
            batch: Batch size; by default local.batch.

        Raises:
            ValueError: The batch size is below 2.
        """
        size = self.batch if batch is None else batch
        if size < 2:
            raise ValueError(f"batch: batches of {size} sample are dropped, so there are no steps. Give at least 2.")
        steps_per_epoch = samples // size + (samples % size > 1)
        if not steps_per_epoch:
            return 0
        if epochs is None and self.steps is not None:
            return self.steps
        passes = self.epochs if epochs is None else epochs
        return passes * steps_per_epoch if isinstance(passes, int) else max(1, int(passes * steps_per_epoch + 0.5))


class ResourcesConfig(Section):
    """Settings of devices, and of the number and size of client actors.

    Results depend only on the kind of device. On a GPU without `deterministic`, their last bits also depend on the
    order in which threads end.
    """

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "Device of the computation. auto uses the available GPUs, on Ray the leased ones. cuda rejects any other "
        "device. A resumed or branched run changes the kind of device only if this is set.",
    )
    deterministic: bool = setting(
        False,
        "Produce the same bits every time on a GPU, with deterministic kernels only. They are slower and need more "
        "memory; operations without one are rejected. A CPU always produces the same bits.",
    )
    graphs: Literal["auto", "off"] = setting(
        "auto",
        "Replay training steps as CUDA graphs, with one launch each. auto does so for methods that declare their steps "
        "recordable. Results do not change.",
    )
    actors: int | Literal["auto"] = setting(
        "auto", "Number of client actors; auto fills the cluster.", "a whole number >= 1 or auto"
    )
    clients_per_actor: int | Literal["auto"] = setting(
        "auto", "Number of clients that an actor holds, if resources.actors is auto.", "a whole number >= 1 or auto"
    )
    gpus_per_client: float | Literal["auto"] = setting(
        "auto",
        "Share of a GPU that one client actor takes. 0 uses no GPU, not even for the server.",
        "a number >= 0 or auto",
    )
    cpus_per_client: float = setting(
        1.0, "CPUs, and therefore threads, that one client actor takes.", gt=0, le=MAX_THREADS
    )

    @field_validator("actors", "clients_per_actor")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= MAX_COUNT:
            raise _out_of_range(value < 1)
        return value

    @property
    def gpu_share(self) -> float | Literal["auto"]:
        """The share of a GPU that one client actor takes; 0 keeps clients and server off the GPUs."""
        return 0.0 if self.device == "cpu" else self.gpus_per_client

    @field_validator("gpus_per_client")
    @classmethod
    def _not_negative(cls, value: float | str, info: ValidationInfo) -> float | str:
        if isinstance(value, float) and not 0 <= value <= MAX_COUNT:
            raise _out_of_range(value < 0)
        if value == 0 and info.data.get("device") == "cuda":
            raise PydanticCustomError("conflict", "excludes every GPU, but resources.device=cuda asks for one")
        return value


def _out_of_range(small: bool) -> PydanticCustomError:
    """Return the error for a number out of range, in fields that also accept a word."""
    kind = "greater_than_equal" if small else "less_than_equal"
    return PydanticCustomError(kind, "is too small" if small else "is too large")


class EvaluationConfig(Section):
    """Settings of evaluations on the balanced test set. Models are always evaluated after the last round."""

    every: int = setting(1, "Rounds between two evaluations of the global model.", ge=1, le=MAX_COUNT)
    personal: int = setting(
        0,
        "Rounds between two evaluations of every client's own model, for personalised methods. 0 evaluates them "
        "only at the end.",
        ge=0,
        le=MAX_COUNT,
    )
    fresh: bool = setting(
        False,
        "After the last step, also evaluate clients' own models after every client has trained once more from the last "
        "global model. The measures are matched@fresh, .... The training is undone.",
    )
    batch: int = setting(500, "Images per batch of an evaluation.", ge=1, le=MAX_COUNT)


class OutputConfig(Section):
    """Settings of a run's checkpoints."""

    checkpoint_every: int = setting(1, "Rounds between two checkpoints.", ge=1, le=MAX_COUNT)
    keep: int = setting(
        2, "Number of checkpoints to keep. If the last is damaged, raylt uses the one before it.", ge=2, le=MAX_COUNT
    )


def _encoder_normalises(tree: Mapping[str, Any]) -> bool:
    """Return whether the encoder normalises images itself, which turns `data.normalise` off by default."""
    return tree.get("input") is not None or str(tree.get("model")).startswith("clip:")


class Config(Section):
    """The complete configuration of a run. Only the method has no default."""

    def _repr_html_(self) -> str:
        """Return an HTML table of the settings that differ from their defaults."""
        rows = [(f"method.{name}" if name != "name" else "method", str(value)) for name, value in self.method.items()]
        for key, field in settings():
            section, _, name = key.rpartition(".")
            value = getattr(getattr(self, section) if section else self, name)
            if key != "method" and (field.is_required() or value != field.default):
                rows.append((key, str(value)))
        return html_table(("setting", "value"), rows, notes=["All other settings have their defaults."])

    seed: int = setting(0, "Seed of initial weights, sampling, batches and augmentation.", ge=0, le=LAST_SEED)
    data: DataConfig = DataConfig()
    model: str = setting(
        "small",
        "Network. lraspp returns label maps, the others classes.",
        "resnet8, resnet8_proj, resnet18, resnet32, resnet34, resnet50, resnet50_proj, cnn, cnn_proj, "
        "small, lraspp, torchvision:NAME, timm:NAME, clip:MODEL/TAG, or your own",
    )
    weights: str | None = setting(
        None,
        "Pre-trained weights of the encoder of lraspp, torchvision:NAME or timm:NAME. imagenet fetches the library's "
        "weights (for lraspp, of mobilenet_v3_small). A path names a state dict that exists on every node. The "
        "classifier starts from random weights; with null, so does the encoder.",
    )
    input: int | None = setting(
        None,
        "Side in pixels to which a pretrained encoder of torchvision: or timm: resizes images. It also normalises them "
        "as in its training, in place of data.normalise. Null leaves images unchanged.",
        ge=8,
        le=8192,
    )
    classifier: Literal["random", "text", "text_cosine"] = setting(
        "random",
        "Initial classifier: random weights, or the class names encoded by the text tower of model=clip:NAME. "
        "text is a linear layer; text_cosine has cosines times a learned scale as logits. With both, every summary has "
        "the accuracy before training (zero-shot).",
    )
    trainable: str = setting(
        "all",
        "Part of the model that is trained, and therefore sent. classifier: only the classifier. The others add to it: "
        "norm the normalisation layers, last:N the last N blocks of the encoder. lora:R adds two matrices of rank R "
        "to the weights of linear layers, attention and 1x1 convolutions.",
        "all, classifier, norm, last:N, lora:R",
    )
    method: dict[str, Any] = setting(
        ...,
        "Name of the method, as in method=sfd. Set its fields as method.FIELD; raylt methods lists them.",
        "the name of a method, as in method.name=sfd, or a mapping with its name and fields",
    )
    augment: str = setting(
        "none",
        "Augmentation of training images. Crops, scales and flips also change label maps. The others are "
        "torchvision's. Join several with +, as in crop_flip+color_jitter.",
        "none, crop_flip, resized_crop_flip, scale_crop_flip, color_jitter, rand_augment, "
        "trivial_augment, auto_augment, or your own",
    )
    views: int = setting(
        4,
        "With trainable=classifier, number of augmented views of each training image that are encoded once; a batch "
        "uses one of them at random. Values other than the default need augment.",
        ge=1,
        le=1000,
    )
    federation: FederationConfig = FederationConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    local: LocalConfig = LocalConfig()
    resources: ResourcesConfig = ResourcesConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="before")
    @classmethod
    def _normalised_by_the_encoder(cls, tree: Any) -> Any:
        """Turn off raylt's normalisation if the encoder normalises images, unless the user has set it."""
        data = tree.get("data", {}) if isinstance(tree, dict) else None
        if not isinstance(data, dict) or "normalise" in data or not _encoder_normalises(tree):
            return tree
        return tree | {"data": data | {"normalise": False}}

    def to_tree(self, mode: Literal["json", "python"] = "json") -> dict[str, Any]:
        """Return the settings as a tree that can be changed and checked again.

        `data.normalise` is left out where its value is the one that follows from the model and the input, which may be
        changed. A value that the user has set and that equals it is left out, too.

        Args:
            mode: "json" for values of JSON, "python" for values as they are.
        """
        tree = self.model_dump(mode=mode)
        if tree["data"]["normalise"] is not _encoder_normalises(tree):
            del tree["data"]["normalise"]
        return tree

    @field_validator("trainable")
    @classmethod
    def _trainable(cls, value: str) -> str:
        if not re.fullmatch(r"all|classifier|norm|(last|lora):[1-9][0-9]{0,3}", value):
            raise ValueError("must be all, classifier, norm, last:N or lora:R, with numbers from 1 to 9999")
        return value

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise PydanticCustomError("no_name", "does not name a method")
        return value


def settings() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting with its dotted key, in the order of this file."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field


def allowed(field: FieldInfo) -> str:
    """Return the values that a field accepts, as text: words, or a kind of number with its bounds.

    It omits the bounds in `UNSHOWN_BOUNDS`, which `UNLISTED` states for all settings.
    """
    if isinstance(field.json_schema_extra, dict) and "takes" in field.json_schema_extra:
        return str(field.json_schema_extra["takes"])
    bounds = " and ".join(
        f"{sign} {getattr(check, name):g}"
        for check in field.metadata
        for name, sign in SIGNS.items()
        if getattr(check, name, None) not in (None, *UNSHOWN_BOUNDS)
    )
    return " or ".join(dict.fromkeys(_kind(branch, bounds) for branch in branches(field.annotation)))


def branches(annotation: Any) -> tuple[Any, ...]:
    """Return the member types of a union; for any other type, a tuple of this type."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _kind(branch: Any, bounds: str) -> str:
    origin = typing.get_origin(branch) or branch
    if origin is Literal:
        return ", ".join(map(str, typing.get_args(branch)))
    if branch in (int, float):
        return f"{'a whole number' if branch is int else 'a number'} {bounds}".strip()
    if origin is tuple and all(item in (int, float) for item in typing.get_args(branch)):
        return "[" + ", ".join("number" for _ in typing.get_args(branch)) + "]"
    if origin in (list, tuple):
        return "a list"
    if isinstance(origin, type) and issubclass(origin, BaseModel | Mapping):
        return "a mapping"
    words = {bool: "true or false", str: "text", types.NoneType: "null"}
    return words.get(branch, "another value")
