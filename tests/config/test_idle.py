import pytest

import raylt
from raylt.config import Config
from raylt.config.idle import idle_settings
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
    ],
)
def test_settings_that_nothing_reads_are_named(parts, named):
    notices = idle_settings(Config.model_validate({"method": "fedavg"} | parts))
    assert [notice.partition(" = ")[0] for notice in notices] == named


def test_a_run_says_which_of_its_settings_has_no_effect(tmp_path):
    said = []

    class Listens(Callback):
        def on_message(self, text, minor=False):
            said.append(text)

    changes = {"data.partition": "iid", "data.alpha": 0.1, "federation.rounds": 1, "local.epochs": 1}
    raylt.run("fedavg", data="digits", fleet="local", out=tmp_path, callbacks=[Listens()], overrides=changes)
    assert "data.alpha = 0.1 has no effect, because data.partition = iid does not use it" in said
