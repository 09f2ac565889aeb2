"""A run is refused before it starts if its sums cannot fit into a reply."""

from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refused
from tiny import configure

from raylt.core.fleet.upload_limit import check_class_sums
from raylt.errors import ConfigError
from raylt.methods.classifiers.ccvr import CCVR
from raylt.methods.fedavg import FedAvg
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


def test_the_client_with_the_most_classes_decides():
    model, template = build_model("small", 10, (8, 8, 1)), CCVR.sums_like(10_000)
    counts = np.eye(2, dtype=np.int64)
    assert check_class_sums(SimpleNamespace(client_counts=counts[:, :1]), model, CCVR.sums_like(100)) is None
    with refused("reply.too-large", ConfigError, classes=1):
        check_class_sums(SimpleNamespace(client_counts=counts), model, template)
