"""Settings and data that exceed a limit are refused before the run in one error, with key and value."""

import numpy as np
import pytest
import torch
from refusals import refused
from tiny import configure, make_experiment

from raylt.config import load
from raylt.core.protection.protection import check_delta
from raylt.data.task import build_task
from raylt.errors import ConfigError, DataError
from raylt.methods.classifiers.fedncm import FedNCM
from raylt.ops.etf import simplex_etf


@pytest.mark.parametrize(("delta", "fits"), [(0.9, False), (1 / 60, False), (0.016, True)])
def test_delta_is_less_than_one_over_the_samples(delta, fits):
    config = configure(privacy={"epsilon": 1.0, "delta": delta})
    if fits:
        check_delta(config, [24, 36, 0])
        return
    with refused("config.out-of-range", ConfigError, key="privacy.delta", value=delta, count=60):
        check_delta(config, [24, 36, 0])


def test_delta_is_less_than_one_over_the_clients_where_it_hides_clients():
    config = configure(privacy={"update_epsilon": 1.0, "delta": 0.4})
    check_delta(config, [24, 36, 0])
    with refused("config.out-of-range", ConfigError, key="privacy.delta", count=3):
        check_delta(config, [24, 36, 1])
    # without noise nothing is private, so delta is not checked
    check_delta(configure(privacy={"delta": 0.9}), [24, 36])


def test_an_experiment_refuses_a_large_delta(tiny_task, tmp_path):
    with refused("config.out-of-range", ConfigError, key="privacy.delta"):
        make_experiment(configure(privacy={"epsilon": 1.0, "delta": 0.9}), tiny_task, tmp_path, FedNCM())


@pytest.mark.parametrize("threads", [1000, 100000])
def test_more_threads_than_a_process_can_have_are_refused(threads):
    with refused("config.out-of-range", ConfigError, key="resources.cpus_per_client"):
        load(None, ["method=fedavg", f"resources.cpus_per_client={threads}"])


def test_a_frame_needs_two_classes():
    with refused("data.too-few", ConfigError, key="method", value=1):
        simplex_etf(1, 8, torch.Generator())


def test_names_of_classes_have_a_length(tmp_path):
    y = np.arange(40) % 2
    x = np.zeros((40, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "long.npz", x_train=x, y_train=y, x_test=x, y_test=y, class_names=["a", "b" * 10_000])
    config = load(None, ["method=fedavg", f"data.source=npz:{tmp_path}/long.npz", "data.clients=2"])
    with refused("data.bad-name", DataError, key="data.source", value=10_000):
        build_task(config.data)
