"""Problems small enough to train on in a blink, with every kind of client that makes trouble, and models for them."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
from torch import nn

from raylt.data.cache import load
from raylt.data.maps import VOID, class_counts, class_views
from raylt.data.split import Split, hash_labels
from raylt.data.task import Shard, Task
from raylt.models.split import PixelModel

# of each client, samples per class: all classes; class 3 missing; class 1 only (and 9 = one batch of 8 and one sample
# over); one sample; none; all classes
COUNTS = np.array([[12, 6, 4, 2], [8, 3, 3, 0], [0, 9, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [6, 3, 2, 1]])


def make_task() -> Task:
    """C = 4, K = 6, 8x8x1: class c brightens quadrant c of a noisy image."""
    rng = np.random.default_rng(0)
    shards = tuple(_draw(rng, row) for row in COUNTS)
    ends = np.cumsum([len(shard) for shard in shards])
    rows = tuple(np.arange(end - len(shard), end) for end, shard in zip(ends, shards, strict=True))
    labels = np.concatenate([load(shard.y) for shard in shards])
    shards = tuple(replace(shard, ids=ids) for shard, ids in zip(shards, rows, strict=True))
    split = Split(rows, hash_labels(labels), "tiny", 1.0, "by_hand", 1.0, 0)
    test, auxiliary = (_draw(rng, np.full(4, n)) for n in (10, 5))
    return Task("tiny", ("a", "b", "c", "d"), (8, 8, 1), (0.5,), (0.25,), COUNTS, ("many", "medium", "medium", "few"),
                shards, test, split, auxiliary=auxiliary)


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
    maps = np.concatenate([load(shard.y) for shard in shards])
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


def _paint(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = rng.choice(3, (n, 2, 2), p=(0.5, 0.3, 0.2)).astype(np.uint8)
    maps = blocks.repeat(8, axis=1).repeat(8, axis=2)
    maps[:, 7:9] = VOID
    x = rng.integers(0, 60, (n, 16, 16, 3)) + 60 * maps[..., None].clip(0, 2)
    return x.astype(np.uint8), maps
