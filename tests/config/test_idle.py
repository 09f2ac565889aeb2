import json

import numpy as np
import pytest
from small_runs import make_tiny_run

import raylt
from raylt.config import Config, DataConfig
from raylt.config.idle import idle_data_settings, idle_settings
from raylt.data.splits.partitions import BUILT_IN, partition
from raylt.runs.callbacks.base import Callback


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({}, []),
        ({"data": {"partition": "iid", "alpha": 0.1}}, ["data.alpha"]),
        ({"data": {"partition": "dirichlet", "alpha": 0.1}}, []),
        ({"data": {"partition": "hsu", "min_size": 3, "per_client": 4}}, ["data.per_client"]),
        ({"data": {"partition": "own:file.py", "alpha": 0.1, "per_client": 4}}, []),
        ({"local": {"schedule": "own.py:mine", "lr_decay_every": 5}}, []),
        ({"data": {"imbalance": 1, "tail": "local"}}, ["data.tail"]),
        ({"data": {"imbalance": 2, "tail": "local"}}, []),
        ({"local": {"schedule": "cosine", "lr_decay": 0.5}}, ["local.lr_decay"]),
        ({"local": {"schedule": "cosine", "lr_decay_every": 5}}, ["local.lr_decay_every"]),
        ({"local": {"lr_decay_every": 5}}, ["local.lr_decay_every"]),
        ({"local": {"lr_decay": 0.5, "lr_decay_every": 5}}, []),
        ({"data": {"partition": "iid", "beta": 3, "erased": "unlabelled"}}, ["data.beta", "data.erased"]),
        ({"data": {"source": "shapes", "partition": "classes", "beta": 3, "erased": "unlabelled"}}, []),
        (
            {"data": {"channels": 3, "fit": "pad", "depth": 12, "bad": "skip"}},
            ["data.channels", "data.fit", "data.depth", "data.bad"],
        ),
        ({"data": {"source": "folder:x", "channels": 3, "fit": "pad", "depth": 12, "bad": "skip"}}, []),
        ({"data": {"source": "npz:x", "depth": 12, "fit": "pad"}}, ["data.fit"]),
        ({"data": {"source": "imagenet_lt", "depth": 12, "fit": "pad", "bad": "skip"}}, ["data.bad"]),
        (
            {"data": {"image_column": "a", "label_column": "b", "client_column": "c", "test_part": "d"}},
            ["data.image_column", "data.label_column", "data.client_column", "data.test_part"],
        ),
        ({"data": {"source": "hf:x", "image_column": "a", "client_column": "c", "test_part": "d"}}, []),
        ({"data": {"source": "own", "image_column": "a", "channels": 1, "depth": 9}}, []),
        ({"local": {"unlabelled": "absent"}}, ["local.unlabelled"]),
        ({"local": {"unlabelled": "absent"}, "data": {"source": "camvid"}}, []),
        ({"local": {"steps": 3, "epochs": 5}}, ["local.epochs"]),
        ({"local": {"steps": 3}}, []),
        ({"local": {"optimiser": "adamw", "momentum": 0.5}}, ["local.momentum"]),
        ({"federation": {"over_select": 0.5}}, ["federation.over_select"]),
        ({"federation": {"over_select": 0.5, "participation": 0.5}}, []),
        ({"data": {"download": True}}, ["data.download"]),
        ({"data": {"source": "cifar10", "download": True}}, []),
        ({"resources": {"actors": 2, "clients_per_actor": 3}}, ["resources.clients_per_actor"]),
        ({"resources": {"clients_per_actor": 3}}, []),
        ({"resources": {"device": "cpu", "gpus_per_client": 0.5}}, ["resources.gpus_per_client"]),
    ],
)
def test_settings_that_nothing_reads_are_named(parts, named):
    notices = idle_settings(Config.model_validate({"method": "fedavg"} | parts))
    assert [notice.partition(" = ")[0] for notice in notices] == named


@pytest.mark.parametrize("kind", sorted({*BUILT_IN} - {"imported"}))
@pytest.mark.parametrize(("name", "values"), [("alpha", (0.5, 5.0)), ("per_client", (2, 3)), ("beta", (1, 2))])
def test_a_setting_of_the_partition_is_named_if_another_value_gives_the_same_split(kind, name, values):
    rng = np.random.default_rng(0)
    labels = rng.random((400, 5)) < 0.4 if kind == "classes" else rng.integers(0, 5, 400)
    configs = [DataConfig(partition=kind, clients=10, **{name: value}) for value in values]
    first, second = (partition(labels, config, np.arange(400) % 10) for config in configs)
    notices = [notice for config in configs for notice in idle_data_settings(config)]
    assert any(notice.startswith(f"data.{name} = ") for notice in notices) == all(map(np.array_equal, first, second))


class Listens(Callback):
    """Keeps all messages."""

    def __init__(self):
        self.messages = []

    def on_message(self, text, minor=False):
        self.messages.append(text)


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("fedavg", {"evaluation.personal": 1}, ["evaluation.personal = 1"]),
        (
            "fedavg",
            {"evaluation.fresh": True, "evaluation.personal": 2},
            ["evaluation.personal = 2", "evaluation.fresh = true"],
        ),
        ("fedper", {"evaluation.fresh": True, "evaluation.personal": 1}, []),
        ("fedavg", {"federation.batchnorm": "local", "model": "small", "evaluation.personal": 1}, []),
    ],
)
def test_evaluations_of_clients_models_have_an_effect_only_if_clients_have_some(tmp_path, method, changes, expected):
    listens = Listens()
    make_tiny_run(
        tmp_path,
        method,
        "federation.rounds=1",
        *(f"{key}={json.dumps(value)}" for key, value in changes.items()),
        callbacks=[listens],
    )
    because = "has no effect, because clients of fedavg use the global model"
    assert [text for text in listens.messages if "evaluation." in text] == [
        f"{setting} {because}" for setting in expected
    ]


def test_a_run_says_which_of_its_settings_has_no_effect(tmp_path):
    listens = Listens()
    changes = {"data.partition": "iid", "data.alpha": 0.1, "federation.rounds": 1, "local.epochs": 1}
    raylt.run("fedavg", data="digits", fleet="local", out=tmp_path, callbacks=[listens], overrides=changes)
    assert "data.alpha = 0.1 has no effect, because data.partition = iid does not use it" in listens.messages


def test_fields_that_act_on_the_encoder_have_no_effect_if_it_is_frozen(tmp_path):
    listens = Listens()
    settings = ("federation.rounds=1", "method.weight=0.5")
    make_tiny_run(tmp_path, "rucr", "trainable=classifier", *settings, callbacks=[listens])
    because = "because trainable = classifier leaves nothing of the encoder to train"
    assert [text for text in listens.messages if "method." in text] == [f"method.weight = 0.5 has no effect, {because}"]
    listens = Listens()
    make_tiny_run(tmp_path, "rucr", *settings, name="whole", callbacks=[listens])
    assert not [text for text in listens.messages if "has no effect" in text]
