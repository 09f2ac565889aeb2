"""A user's plugin outside the package: a method, a model, a source and an augmentation."""

from typing import ClassVar

import helper  # a file next to this one, which Ray's workers cannot import
import numpy as np
from torch import nn
from torch.nn import functional as F

import raylt


class Smoothed(raylt.Method):
    """FedAvg with label smoothing; each client counts its rounds."""

    name: ClassVar[str] = "smoothed"
    paper: ClassVar[str] = "for tests"

    smoothing: float = raylt.hp(0.1, helper.RANGE, "of labels")

    def objective(self, client, message):
        client.state["rounds"] = client.state.get("rounds", 0) + 1
        return lambda batch: F.cross_entropy(client.model(batch.x), batch.y, label_smoothing=self.smoothing)


def tinynet(classes, shape):
    height, width, channels = shape
    body = nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, helper.WIDTH), nn.ReLU())
    return raylt.SplitModel(body, helper.WIDTH, classes)


def stripes(config):
    """Return a source of two classes, in which the left or the right half is bright."""
    rng = np.random.default_rng(0)

    def draw(n):
        y = np.arange(n) % 2
        x = rng.integers(0, 100, (n, 8, 8, 1))
        x[y == 0, :, :4] += 100
        x[y == 1, :, 4:] += 100
        return x.astype(np.uint8), y.astype(np.int64)

    (x_train, y_train), (x_test, y_test) = draw(120), draw(40)
    return raylt.Source("stripes", x_train, y_train, x_test, y_test, ("left", "right"), (0.5,), (0.25,))


def dim(x, y, generator):
    return x // 2, y


raylt.register(tinynet, kind="model")
raylt.register(stripes, kind="source")
raylt.register(dim, kind="augmentation")
