"""A user's own partitions and learning-rate schedules are registered, recorded, checked, and known in other
processes."""

import pickle
import subprocess
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from refusals import refused

import raylt
from raylt import registry
from raylt.config import DataConfig, LocalConfig, load
from raylt.core.training.schedules import scheduled_rate
from raylt.data.task import build_task
from raylt.errors import ConfigError, DataError
from raylt.own_code.shipment import ship
from raylt.registry import load_plugin, plugin_modules, resolve

PLUGIN = """
import numpy as np
import raylt

def halves(labels, clients, generator, config):
    rows = generator.permutation(len(labels))
    return [rows[: len(rows) // 2], *np.array_split(rows[len(rows) // 2 :], clients - 1)]

def triangle(local, round, rounds):
    return local.lr * (1 - (round - 1) / rounds)

raylt.register(halves, kind="partition")
raylt.register(triangle, kind="schedule")
"""
SETTINGS = ["method=fedavg", "model=small", "data.clients=3", "data.partition=halves", "local.schedule=triangle"]


@pytest.fixture
def own(tmp_path, no_guests):
    (tmp_path / "own.py").write_text(PLUGIN)
    return load_plugin(tmp_path / "own.py")


def test_a_run_uses_and_records_them(own, tmp_path):
    assert {(plugin.kind, plugin.name) for plugin in own} == {("partition", "halves"), ("schedule", "triangle")}
    config = load(None, [*SETTINGS, "federation.rounds=2"])
    run = raylt.run(config, out=tmp_path, name="own", fleet="local", quiet=True)
    sizes = [len(rows) for rows in run.split.clients]
    assert sizes[0] == sum(sizes) // 2
    assert run.split.partition == "halves"
    assert {(record["kind"], record["name"]) for record in run.origins} == {
        ("partition", "halves"),
        ("schedule", "triangle"),
    }
    other = load(None, [*SETTINGS[:-1], "federation.rounds=2"])
    constant = raylt.run(other, out=tmp_path, name="constant", fleet="local", quiet=True)
    assert constant.split.sha256 == run.split.sha256
    assert constant.summary["model_sha256"] != run.summary["model_sha256"]
    registry._plugins.pop(("schedule", "triangle"))
    with refused("plugin.missing", name="triangle"):
        _ = raylt.Run.open(run.folder).setup


def test_the_seed_decides_what_the_partition_draws(own):
    hashes = [build_task(DataConfig(partition="halves", clients=3, seed=seed)).split.sha256 for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.slow
def test_a_schedule_works_in_another_process(own, tmp_path):
    setup = resolve(load(None, [*SETTINGS, "federation.rounds=4"]))
    assert setup.schedule is not None
    shipped = ship((setup.schedule, setup.config.local), plugin_modules(), cloudpickle.dumps)
    code = "import pickle, sys; f, local = pickle.load(sys.stdin.buffer).open(); print(f(local, 3, 4))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=pickle.dumps(shipped), capture_output=True, cwd=tmp_path, check=True
    )
    assert float(done.stdout) == pytest.approx(0.05 * 0.5)
    assert scheduled_rate(setup.schedule, setup.config.local, 3, 4) == float(done.stdout)


@pytest.mark.parametrize(
    ("deal", "word"),
    [
        (lambda labels, clients, generator, config: [np.arange(3)], "1 clients"),
        (lambda labels, clients, generator, config: [np.arange(3), np.arange(2)], "twice"),
        (lambda labels, clients, generator, config: [np.arange(3), [-1]], "from -1"),
        (lambda labels, clients, generator, config: [np.arange(3), [len(labels)]], "from 0 to"),
    ],
)
def test_parts_that_are_none_are_refused(no_guests, deal, word):
    raylt.register(deal, "mine", kind="partition")
    with refused("data.malformed", DataError, key="data.partition", value="mine") as caught:
        build_task(DataConfig(partition="mine", clients=2))
    assert word in str(caught.value)


def fails(*_):
    raise KeyError("absent")


def takes_none():
    raise AssertionError


@pytest.mark.parametrize("function", [fails, takes_none])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("partition", "data.partition"),
        ("schedule", "local.schedule"),
        ("augmentation", "augment"),
        ("source", "data.source"),
        ("model", "model"),
    ],
)
def test_a_function_that_raises_is_refused_before_the_run(no_guests, tmp_path, kind, key, function):
    raylt.register(function, "own", kind=kind)
    with refused("plugin.failed", ConfigError, key=key, value="own") as caught:
        raylt.run("fedavg", overrides={key: "own"}, out=tmp_path, fleet="local")
    assert ("test_own_partition.py" in str(caught.value)) == (function is fails)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, None, "0.1", True, 1j, torch.tensor([0.1])])
def test_a_schedule_that_returns_no_rate_is_refused_before_the_run(no_guests, tmp_path, rate):
    raylt.register(lambda local, round, rounds: rate if round == 3 else 0.1, "own", kind="schedule")
    with refused("plugin.failed", ConfigError, key="local.schedule", value="own", round=3) as caught:
        raylt.run("fedavg", rounds=3, schedule="own", out=tmp_path, fleet="local")
    assert repr(rate) in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rate", [0, 0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)])
def test_a_rate_may_be_any_real_number(rate):
    scheduled = scheduled_rate(lambda local, round, rounds: rate, LocalConfig(), 1, 1)
    assert type(scheduled) is float
    assert scheduled == float(rate)


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        (lambda x, y, generator: (x[:1], y[:1]), "mine returned images [1, 8, 8, 1] for images [8, 8, 8, 1]"),
        (lambda x, y, generator: (x * float("nan"), y), "mine returned images with values from nan to nan"),
        (lambda x, y, generator: (x, y + 100), "labels outside of 0..9 were returned (100 to"),
    ],
)
def test_an_augmentation_that_returns_other_data_is_refused_before_the_run(no_guests, tmp_path, augment, words):
    raylt.register(augment, "mine", kind="augmentation")
    with refused("plugin.failed", ConfigError, key="augment") as caught:
        raylt.run("fedavg", augment="crop_flip+mine", out=tmp_path, fleet="local")
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "name"), [("partition", "iid"), ("schedule", "cosine")])
def test_names_of_raylt_are_taken(no_guests, kind, name):
    with refused("plugin.name-taken", name=name):
        raylt.register(lambda *arguments: None, name, kind=kind)


@pytest.mark.parametrize(("key", "value"), [("data.partition", "mine"), ("local.schedule", "mine")])
def test_names_that_no_client_has_are_refused(no_guests, key, value):
    with refused("config.unknown-name", key=key, value=value):
        resolve(load(None, ["method=fedavg", f"{key}={value}"]))


@pytest.mark.slow
def test_a_schedule_of_one_s_own_gives_the_same_bits_on_ray(own, tmp_path):
    config = load(None, [*SETTINGS, "federation.rounds=2", "local.epochs=1"])
    runs = [raylt.run(config, out=tmp_path, name=fleet, fleet=fleet, quiet=True) for fleet in ("local", "ray")]
    assert runs[0].summary["model_sha256"] == runs[1].summary["model_sha256"]
