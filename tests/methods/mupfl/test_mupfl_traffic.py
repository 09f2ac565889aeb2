import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from mupfl_runs import QUICK, open_client, run
from tiny import Recorder

from raylt import tree
from raylt.data.task import Shard
from raylt.methods.mupfl.method import MuPFL, end_fault


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"acmu": False, "pkcf": False},
        {"bavd": False, "pkcf": False},
        {"bavd": False, "acmu": False},
        {"pkcf": False},
        {"acmu": False},
        {"bavd": False},
        {"bavd_map": "hw"},
        {"bavd_map": "bchw"},
        {"bavd_psi": "equation"},
        {"bavd_reset": "never"},
        {"updates": "tuned", "next_init": "global"},
        {"bavd_layers": "all"},
        {"distance": "rows"},
        {"gradients": "global"},
        {"next_init": "own"},
        {"next_init": "cluster", "judged": "post_local"},
        {"judged": "deploy"},
        {"next_init": "global", "judged": "deploy"},
        {"tau": 0},
    ],
    ids=str,
)
def test_variants_run_and_send_what_they_should(tiny_task, tmp_path, fields):
    experiment, reports = run(tiny_task, tmp_path, MuPFL(**QUICK | fields))
    assert math.isfinite(reports[-1].figures["loss"])
    method, model, clients = experiment.method, experiment.server.model, len(experiment.fleet.ids)
    whole, classifier = tree.nbytes(model.entries()), tree.nbytes(model.entries("classifier."))
    knowledge = 4 * 5 * 64 * 4 + 4  # h_glo, and a flag for each known class
    gradients = int((tiny_task.client_counts > 0).sum()) * 4 * (64 + 1) * 4
    start = {"nothing": 0, "model": whole, "classifier": classifier}[method.own_update_start]
    layers = {"hw": 4 * 4, "chw": 64 * 4 * 4, "bchw": 64 * 4 * 4}[method.bavd_map] if method.bavd else 0
    layers += 32 * 8 * 8 if method.bavd_layers == "all" else 0
    up = clients * (whole + 8 + method.acmu * (start + 4 * layers)) + method.pkcf * gradients
    for report in reports:
        assert report.traffic["train"] == {
            "down": clients * (whole + method.pkcf * knowledge),
            "up": up,
            "replies": clients,
        }
        assert report.traffic.keys() - {"join"} == ({"train", "keep"} if method.acmu else {"train"})
        if "keep" in report.traffic:
            assert report.traffic["keep"] == {"down": clients * whole, "up": 0, "replies": clients}


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"acmu": False}, ("gradients",)),
        ({"bavd": False}, ("gradients", "update", "start")),
        ({"pkcf": False}, ("update", "start", "map")),
        ({"acmu": False, "pkcf": False}, ()),
    ],
    ids=str,
)
def test_server_sees_each_clients_parts_of_the_modules_that_are_on(fields, seen):
    assert MuPFL(**fields).sees_each == seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["update", "start"])
def test_what_no_model_can_be_is_not_believed_of_an_update_either(tiny_task, tmp_path, name):
    class Boosts(Recorder):
        def run(self, fn, message, round, id, shard, private):
            reply, after = super().run(fn, message, round, id, shard, private)
            if fn.__name__ == "train" and id == 0 and round == 2:
                reply.tree[name]["classifier.bias"] = reply.tree[name]["classifier.bias"] + 1e9
            return reply, after

    _, (first, second) = run(tiny_task, tmp_path, MuPFL(**QUICK), host=Boosts)
    assert first.rejected == {}
    assert list(second.rejected) == [0]
    assert f"{name}.classifier.bias" in second.rejected[0]


def test_update_that_makes_a_variance_negative_is_rejected(tiny_task, tmp_path):
    class Lowers(Recorder):
        def run(self, fn, message, round, id, shard, private):
            reply, after = super().run(fn, message, round, id, shard, private)
            if fn.__name__ == "train" and id == 0 and round == 2:
                for name, update in reply.tree["update"].items():
                    if name.endswith("running_var"):
                        update[0] = -2 * message["model"][name][0]
            return reply, after

    _, (first, second) = run(tiny_task, tmp_path, MuPFL(**QUICK), host=Lowers)
    assert (first.rejected, list(second.rejected)) == ({}, [0])
    assert "variance" in second.rejected[0]


def test_variance_is_that_of_the_clients_own_start_and_may_be_zero_up_to_rounding():
    own, update = torch.tensor([0.5, 1.0]), torch.tensor([-0.5 - 1e-7, 0.2])
    parts = {"start": {"running_var": own}, "update": {"running_var": update}}
    assert end_fault(8, parts, whole={"running_var": torch.zeros(2)}) is None
    parts["update"] = {"running_var": torch.tensor([-0.6, 0.2])}
    assert end_fault(8, parts, whole={"running_var": torch.ones(2)}) == "makes the variance running_var negative"
    parts = {"start": {}, "update": {"running_mean": torch.tensor([-9.0])}}
    assert end_fault(8, parts, whole={"running_mean": torch.ones(1)}) is None


def test_upload_in_the_papers_setting_is_that_of_section_3(tiny_task):
    # ResNet-8, C = 10, m = 100, d = 256: 10 * 257 * 4 bytes of gradient per class; 64 KiB of map; the classifier
    y = np.array([0, 0, 0, 1, 1], dtype=np.int64)
    x = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)
    task = replace(
        tiny_task,
        class_names=tuple("abcdefghij"),
        shape=(32, 32, 3),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        shards=(Shard(x, y),),
        client_counts=np.bincount(y, minlength=10)[None],
    )
    method = MuPFL()
    client = open_client(task, method=method, model="resnet8", local={"epochs": 1})
    model = method.shared(client.model)
    reply = method.train(
        client,
        {
            "model": tree.snapshot(model),
            "features": torch.zeros(10, 100, 256),
            "known": torch.zeros(10, dtype=torch.bool),
        },
    )
    classifier = (10 * 256 + 10) * 4
    assert tree.nbytes(reply.tree) == tree.nbytes(model) + 8 + 2 * classifier + classifier + 256 * 8 * 8 * 4
