"""Calls of many small clients are sent in blocks, which changes no result."""

from types import SimpleNamespace

import pytest
import trouble
from many import LARGE, NOBODY, configure, fake_fleet, make_fleet, make_many
from tiny import CPU, fingerprint, make_experiment, make_setup
from trouble import Private

from actors.calls import ClientCalls
from raylt.core.checkpoint.checkpoint import latest
from raylt.core.experiment import Experiment
from raylt.core.fleet.block_sums import BLOCK, SummedReply, split_into_blocks
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.reductions import each, mean
from raylt.methods.fedper import FedPer

pytestmark = pytest.mark.timeout(600)
CLIENTS = 40


@pytest.fixture(scope="module")
def task():
    return make_many(CLIENTS)


@pytest.fixture(scope="module")
def fleet(ray_session, task, tmp_path_factory):
    made = make_fleet(configure(CLIENTS), task, 2, Private(), tmp_path_factory.mktemp("many"))
    yield made
    made.close()


@pytest.fixture
def blocks(monkeypatch):
    """Return the list of client ids of each call that is sent to an actor."""
    sent = []
    submit = ClientCalls._submit

    def noted(self, slot, ids, *sums):
        sent.append(list(ids))
        return submit(self, slot, ids, *sums)

    monkeypatch.setattr(ClientCalls, "_submit", noted)
    return sent


def held_by(experiment):
    """Return fingerprints of the model and of all clients' states."""
    fleet = experiment.fleet
    return {"model": fingerprint(experiment.server.model.state_dict())} | {
        id: fingerprint(state) for id, state in fleet.private_states(sorted(fleet._private))
    }


def train(config, task, fleet, method, folder):
    fleet._private.clear()
    fleet.config = config
    experiment = Experiment(make_setup(config, method), task, fleet, CPU, folder)
    return experiment, [experiment.step() for _ in range(2)]


@pytest.fixture(scope="module")
def undisturbed(task, tmp_path_factory):
    experiment = make_experiment(configure(CLIENTS), task, tmp_path_factory.mktemp("local"), Private())
    for _ in range(2):
        experiment.step()
    return held_by(experiment)


@pytest.mark.slow
def test_blocks_give_the_bits_of_one_client_at_a_time(fleet, task, undisturbed, blocks, tmp_path):
    experiment, _ = train(configure(CLIENTS), task, fleet, Private(), tmp_path)
    assert held_by(experiment) == undisturbed
    trained = [ids for ids in blocks if LARGE in ids]
    assert all(ids == [LARGE] for ids in trained)
    assert trained
    assert max(map(len, blocks)) == 39 // (4 * 2)
    assert len(blocks) < len([id for ids in blocks for id in ids]) / 2


def test_each_waiting_client_is_looked_at_once_or_twice_however_many_wait(monkeypatch):
    looked, sent = [], []

    class Looked(list):
        def __iter__(self):
            for id in super().__iter__():
                looked.append(id)
                yield id

    monkeypatch.setattr(ClientCalls, "_submit", lambda self, slot, ids, *sums: sent.append(ids) or ids)
    clients = 4000
    slots = [SimpleNamespace(own=frozenset(range(start, clients, 2)), home_node=0, stacks=False) for start in (0, 1)]
    fleet = fake_fleet(dict.fromkeys(range(clients), 3), slots)
    calls = ClientCalls(fleet, trouble.count, list(range(clients)), None, clients, None, None)
    calls._queues[0].clients = Looked(calls._queues[0].clients)
    while calls.pending:
        for slot in slots:
            calls.submit(slot, "own")
    assert sorted(id for ids in sent for id in ids) == list(range(clients))
    assert {len(ids) for ids in sent} == {64, 2000 % 64}
    assert all(set(ids) <= slot.own for ids, slot in zip(sent, 32 * slots, strict=False))
    # if each of the 62 calls looked at all waiting clients, there would be 30 times as many looks
    assert len(looked) < 3 * clients


@pytest.mark.parametrize(
    ("stacks", "sent"),
    [
        (False, [[3], [2], [0], [1], [4]]),
        (True, [[3], [2, 0, 1, 4], [5, 6, 7, 8]]),
    ],
)
def test_clients_that_train_in_stacks_share_a_call_with_more_samples_and_more_clients(monkeypatch, stacks, sent):
    monkeypatch.setattr(ClientCalls, "_submit", lambda self, slot, ids, *sums: ids)
    sizes = dict.fromkeys(range(9), 5) | {3: 129, 2: 128}
    slots = [SimpleNamespace(own=frozenset(range(9)), home_node=0, stacks=stacks)] * 2
    calls = ClientCalls(fake_fleet(sizes, slots), trouble.count, list(range(9)), None, 9, None, None)
    assert [calls.submit(slots[0], "own") for _ in sent] == sent


@pytest.mark.slow
def test_a_block_whose_process_dies_is_asked_again_one_by_one(fleet, task, undisturbed, blocks, tmp_path):
    config = configure(CLIENTS, retries=1)
    experiment, reports = train(config, task, fleet, Private(victims=(3, 20), folder=str(tmp_path)), tmp_path)
    assert held_by(experiment) == undisturbed
    again = set(reports[0].retried)
    assert {3, 20} <= again
    assert len(again) < CLIENTS
    assert not reports[0].lost
    assert all([id] in blocks for id in again)


@pytest.mark.slow
def test_a_client_that_raises_fails_alone(fleet, blocks):
    fleet.begin(1)
    fleet._private.clear()
    fleet.config = configure(CLIENTS, retries=0, quorum=0.5)
    got = fleet.ask(trouble.fail_each_fifth, fleet.everyone, {}, id=each)
    assert list(got["id"]) == [id for id in fleet.ids if id % 5]
    assert fleet.round_stats.lost == [id for id in fleet.ids if id % 5 == 0]
    assert NOBODY not in got["id"]


@pytest.mark.slow
def test_where_not_all_are_waited_for_everyone_has_a_call_of_its_own(fleet, blocks):
    fleet.begin(1)
    fleet.config = configure(CLIENTS)
    fleet.ask(trouble.count, Cohort(fleet.ids, 38), {}, calls=each, pid=each)
    assert {len(ids) for ids in blocks} == {1}
    blocks.clear()
    fleet.config = configure(CLIENTS, deadline_s=60)
    fleet.ask(trouble.count, fleet.everyone, {}, calls=each, pid=each)
    assert {len(ids) for ids in blocks} == {1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_clients_with_states_are_taken_up_from_a_checkpoint_to_the_same_bits(ray_session, tmp_path):
    many, config = make_many(1000), configure(1000, rounds=3, participation=0.1)
    straight = make_experiment(config, many, tmp_path / "local", FedPer())
    for _ in range(3):
        straight.step()
    (tmp_path / "ray").mkdir()
    for actors in (1, 3):  # the fleet ends after its second step, and other actors continue
        fleet = make_fleet(config, many, actors, FedPer())
        experiment = Experiment(make_setup(config, FedPer()), many, fleet, CPU, tmp_path / "ray")
        saved, _ = latest(tmp_path / "ray/checkpoints")
        if saved is not None:
            experiment.load(saved)
        while not experiment.done and experiment.server.round < (2 if saved is None else 3):
            experiment.advance()
        end = held_by(experiment) if experiment.done else None
        fleet.close()
    assert end == held_by(straight)


@pytest.mark.slow
def test_whole_blocks_come_back_as_their_sums_with_the_bits_of_single_calls(ray_session, blocks, tmp_path, monkeypatch):
    clients, arrived, seen = 4 * BLOCK + 30, [], {}
    many, config = make_many(clients), configure(clients, retries=1, quorum=0.5)
    accept = ClientCalls.accept

    def noted(self, outcome, seconds):
        arrived.append((outcome.id, type(outcome.value) is SummedReply))
        accept(self, outcome, seconds)

    monkeypatch.setattr(ClientCalls, "accept", noted)
    for actors in (0, 1, 2):
        folder = tmp_path / str(actors)
        folder.mkdir()
        fleet = (
            make_fleet(config, many, actors, Private())
            if actors
            else make_experiment(config, many, folder, Private()).fleet
        )
        fleet.begin(1)
        fleet.on_progress = None
        arrived.clear()
        blocks.clear()
        got = fleet.ask(trouble.flaky, fleet.everyone, {"folder": str(folder)}, x=mean)
        round_stats = fleet.round_stats
        seen[actors] = (
            fingerprint(dict(got)),
            got.weights,
            round_stats.rejected,
            round_stats.retried,
            round_stats.lost,
            round_stats.traffic,
            [fingerprint(state) for _, state in fleet.private_states([0, 70, 200])],
        )
        if actors == 1:
            # whole blocks of ids with samples; the first holds the large client and is split, the second the client
            # that raised
            assert [ids for ids in blocks if len(ids) == BLOCK] == split_into_blocks(fleet.ids)[1:4]
            assert {id for id, in_sums in arrived if in_sums} == {
                *split_into_blocks(fleet.ids)[2],
                *split_into_blocks(fleet.ids)[3],
                *split_into_blocks(fleet.ids)[4],
            } - {140}
        elif actors:
            assert not any(in_sums for _, in_sums in arrived)
        fleet.close()
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][2:4] == ({140: "x is not finite"}, [70])
