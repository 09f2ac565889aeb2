"""A method on one kind of problem, with the small runs that the checks compare.

The problems are small enough to train on in a moment. Their clients include edge cases, such as a client with a single
sample or class.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raylt.config import Config
from raylt.contract.hosts import Recorder, noting
from raylt.contract.lies import Asked
from raylt.contract.trace import Trace, finish
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.method import Method
from raylt.core.setup import ModelFactory, Setup
from raylt.data.images.cache import load
from raylt.data.label_maps import VOID, class_counts, class_views
from raylt.data.sources.sources import ProblemKind
from raylt.data.splits.split import Split, hash_labels
from raylt.data.task import Shard, Task
from raylt.models import MODELS
from raylt.models.prompts import WORDS, Prompts
from raylt.models.split import PixelModel, SplitModel, linear

# Samples per class of each client. The clients have all classes; all but class 3; only class 1 (9 samples, which are a
# batch of 8 and one more); one sample; no samples; all classes.
COUNTS = np.array([[12, 6, 4, 2], [8, 3, 3, 0], [0, 9, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [6, 3, 2, 1]])


def make_task() -> Task:
    """Return a tiny classification task, C = 4, K = 6, 8x8x1: class c brightens quadrant c of a noisy image."""
    rng = np.random.default_rng(0)
    shards = tuple(_draw(rng, row) for row in COUNTS)
    ends = np.cumsum([len(shard) for shard in shards])
    rows = tuple(np.arange(end - len(shard), end) for end, shard in zip(ends, shards, strict=True))
    labels = np.concatenate([load(shard.y) for shard in shards])
    shards = tuple(replace(shard, ids=ids) for shard, ids in zip(shards, rows, strict=True))
    split = Split(rows, hash_labels(labels), "tiny", 1.0, "by_hand", 1.0, 0)
    test, auxiliary = (_draw(rng, np.full(4, n)) for n in (10, 5))
    return Task(
        "tiny",
        ("a", "b", "c", "d"),
        (8, 8, 1),
        (0.5,),
        (0.25,),
        COUNTS,
        ("many", "medium", "medium", "few"),
        shards,
        test,
        split,
        auxiliary=auxiliary,
    )


def _draw(rng: np.random.Generator, counts: np.ndarray) -> Shard:
    y = rng.permutation(np.repeat(np.arange(4), counts)).astype(np.int64)
    x = rng.integers(0, 160, (len(y), 8, 8, 1))
    for image, c in zip(x, y, strict=True):
        image[4 * (c // 2) :, 4 * (c % 2) :][:4, :4] += 90
    return Shard(x.astype(np.uint8), y)


# Images per client. Client k labels classes k and k + 1; all other classes are background for it.
SCENES = (5, 4, 3, 1, 0)


def make_scenes() -> Task:
    """Return a tiny segmentation task, C = 3 and background, K = 5, 16x16x3: blocks with some unlabelled pixels."""
    rng = np.random.default_rng(0)
    views = class_views(len(SCENES), 3, 2)
    shards = tuple(Shard(*_paint(rng, n), view=view) for n, view in zip(SCENES, views, strict=True))
    ends = np.cumsum(SCENES)
    rows = tuple(np.arange(end - n, end) for end, n in zip(ends, SCENES, strict=True))
    maps = np.concatenate([load(shard.y) for shard in shards])
    split = Split(rows, hash_labels(maps), "scenes", 1.0, "classes", 1.0, 0, 2)
    counts = np.stack([class_counts(shard.labels(), 4) for shard in shards])
    return Task(
        "scenes",
        ("a", "b", "c", "background"),
        (16, 16, 3),
        (0.5,) * 3,
        (0.25,) * 3,
        counts,
        ("many", "medium", "few", "-"),
        shards,
        Shard(*_paint(rng, 6)),
        split,
        kind="segmentation",
    )


def pixels(classes: int, shape: tuple[int, int, int]) -> PixelModel:
    """Return a small segmentation model in place of lraspp: two convolutions, d = 16.

    Args:
        classes: Number of classes, C.
        shape: Height, width and channels of an image.
    """
    encoder = nn.Sequential(
        OrderedDict(
            stage1=nn.Sequential(nn.Conv2d(shape[2], 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            stage2=nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        )
    )
    return PixelModel(encoder, 16, classes)


def _paint(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = rng.choice(3, (n, 2, 2), p=(0.5, 0.3, 0.2)).astype(np.uint8)
    maps = blocks.repeat(8, axis=1).repeat(8, axis=2)
    maps[:, 7:9] = VOID
    x = rng.integers(0, 60, (n, 16, 16, 3)) + 60 * maps[..., None].clip(0, 2)
    return x.astype(np.uint8), maps


class TinyPrompts(Prompts):
    """A text tower of two random matrices, applied to the mean of the context vectors.

    Args:
        dim: Width of a feature, d.
        class_names: Names of the C classes.
        context: Number of context vectors; this tower accepts any number.
    """

    def __init__(self, dim: int, class_names: Sequence[str], context: int):
        generator = torch.Generator().manual_seed(0)
        names, words, projection = (
            torch.randn(n, WIDTH, generator=generator) for n in (len(class_names), len(WORDS.split()), dim)
        )
        super().__init__(linear(projection, None), words)
        self.names = nn.Buffer(names)

    def forward(self, context: Tensor) -> Tensor:
        return F.normalize(self.body(torch.tanh(10 * context.mean(-2) + self.names)), dim=1)


@dataclass(frozen=True)
class WithPrompts:
    """A model factory whose models have a text tower.

    Attributes:
        factory: Factory of models without a text tower.
    """

    factory: ModelFactory

    def __call__(self, classes: int, shape: tuple[int, int, int]) -> SplitModel:
        model = self.factory(classes, shape)
        model.prompts = partial(TinyPrompts, model.dim)
        return model


def fitting(factory: ModelFactory, method: Method) -> ModelFactory:
    """Return a factory whose models also have the text tower, if the method learns prompts."""
    return WithPrompts(factory) if method.learns_prompts else factory


def learning_part(method: Method, trainable: str = "all") -> str:
    """Return the part of the model that is trained: `trainable`, or the only part that the method supports."""
    return "classifier" if method.learns_prompts else trainable


WIDTH = 512  # Width of a token's vector, as in CLIP's ViT-B-32.
CPU = torch.device("cpu")
FACTORIES: dict[ProblemKind, ModelFactory] = {"classification": MODELS["small"], "segmentation": pixels}
# Participation of ceil(0.3 * 6) = 2 clients in each of 2 rounds: at least one of 5 clients with samples never trains.
SOME = 0.3


@dataclass
class Case:
    """A method and its runs of two rounds on a small test problem, in which some clients have few or no samples.

    Attributes:
        method: The method, with the fields with which it is checked.
        kind: The kind of problem.
        folder: Folder for checkpoints.
        trainable: The part of the model that is trained, as in a configuration.
        raised: Exceptions that client functions raised in the user's own code; the fleet keeps only one line of each.
        fields: The fields of the method before all runs.
    """

    method: Method
    kind: ProblemKind
    folder: Path
    trainable: str = "all"
    raised: list[Exception] = field(default_factory=list)
    fields: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.fields = self.method.model_dump()

    def __str__(self) -> str:
        return f"{self.method.name} on {self.kind}"

    @cached_property
    def task(self) -> Task:
        return make_task() if self.kind == "classification" else make_scenes()

    def config(self, participation: float = 1.0, **parts: Any) -> Config:
        """Return the configuration of the case.

        Args:
            participation: Share of the clients that take part in a round.
            parts: Sections and settings that replace the defaults of the case.
        """
        federation = {"rounds": 2, "participation": participation} | parts.pop("federation", {})
        tree = {
            "method": {"name": self.method.name, **self.method.model_dump()},
            "model": "small",
            "trainable": learning_part(self.method, self.trainable),
            "data": {"clients": 6},
            "federation": federation,
            "local": {"batch": 8},
        } | parts
        return Config.model_validate(tree)

    def setup(self, config: Config, method: Method | None = None) -> Setup:
        method = method or self.method
        return Setup(config, method, fitting(FACTORIES[self.kind], method), None)

    def experiment(
        self,
        config: Config,
        *,
        method: Method | None = None,
        fleet: type[LocalFleet] = LocalFleet,
        host: Callable[..., Any] = ClientHost,
        task: Task | None = None,
    ) -> Experiment:
        """Return a new experiment in this process, by default on the task of the case.

        Args:
            config: Configuration of the experiment.
            method: The method; by default the one of the case.
            fleet: Class of the fleet.
            host: Called to create the host of the clients.
            task: The task; by default that of the case.
        """
        setup = self.setup(config, method)
        task = task or self.task
        client_host = host(setup, task.spec, task.test, CPU)
        client_host.run = noting(client_host.run, self.raised)
        clients = fleet(config, task, client_host)
        return Experiment(setup, task, clients, CPU, self.folder)

    def run(self, config: Config | None = None, **how: Any) -> Trace:
        """Run an experiment to its end. The arguments `how` are passed to `experiment`."""
        return finish(self.experiment(config or self.config(), **how))

    @cached_property
    def straight(self) -> Trace:
        """Return the reference run with all clients, without disturbances.

        Its host is a `Recorder` and its fleet an `Asked`, which record messages and replies.
        """
        return self.run(host=Recorder, fleet=Asked)

    @cached_property
    def partial(self) -> Trace:
        """Return the reference run with only some clients in each round, without disturbances."""
        return self.run(self.config(SOME), host=Recorder)

    def with_sample(self, sample: Callable[..., Any]) -> Method:
        """Return the method with its `sample` replaced. The replacement receives the original `sample` first."""
        kind = type(self.method)
        own = kind.sample
        other = type(
            kind.__name__, (kind,), {"sample": lambda *call: sample(own, *call), "__module__": kind.__module__}
        )
        other.__pydantic_parent_namespace__ = None  # otherwise this case would be sent with every call
        return other(**self.method.model_dump())
