import os
import signal
import statistics
import threading
import time
from pathlib import Path

import pytest
import ray
import torch
import trouble
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup
from refusals import refused
from started import wait_for
from tiny import make_setup
from trouble import IDS, Broken, Private, Unstackable, configure

from actors.client import label_of
from raylt import tree
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.core.experiment import Experiment
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.reductions import each, mean
from raylt.core.training.stacked_sgd import has_avx512
from raylt.errors import TooFewReplies
from raylt.methods.fedavg import FedAvg

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(600)
COUNTED = {"calls": each, "pid": each}  # the parts of a reply of `trouble.count`


def train(config, method, task, fleet, tmp_path):
    """Run two rounds; return a hash of the states of the server and all clients, and the reports."""
    setup = make_setup(config, method)
    fleet.config, fleet._setup = config, setup
    fleet._private.clear()
    experiment = Experiment(setup, task, fleet, CPU, tmp_path)
    reports = [experiment.step() for _ in range(2)]
    states = dict(fleet.private_states(sorted(fleet._private)))
    end = {"server": experiment.server.model.state_dict()} | {f"client-{id}": state for id, state in states.items()}
    return hash_tensors(dict(tree.leaves(end))), reports


# the first test, since fleets of the others keep their CPUs until the end of the file
@pytest.mark.slow
def test_all_actors_get_their_places_or_none_does(make_fleet, monkeypatch):
    free = 3  # of the session's four CPUs: enough for one of the two actors, not for both
    wait_for(lambda: ray.available_resources().get("CPU", 0.0) >= free)  # other files' actors may still be ending
    monkeypatch.setattr("actors.fleet.START_TIMEOUT_S", 3)
    given = []
    wait = PlacementGroup.wait

    def look_while_waiting(group, timeout_s):
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            given.append(ray.available_resources().get("CPU", 0.0))
            if wait(group, 0.2):
                return True
        return False

    monkeypatch.setattr(PlacementGroup, "wait", look_while_waiting)
    with refused("cluster.busy", actors=2):
        make_fleet(configure(), 2, cpus=float(free))
    # no actor held a CPU while the other waited; Ray lists no CPU only at the moment when it tries to place both
    assert statistics.median(given) >= free
    states = [group["state"] for group in placement_group_table().values()]
    assert "PENDING" not in states


@pytest.fixture
def undisturbed(make_experiment, tiny_task, tmp_path):
    def run(config, method):
        fleet = make_experiment(config, tiny_task, tmp_path, method).fleet
        return train(config, method, tiny_task, fleet, tmp_path)[0]

    return run


@pytest.fixture(scope="module")
def pool(make_fleet):
    """Return `pool(actors)`, which makes each fleet once for several tests."""
    fleets = {}

    def get(actors, **federation):
        if actors not in fleets:
            fleets[actors] = make_fleet(configure(), actors, Private())
        fleet = fleets[actors]
        fleet.config = configure(**federation)
        fleet._private.clear()
        fleet.begin(1)
        return fleet

    return get


@pytest.mark.parametrize(
    "actors", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow)]
)
def test_fleets_agree_bit_for_bit(pool, undisturbed, tiny_task, tmp_path, actors):
    config, method = configure(), Private()
    assert train(config, method, tiny_task, pool(actors), tmp_path)[0] == undisturbed(config, method)


@pytest.mark.slow
def test_fleets_agree_when_everything_travels_and_some_are_asked(make_fleet, undisturbed, tiny_task, tmp_path):
    config, method = configure(participation=0.5), FedAvg()
    fleet = make_fleet(config, 3, method)
    found, reports = train(config, method, tiny_task, fleet, tmp_path)
    fleet.close()
    assert found == undisturbed(config, method)
    assert [report.traffic["train"]["replies"] for report in reports] == [3, 3]


@pytest.mark.slow
@pytest.mark.skipif(not has_avx512(), reason="clients train alone on this processor")
def test_stacks_have_the_same_bits_whichever_clients_an_actor_puts_into_one(
    make_fleet, undisturbed, tiny_task, tmp_path
):
    config, method = stacked_config(), FedAvg()
    expected = undisturbed(config, method)
    assert expected != undisturbed(configure(), method)
    fleet = make_fleet(config, 2, method)
    assert fleet.describe()["stacked"] == "small clients"
    assert [slot.stacks for slot in fleet.slots] == [True, True]
    assert train(config, method, tiny_task, fleet, tmp_path)[0] == expected
    fleet.close()


@pytest.mark.slow
@pytest.mark.skipif(not has_avx512(), reason="clients train alone on this processor")
def test_a_run_notes_once_why_stacks_fail(make_fleet, tiny_task, tmp_path):
    fleet, notes = make_fleet(stacked_config(), 1, Unstackable()), []
    fleet.note = notes.append
    _, reports = train(stacked_config(), Unstackable(), tiny_task, fleet, tmp_path)
    fleet.close()
    assert [report.lost for report in reports] == [[], []]
    (note,) = notes
    assert note.startswith("train: a stack of clients failed, and each trains alone: ")


def stacked_config():
    config = configure()
    return config.model_copy(update={"local": config.local.model_copy(update={"stacked": "auto"})})


@pytest.mark.slow
def test_clients_that_die_are_asked_again_with_the_same_result(pool, undisturbed, tiny_task, tmp_path):
    config = configure()
    mortal = Private(victims=(0, 5), folder=str(tmp_path))
    found, reports = train(config, mortal, tiny_task, pool(2), tmp_path)
    assert found == undisturbed(config, Private())
    assert [(sorted(report.retried), report.lost) for report in reports] == [([0, 5], []), ([], [])]


@pytest.mark.slow
def test_an_actor_killed_from_outside_is_replaced(pool, tmp_path):
    fleet = pool(2)
    killer = threading.Thread(target=kill_when_written, args=(tmp_path / "1-0",))
    killer.start()
    replies = fleet.ask(trouble.stall, IDS, {"victims": [1], "seconds": 60.0, "folder": str(tmp_path)}, **COUNTED)
    killer.join()
    assert list(replies["calls"].values()) == [1] * 5
    assert (fleet.round_stats.retried, fleet.round_stats.lost) == ([1], [])


def kill_when_written(file: Path) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end and not (file.exists() and file.read_text()):
        time.sleep(0.02)
    os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_a_client_that_dies_too_often_is_lost_and_the_quorum_decides(pool, tmp_path):
    fleet = pool(2, retries=1, quorum=0.8)
    message = {"victims": [2], "times": 2, "folder": str(tmp_path)}
    assert list(fleet.ask(trouble.die, IDS, message, **COUNTED).weights) == [0, 1, 3, 5]
    assert (fleet.round_stats.retried, fleet.round_stats.lost) == ([2], [2])
    fleet.config = configure(retries=0, quorum=1.0)
    fleet.begin(2)
    with pytest.raises(TooFewReplies, match=r"client 2, round 2, die: its process died \(ActorDiedError\)") as caught:
        fleet.ask(trouble.die, IDS, message | {"times": 3}, **COUNTED)
    assert (caught.value.details["usable"], caught.value.details["asked"], caught.value.details["needed"]) == (4, 5, 5)


@pytest.mark.slow
def test_a_client_that_leaves_its_process_is_lost(pool):
    fleet = pool(2, retries=0)
    with pytest.raises(TooFewReplies, match=r"0 of 1 clients .* client 3, round 1, leave: its process died"):
        fleet.ask(trouble.leave, [3], {}, **COUNTED)
    assert list(fleet.ask(trouble.count, IDS, {}, **COUNTED).weights) == IDS


def test_what_a_client_raises_reaches_the_server_as_one_line(pool):
    fleet = pool(2, retries=1)
    failure = r"client 0, round 1, fail: ValueError: client 0 has bad luck \(trouble.py:\d+, in fail\)\.$"
    with pytest.raises(TooFewReplies, match=failure) as raised:
        fleet.ask(trouble.fail, [0, 1], {}, x=each)
    assert "\n" not in str(raised.value)
    assert (sorted(fleet.round_stats.retried), fleet.round_stats.lost) == ([0, 1], [0, 1])


def test_reply_that_cannot_travel_is_rejected_and_not_asked_for_again(pool):
    fleet = pool(2, retries=1)
    rejected = r"client 0, round 1, half: reply rejected: x is a tensor of the type bfloat16"
    with pytest.raises(TooFewReplies, match=rejected):
        fleet.ask(trouble.half, [0, 1], {}, x=each)
    assert (fleet.round_stats.retried, sorted(fleet.round_stats.rejected)) == ([], [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_a_client_that_hangs_is_left_behind_at_the_deadline(pool, tmp_path, actors):
    fleet = pool(actors, deadline_s=1.0, quorum=0.2)
    # client 3 has the fewest samples, so it is asked last
    message = {"victims": [3], "seconds": 60.0, "folder": str(tmp_path)}
    start = time.monotonic()
    replies = fleet.ask(trouble.stall, IDS, message, **COUNTED)
    assert time.monotonic() - start < 55  # client 3 alone would take 60 s
    assert (list(replies.weights), fleet.round_stats.lost) == ([0, 1, 2, 5], [3])
    assert fleet.ask(trouble.stall, IDS, message, **COUNTED)["calls"] == dict.fromkeys(IDS, 2) | {3: 1}


@pytest.mark.slow
def test_a_hung_client_below_the_quorum_is_named(pool, tmp_path):
    fleet = pool(2, deadline_s=0.5, quorum=1.0)
    with pytest.raises(TooFewReplies, match=r"client 1, .* not done after federation.deadline_s = 0.5 s"):
        fleet.ask(trouble.stall, [1], {"victims": [1], "seconds": 60.0, "folder": str(tmp_path)}, **COUNTED)


@pytest.mark.slow
def test_a_process_that_starts_does_not_use_up_the_deadline(pool, tmp_path):
    fleet = pool(1, deadline_s=2.0, quorum=1.0)  # an actor takes longer than the deadline to start
    message = {"victims": [1], "times": 1, "folder": str(tmp_path)}
    assert list(fleet.ask(trouble.die, [0, 1], message, **COUNTED).weights) == [0, 1]


@pytest.mark.slow
def test_stragglers_are_left_behind_and_their_late_answers_ignored(pool, tmp_path):
    fleet = pool(5, quorum=1.0)
    message = {"victims": [0], "folder": str(tmp_path)}
    replies = fleet.ask(trouble.stall_until_released, Cohort(IDS, 4), message, **COUNTED)
    assert list(replies.weights) == [1, 2, 3, 5]
    again = fleet.ask(trouble.count, IDS, {}, **COUNTED)  # client 0 answers again, in another actor
    assert again["calls"] == dict.fromkeys(IDS, 2) | {0: 1}
    slot = next(slot for slot in fleet.slots if slot.late is not None)
    (tmp_path / "released").touch()
    ray.wait([slot.late], timeout=30)
    assert fleet.ask(trouble.count, IDS, {}, **COUNTED)["calls"][0] == 2
    assert slot.late is None


@pytest.mark.slow
def test_an_actor_that_dies_on_a_late_call_costs_no_client_an_attempt(pool, tmp_path):
    fleet = pool(5, quorum=1.0, retries=0)
    fleet.ask(trouble.stall, Cohort(IDS, 4), {"victims": [0], "seconds": 60.0, "folder": str(tmp_path)}, **COUNTED)
    slot = next(slot for slot in fleet.slots if slot.late is not None)
    # the client may not have begun yet
    wait_for(lambda: (tmp_path / "0-0").exists() and (tmp_path / "0-0").read_text())
    os.kill(int((tmp_path / "0-0").read_text()), signal.SIGKILL)
    ray.wait([slot.late], timeout=30)
    for _ in range(2):
        assert list(fleet.ask(trouble.count, IDS, {}, **COUNTED).weights) == IDS
    assert (slot.late, fleet.round_stats.lost) == (None, [])


@pytest.mark.slow
def test_a_late_call_that_hangs_ends_with_the_next_deadline(pool, tmp_path):
    fleet = pool(2)
    message = {"victims": [0, 1], "seconds": 60.0, "folder": str(tmp_path)}
    replies = fleet.ask(trouble.stall, Cohort([0, 3], 1), message, **COUNTED)
    assert list(replies.weights) == [3]  # client 0 hangs in one actor
    fleet.config = configure(deadline_s=1.0)
    with pytest.raises(TooFewReplies, match="not done after"):  # client 1 hangs in the other
        fleet.ask(trouble.stall, [1], message, **COUNTED)
    assert [slot.late for slot in fleet.slots] == [None, None]
    fleet.config = configure()
    assert len(set(fleet.ask(trouble.stall, IDS, message, **COUNTED)["pid"].values())) == 2


def test_a_reply_that_is_not_finite_is_rejected_without_asking_again(pool):
    fleet = pool(2)
    got = fleet.ask(trouble.spoil, IDS, {"victims": [1]}, x=mean)
    assert got["x"].tolist() == [1.0]
    assert (fleet.round_stats.rejected, fleet.round_stats.retried, fleet.round_stats.lost) == (
        {1: "x is not finite"},
        [],
        [],
    )


@pytest.mark.slow
def test_each_client_is_served_by_its_own_actor_while_that_is_free(pool):
    fleet = pool(5)
    pids = fleet.ask(trouble.count, IDS, {}, **COUNTED)["pid"]
    assert len(set(pids.values())) == 5
    for ids in ([5], [1, 3], [0, 5], IDS):
        assert fleet.ask(trouble.count, ids, {}, **COUNTED)["pid"] == {id: pids[id] for id in ids}


@pytest.mark.slow
def test_more_actors_than_clients_with_samples_are_not_started(pool):
    assert [slot.home for slot in pool(5).slots] == [[id] for id in IDS]
    assert [slot.name.split("/")[1] for slot in pool(2).slots] == ["clients-000-002-005", "clients-001-003"]


@pytest.mark.slow
def test_an_actor_that_is_lost_before_the_first_call_is_described_and_then_replaced(pool):
    fleet = pool(1)
    ray.kill(fleet.slots[0].actor)
    assert fleet.describe()["device"] == "cpu"  # the description is kept, so no actor has to answer
    assert list(fleet.ask(trouble.stall, [0, 1], {"victims": []}, **COUNTED).weights) == [0, 1]
    assert fleet.round_stats.lost == []


@pytest.mark.slow
def test_an_actor_that_cannot_start_is_one_line(make_fleet):
    with refused("client.not-started") as raised:
        make_fleet(configure(), 1, Broken())
    assert "as a shared model" in raised.value.details["cause"]
    assert "\n" not in str(raised.value)


def test_actors_without_room_are_named(make_fleet, monkeypatch):
    notes = []
    monkeypatch.setattr("actors.fleet.START_TIMEOUT_S", 1)
    monkeypatch.setattr("actors.actor_pool.QUIET_WAIT_S", 0.5)
    monkeypatch.setattr("actors.fleet.RayFleet.note", lambda fleet, text: notes.append(text))
    with refused("cluster.busy", actors=1, cpus=99.0, gpus=0.0, timeout_s=1):
        make_fleet(configure(), 1, cpus=99.0)
    assert notes == ["the cluster has no room yet for 1 client actor of 99 CPUs and 0 GPUs; waiting for at most 1 s"]


def test_labels_say_whose_data_an_actor_holds(tiny_task):
    assert label_of([1], tiny_task.sizes, tiny_task.client_counts) == "client 1 · 14 samples · 3/4 classes"
    assert label_of([1], tiny_task.sizes, tiny_task.client_counts, ["wien", "linz"]).startswith("client linz · 14 ")
    assert label_of([0, 2, 5], tiny_task.sizes, tiny_task.client_counts) == "clients 0, 2, 5 · 45 samples"
    one = tiny_task.sizes.clip(max=1)
    assert label_of([1], one, tiny_task.client_counts).startswith("client 1 · 1 sample · ")


@pytest.mark.slow
def test_ray_shows_calls_by_client_function_and_round(pool, tiny_task, tmp_path):
    config, fleet = configure(), pool(2)
    train(config, FedAvg(), tiny_task, fleet, tmp_path)
    deadline = time.monotonic() + 30
    while not {"task::train, round 1", "task::train, round 2"} <= (names := {event["cat"] for event in ray.timeline()}):
        assert time.monotonic() < deadline, names
        time.sleep(0.5)


@pytest.mark.slow
def test_progress_counts_answers_that_wait_for_one_of_a_lower_id(make_fleet, tmp_path):
    fleet = make_fleet(configure(), 2)
    shown = []

    def show(stage, done, total):
        shown.append(done)
        if done == len(IDS) - 1:  # all but client 0, which has the lowest id
            (tmp_path / "released").touch()

    fleet.on_progress = show
    fleet.begin(1)
    fleet.ask(trouble.stall_until_released, IDS, {"victims": [0], "folder": str(tmp_path)}, **COUNTED)
    assert shown == [0, 1, 2, 3, 4, 5]
