import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import ray
from refusals import refused
from tiny import configure

from actors.capacity import SERVER_GPUS, Node, Placement, plan, room
from actors.cluster.session import Cluster, environment, session
from actors.launch import open_experiment
from raylt.config import Config
from raylt.errors import ConfigError
from raylt.registry import resolve


def placed(clients, cpus, gpus=0, participation=1.0, over_select=0.0, **resources):
    config = Config.model_validate(
        {
            "method": "fedavg",
            "resources": resources,
            "federation": {"participation": participation, "over_select": over_select},
        }
    )
    return plan(config, clients, [Node(cpus, gpus)]).placement


@pytest.mark.parametrize("clients", [10, 20])
def test_a_laptop_has_as_many_actors_as_cores(clients):
    assert placed(clients, cpus=2) == Placement(2, 1.0, 0.0)


def test_one_client_has_one_actor():
    assert placed(1, cpus=2) == Placement(1, 1.0, 0.0)
    assert placed(1, cpus=64, gpus=8) == Placement(1, 1.0, 0.95)


def test_every_client_has_its_actor_where_there_are_slots_even_when_few_are_asked():
    assert placed(20, cpus=32, participation=0.1).actors == 20


def test_with_fewer_slots_than_clients_there_are_as_many_actors_as_can_be_at_work():
    # ceil(0.2 * 20) = 4 clients compute at once; with 1.5 times as many asked, ceil(0.2 * 1.5 * 20) = 6
    assert placed(20, cpus=8, participation=0.2).actors == 4
    assert placed(20, cpus=8, participation=0.2, over_select=0.5).actors == 6
    assert placed(20, cpus=8, over_select=0.5).actors == 8


def test_reasons_of_a_plan_do_not_contradict_each_other():
    config = configure(data={"clients": 20}, federation={"participation": 0.3})
    few, enough = (plan(config, 20, [Node(cpus, 0.0)]).reasons for cpus in (2.0, 8.0))
    assert few["client actors"].startswith(
        "2 on all nodes; a round asks 6 of 20 clients, and 2 work at the same time; 2 slots, limited by CPUs"
    )
    assert "a round asks 6 of 20 clients; 8 slots" in enough["client actors"]
    assert few["each actor"] == "1 CPU and 0 GPUs"


@pytest.mark.parametrize(
    ("clients", "cpus", "gpus", "actors", "each"),
    [
        (20, 96, 8, 20, 3),  # ceil(20 / 8) actors on a GPU
        (100, 192, 16, 100, 7),  # 4 machines with 4 GPUs each
        (50, 64, 2, 50, 25),
        (50, 8, 2, 8, 4),
        (4, 64, 8, 4, 1),
    ],
)
def test_gpus_are_shared_by_the_actors_and_the_server(clients, cpus, gpus, actors, each):
    got = placed(clients, cpus, gpus)
    assert got.actors == actors
    assert each * got.gpus + SERVER_GPUS <= 1 < (each + 1) * got.gpus + SERVER_GPUS


@pytest.mark.parametrize(("share", "slots"), [(1, 8), (0.5, 16), (0.25, 32), (0.3, 24), (2, 3)])
def test_a_given_share_of_a_gpu_leaves_room_for_the_server(share, slots):
    got = placed(40, cpus=96, gpus=8, gpus_per_client=share)
    assert got.actors == slots
    each = 1 // got.gpus
    assert each * got.gpus + SERVER_GPUS <= 1 if share <= 1 else slots * got.gpus + SERVER_GPUS <= 8
    assert got.gpus > 1 / (each + 1)  # a GPU holds no more actors than planned


def test_room_is_counted_by_whole_gpus_and_up_to_rounding():
    assert room(Placement(4, 1.0, 0.4), [Node(8, 2)]) == 4  # two on each GPU, since none spans two
    assert room(Placement(4, 1.0, 2.0), [Node(8, 3, count=2)]) == 2
    assert room(Placement(4, 0.07, 0.0), [Node(7)]) == 100


def test_a_plan_says_what_limits_the_actors_and_how_many_clients_each_has():
    def reasons_of(node, **resources):
        return plan(configure(resources=resources), 5, [node]).reasons

    reasons = reasons_of(Node(8, 1), gpus_per_client=0.5)
    assert reasons["client actors"].endswith("2 slots, limited by GPUs")
    assert reasons["clients per actor"].startswith("3; ")
    assert reasons_of(Node(8), cpus_per_client=4)["client actors"].endswith("2 slots, limited by CPUs")


def test_no_gpu_can_be_asked_for():
    assert placed(4, cpus=8, gpus=2, gpus_per_client=0) == Placement(4, 1.0, 0.0)


def test_clients_per_actor_decides_the_actors():
    assert placed(20, cpus=8, clients_per_actor=5).actors == 4
    assert placed(3, cpus=8, clients_per_actor=5).actors == 1
    assert placed(20, cpus=8, clients_per_actor=5, actors=2).actors == 2


def test_more_actors_than_clients_are_as_many_as_clients():
    assert placed(3, cpus=8, actors=8).actors == 3


@pytest.mark.parametrize(
    ("have", "resources", "details", "remedy"),
    [
        ((2, 0), {"actors": 9}, {"actors": 9, "slots": 2}, "Set resources.actors=2"),
        ((2, 0), {"clients_per_actor": 5}, {"actors": 4, "slots": 2}, "Set resources.clients_per_actor=10"),
        ((3, 0), {"clients_per_actor": 5}, {"actors": 4, "slots": 3}, "Set resources.clients_per_actor=7"),
        ((2, 0), {"cpus_per_client": 4}, {"slots": 0}, "Lower resources.cpus_per_client"),
        ((8, 0), {"gpus_per_client": 0.5}, {"slots": 0}, "resources.gpus_per_client"),
        ((8, 1), {"gpus_per_client": 2}, {"slots": 0}, "and 2 GPUs and the server 0.05 GPUs, but"),
        ((8, 1), {"gpus_per_client": 2}, {"slots": 0}, "the largest of all nodes has 8 CPUs and 1 GPU. Lower"),
        ((64, 2), {"gpus_per_client": 0.25, "actors": 9}, {"actors": 9, "slots": 8}, "Set resources.actors=8"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_a_remedy(have, resources, details, remedy):
    with refused("cluster.too-small", ConfigError, **details) as caught:
        placed(20, *have, **resources)
    assert remedy in str(caught.value)


def test_a_share_above_one_gpu_must_be_whole():
    with refused("config.out-of-range", ConfigError, key="resources.gpus_per_client", value=1.5):
        placed(20, 64, 8, gpus_per_client=1.5)


def test_settings_that_do_not_fit_are_refused_before_anything_starts(monkeypatch, tiny_task, tmp_path):
    left = []

    @contextmanager
    def joined(address):
        try:
            yield Cluster("here", True, False)
        finally:
            left.append(address)

    monkeypatch.setattr("actors.launch.session", joined)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    config = Config.model_validate({"method": "fedavg", "resources": {"actors": 5}})
    experiment = open_experiment(resolve(config), tiny_task, tmp_path, None)
    with refused("cluster.too-small", actors=5, slots=2), experiment:
        pass
    assert left == [None]


def test_a_process_in_a_session_is_not_taken_elsewhere(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"))
    for address in ("10.0.0.2:6379", "local"):
        elsewhere = refused("cluster.already-joined", ConfigError, address=address, current="10.0.0.1:6379")
        with elsewhere, session(address):
            pass
    for address in (None, "auto", "10.0.0.1:6379"):
        with session(address) as cluster:
            assert str(cluster) == "the Ray session of this process, at 10.0.0.1:6379"


def test_what_a_cluster_needs_is_not_left_in_theenvironment(monkeypatch):
    monkeypatch.setenv("RAY_TEST_KEPT", "before")
    monkeypatch.delenv("RAY_TEST_NEW", raising=False)
    with environment({"RAY_TEST_KEPT": "within", "RAY_TEST_NEW": "within"}):
        assert os.environ["RAY_TEST_KEPT"] == os.environ["RAY_TEST_NEW"] == "within"
    assert os.environ["RAY_TEST_KEPT"] == "before"
    assert "RAY_TEST_NEW" not in os.environ
