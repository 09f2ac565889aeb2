"""What most tests share: a task small enough to train on in a blink, with every kind of client that makes trouble."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raylt import tree
from raylt.config import Config
from raylt.core.checkpoint import hash_tensors
from raylt.core.client import Client
from raylt.core.evaluation import EvaluationSet
from raylt.core.experiment import Experiment
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.core.method import Method
from raylt.core.setup import Setup
from raylt.data.maps import VOID, class_counts, class_views
from raylt.data.samples import Samples
from raylt.data.task import Shard, Split, Task, hash_labels
from raylt.models.split import PixelModel, SplitModel
from raylt.registry import resolve
from raylt.tree import Tree

CPU = torch.device("cpu")
# of each client, samples per class: all classes; class 3 missing; class 1 only (and 9 = one batch of 8 and one sample
# over); one sample; none; all classes
COUNTS = np.array([[12, 6, 4, 2], [8, 3, 3, 0], [0, 9, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [6, 3, 2, 1]])


def make_task() -> Task:
    """C = 4, K = 6, 8x8x1: class c brightens quadrant c of a noisy image."""
    rng = np.random.default_rng(0)
    shards = tuple(_draw(rng, row) for row in COUNTS)
    ends = np.cumsum([len(shard) for shard in shards])
    rows = tuple(np.arange(end - len(shard), end) for end, shard in zip(ends, shards, strict=True))
    labels = np.concatenate([shard.y for shard in shards])
    shards = tuple(replace(shard, ids=ids) for shard, ids in zip(shards, rows, strict=True))
    split = Split(rows, hash_labels(labels), "tiny", 1.0, "by_hand", 1.0, 0)
    return Task("tiny", ("a", "b", "c", "d"), (8, 8, 1), (0.5,), (0.25,), COUNTS, ("many", "medium", "medium", "few"),
                shards, _draw(rng, np.full(4, 10)), split)


def _draw(rng: np.random.Generator, counts: np.ndarray) -> Shard:
    y = rng.permutation(np.repeat(np.arange(4), counts)).astype(np.int64)
    x = rng.integers(0, 160, (len(y), 8, 8, 1))
    for image, c in zip(x, y, strict=True):
        image[4 * (c // 2):, 4 * (c % 2):][:4, :4] += 90
    return Shard(x.astype(np.uint8), y)


# of each client, images; the last holds none. Client k keeps classes k and k + 1, the rest is background to it
SCENES = (5, 4, 3, 1, 0)


def make_scenes() -> Task:
    """C = 3 and background, K = 5, 16x16x3: blocks of classes with void between them in noisy images."""
    rng = np.random.default_rng(0)
    views = class_views(len(SCENES), 3, 2)
    shards = tuple(Shard(*_paint(rng, n), view) for n, view in zip(SCENES, views, strict=True))
    ends = np.cumsum(SCENES)
    rows = tuple(np.arange(end - n, end) for end, n in zip(ends, SCENES, strict=True))
    maps = np.concatenate([shard.y for shard in shards])
    split = Split(rows, hash_labels(maps), "scenes", 1.0, "classes", 1.0, 0, 2)
    counts = np.stack([class_counts(shard.labels(), 4) for shard in shards])
    return Task("scenes", ("a", "b", "c", "background"), (16, 16, 3), (0.5,) * 3, (0.25,) * 3, counts,
                ("many", "medium", "few", "-"), shards, Shard(*_paint(rng, 6)), split, kind="segmentation")


def pixels(classes: int, shape: tuple[int, int, int]) -> PixelModel:
    """What stands in for lraspp where its size would only cost time: two convolutions, d = 16."""
    encoder = nn.Sequential(OrderedDict(
        stage1=nn.Sequential(nn.Conv2d(shape[2], 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        stage2=nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())))
    return PixelModel(encoder, 16, classes)


def normed(classes: int, shape: tuple[int, int, int]) -> SplitModel:
    """The smallest classifier with running statistics, d = 8."""
    encoder = nn.Sequential(OrderedDict(
        stage1=nn.Sequential(nn.Conv2d(shape[2], 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten()))
    return SplitModel(encoder, 8, classes)


def _paint(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = rng.choice(3, (n, 2, 2), p=(0.5, 0.3, 0.2)).astype(np.uint8)
    maps = blocks.repeat(8, axis=1).repeat(8, axis=2)
    maps[:, 7:9] = VOID
    x = rng.integers(0, 60, (n, 16, 16, 3)) + 60 * maps[..., None].clip(0, 2)
    return x.astype(np.uint8), maps


def configure(**parts: Any) -> Config:
    """The tiny configuration with some parts replaced: `configure(seed=1, federation={"participation": 0.5})`."""
    federation = {"rounds": 2} | parts.pop("federation", {})
    local = {"batch": 8} | parts.pop("local", {})
    data = {"clients": 6} | parts.pop("data", {})
    method = parts.pop("method", {"name": "fedavg"})
    model = parts.pop("model", "small")
    return Config(model=model, method=method, data=data, federation=federation, local=local, **parts)


def make_setup(config: Config, method: Method | None = None) -> Setup:
    """What the configuration names, or another method in its place."""
    setup = resolve(config)
    return setup if method is None else replace(setup, method=method)


def open_client(task: Task, method: Method, id: int = 0, config: Config | None = None) -> Client:
    """A client without a host, in its first training."""
    setup, facts = make_setup(config or configure(), method), task.facts
    client = Client(id, Samples(task.shards[id], facts, CPU), EvaluationSet(task.test, facts, CPU),
                    setup.new_model(facts), setup.config, CPU, setup.augment)
    client.begin("train", 1)
    return client


def make_experiment(config: Config, task: Task, tmp_path: Path, method: Method | None = None,
                    fleet: type[LocalFleet] = LocalFleet, host: Callable[..., Any] = Host) -> Experiment:
    """An experiment in this process, on the CPU; `host` is called as `Host` is."""
    setup = make_setup(config, method)
    clients = fleet(config, task, host(setup, task.facts, task.test, CPU))
    return Experiment(setup, task, clients, CPU, tmp_path)


def fingerprint(parts: Tree) -> str:
    """Equal for two trees if and only if they have the same names and the same bits."""
    found = list(tree.leaves(parts))
    tensors = {path: leaf for path, leaf in found if isinstance(leaf, Tensor)}
    return hash_tensors(tensors) + repr(sorted((path, leaf) for path, leaf in found if path not in tensors))


def private_states(experiment: Experiment) -> dict[int, Tree]:
    """Of every client that was ever called, by id."""
    fleet = experiment.fleet
    return dict(fleet.private_states(sorted(fleet._private)))


class Recorder(Host):
    """A host that keeps what it was sent and what it replied."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.messages: list[Tree] = []
        self.replies: list[tuple[str, int, int, Tree]] = []      # function, round, client, tree

    def run(self, fn, message, round, id, shard, private):
        self.messages.append(message)
        reply, after = super().run(fn, message, round, id, shard, private)
        self.replies.append((fn.__name__, round, id, tree.snapshot(reply.tree)))
        return reply, after
