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
