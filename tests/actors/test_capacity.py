"""Placement on clusters that are only described, not started."""

import json
import time
from pathlib import Path

import pytest
from refusals import refused

from actors.capacity import SERVER_GPUS, Need, Node, Placement, nodes_of, parse_nodes, plan, room
from raylt.cli import main as cli
from raylt.config import Config
from raylt.errors import ConfigError


def planned(nodes, clients, need=None, **resources):
    return plan(Config.model_validate({"method": "fedavg", "resources": resources}), clients, parse_nodes(nodes), need)


@pytest.mark.parametrize(
    ("nodes", "clients", "actors", "each"),
    [
        ("1x8gpu96cpu", 20, 20, 3),
        ("4x4gpu48cpu", 100, 100, 7),  # ceil(100 / 16)
        ("4x4gpu16cpu", 100, 64, 4),  # 16 CPUs on each node: 4 actors on each of its GPUs
        ("1x2gpu64cpu", 50, 50, 25),
        ("1x2cpu", 20, 2, 0),
        ("server:1x1gpu8cpu,client:2x4gpu48cpu", 20, 20, 3),
        ("1x64cpu,2x4gpu8cpu", 20, 16, 2),  # the plan ignores the CPUs of a node without GPUs
    ],
)
def test_actors_fit_on_their_nodes(nodes, clients, actors, each):
    got = planned(nodes, clients)
    assert got.placement.actors == actors
    assert room(got.placement, parse_nodes(nodes)) >= actors
    if each:
        assert each * got.placement.gpus + SERVER_GPUS <= 1 < (each + 1) * got.placement.gpus + SERVER_GPUS
    else:
        assert got.placement.gpus == got.server_gpus == 0


def test_labels_decide_where_clients_and_server_go():
    both = planned("server:1x8cpu,client:2x4cpu", 20)
    assert (dict(both.placement.labels), dict(both.server_labels)) == ({"role": "client"}, {"role": "server"})
    assert both.placement.actors == 8
    one = planned("server:1x8cpu,2x4cpu", 20)
    assert (dict(one.placement.labels), one.placement.actors) == ({"role": "!server"}, 8)
    only = planned("server:1x8cpu", 20)
    assert (dict(only.placement.labels), only.placement.actors) == ({}, 8)
    assert dict(planned("2x4cpu", 20).server_labels) == {}


def test_the_server_has_a_gpu_where_its_nodes_have_one():
    assert planned("server:1x8cpu,client:1x4gpu8cpu", 4).server_gpus == 0
    assert planned("server:1x1gpu8cpu,client:1x4gpu8cpu", 4).server_gpus == SERVER_GPUS
    assert planned("1x4gpu8cpu", 4, gpus_per_client=0).server_gpus == 0


def test_memory_bounds_the_actors():
    # 0.9 / 0.3 = 3 on a GPU, 0.9 * 100 / 10 = 9 in a node's memory
    assert planned("1x4gpu64cpu", 50, Need(gpu_memory=0.3)).placement.actors == 12
    node = Node(64, memory=100)
    assert plan(Config(method="fedavg"), 50, [node], Need(memory=10)).placement.actors == 9


def test_what_fits_nowhere_is_refused_before_anything_starts():
    with refused("cluster.too-small", ConfigError, slots=0) as caught:
        planned("4x4cpu", 4, cpus_per_client=8)  # 16 CPUs in all, 4 on each node
    text = "needs 8 CPUs, but the largest of all nodes has 4 CPUs and 0 GPUs. Lower resources.cpus_per_client."
    assert text in str(caught.value)
    with refused("cluster.too-small", ConfigError, slots=0) as caught:
        planned("1x1gpu32cpu,1x2gpu8cpu", 4, gpus_per_client=3)  # of the nodes, the one with more GPUs is closest
    assert "the largest of all nodes has 8 CPUs and 2 GPUs. " in str(caught.value)
    with refused("cluster.too-small", ConfigError, actors=5, slots=4) as caught:
        planned("server:1x8cpu,client:1x4cpu", 10, actors=5)
    assert "but the nodes labelled role=client have 4 CPUs and 0 GPUs, enough for 4. " in str(caught.value)


def test_room_counts_what_a_smaller_cluster_still_holds():
    placement = Placement(4, 1.0, 0.475, {"role": "client"})
    assert room(placement, parse_nodes("server:1x8gpu8cpu,client:1x1gpu4cpu")) == 2
    assert room(placement, parse_nodes("server:1x8gpu8cpu")) == 0


def test_a_plan_says_when_mps_pays():
    assert "MPS" in planned("1x1gpu8cpu", 2).reasons  # two actors on the GPU
    assert "MPS" not in planned("2x1gpu8cpu", 2).reasons  # one actor on each GPU
    assert "MPS" not in planned("1x8cpu", 2).reasons
    assert "MPS" not in planned("1x1gpu8cpu", 2, gpus_per_client=0).reasons


@pytest.mark.parametrize(("precision", "other"), [("float32", "tf32"), ("tf32", "float32"), ("bfloat16", "float32")])
def test_a_plan_with_gpus_says_what_the_precision_costs_as_it_was_measured(precision, other):
    findings = json.loads((Path(__file__).parents[2] / "benchmarks/results/gpu_h200.json").read_text())
    seconds = {
        (each["method"], each["precision"]): each["seconds"]
        for each in findings
        if each["part"] == "rounds" and each["graphs"] == "auto"
    }
    ratios = [seconds[method, precision] / seconds[method, other] for method in ("fedavg", "sfd")]
    low, high = sorted(max(ratio, 1 / ratio) for ratio in ratios)
    config = Config(method="fedavg", local={"precision": precision})
    on_gpus = plan(config, 2, parse_nodes("1x1gpu8cpu")).reasons["precision"]
    assert on_gpus.startswith(f"{precision}: ")
    assert f"{low:.1f} to {high:.1f} times" in on_gpus
    assert other in on_gpus
    assert "precision" not in plan(config, 2, parse_nodes("1x8cpu")).reasons


def test_nodes_are_read_off_what_ray_lists():
    listing = [
        {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0, "memory": 100.0}, "Labels": {"role": "client"}},
        {"Alive": False, "Resources": {}, "Labels": {}},
        {"Alive": True, "Resources": {"CPU": 2.0}},
    ]
    assert nodes_of(listing) == [Node(4, 1, 100, "client"), Node(2)]


@pytest.mark.parametrize(
    "text", ["4", "4x", "x4cpu", "0x4cpu", "worker:1x4cpu", "2x4gpu", "2x4cpu4gpu", "9" * 5000 + "x4cpu", "\u0663x4cpu"]
)
def test_nodes_that_cannot_be_read_are_refused(text):
    with refused("config.malformed", ConfigError, key="--nodes"):
        parse_nodes(text)


def test_a_thousand_million_nodes_are_planned_for_at_once():
    start = time.monotonic()
    got = planned("999999999x4cpu,999999999x8gpu8cpu", 100_000, gpus_per_client=0)
    assert got.reasons["nodes"] == "1999999998: 11999999988 CPUs and 7999999992 GPUs"
    assert got.placement.actors == 100_000
    assert planned("999999999x8gpu8cpu", 1000).placement == Placement(1000, 1.0, 0.95)
    assert room(Placement(4, 1.0, 0.5), parse_nodes("999999999x1gpu8cpu")) == 2 * 999999999
    assert time.monotonic() - start < 1


def test_plan_prints_and_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("started Ray"))
    monkeypatch.setattr(
        "sys.argv", ["raylt", "plan", "method=fedavg", "data.clients=20", "--nodes", "1x8gpu96cpu", "--format", "json"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    got = json.loads(capsys.readouterr().out)
    assert (ended.value.code, got["placement"]["actors"]) == (0, 20)
    assert set(got["reasons"]) == {
        "nodes",
        "client actors",
        "clients per actor",
        "each actor",
        "server",
        "MPS",
        "precision",
    }


def test_an_actor_that_fills_a_gpu_has_one_to_itself():
    assert planned("1x1gpu16cpu", 4, Need(0, 0.93)).placement.actors == 1
    assert planned("1x2gpu16cpu", 4, Need(0, 0.93)).placement.actors == 2
