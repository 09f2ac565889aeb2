"""A run is refused before it starts if its sums cannot fit into a reply."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refused
from tiny import configure, make_task

from raylt import tree
from raylt.core.fleet.upload_limit import check_class_uploads
from raylt.errors import ConfigError
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.creff.clip2fl import CLIP2FL
from raylt.methods.creff.method import CReFF
from raylt.methods.fedavg import FedAvg
from raylt.methods.mupfl.method import MuPFL
from raylt.methods.sfd.method import SFD
from raylt.models import build_model


def task_of(classes):
    return SimpleNamespace(client_counts=np.ones((2, classes), dtype=np.int64))


@pytest.mark.parametrize("method", [CCVR(), SFD()], ids=["ccvr", "sfd"])
def test_sums_of_many_classes_that_cannot_travel_are_refused_with_their_size(method):
    model = build_model("resnet18", 1000, (32, 32, 3))
    with refused("reply.too-large", ConfigError, classes=1000) as caught:
        method.prepare(task_of(1000), configure(), model)
    assert caught.value.details["size"] > 1000 * 8 * 512 * 513 // 2 > caught.value.details["room"]
    method.prepare(task_of(100), configure(), model)
    FedAvg().prepare(task_of(1000), configure(), model)


@pytest.mark.parametrize(
    "method", [CReFF(), CLIP2FL(kd=0, contrast=0), MuPFL(), MuPFL(acmu=False)], ids=lambda method: method.name
)
def test_gradients_of_many_classes_are_refused_with_the_model_that_travels_with_them(method):
    spec = replace(make_task().spec, shape=(32, 32, 3))
    model = method.build(spec, build_model("resnet18", 1000, (32, 32, 3)))
    with refused("reply.too-large", ConfigError, classes=1000) as caught:
        method.prepare(task_of(1000), configure(), model)
    models = 2 if method.name == "mupfl" and method.acmu else 1
    size = models * tree.nbytes(method.shared(model)) + 1000 * 1000 * 513 * 4
    assert caught.value.details["size"] == size > caught.value.details["room"]
    method.prepare(task_of(100), configure(), model)


def test_the_client_with_the_most_classes_decides():
    model, template = build_model("small", 10, (8, 8, 1)), CCVR.sums_like(10_000)
    counts = np.eye(2, dtype=np.int64)
    assert check_class_uploads(SimpleNamespace(client_counts=counts[:, :1]), model, CCVR.sums_like(100)) is None
    with refused("reply.too-large", ConfigError, classes=1):
        check_class_uploads(SimpleNamespace(client_counts=counts), model, template)
