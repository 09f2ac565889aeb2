"""Clients, their data and the sums of their replies on several nodes.

The test with a cluster takes about a minute.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trouble
from many import fake_fleet
from ray.exceptions import ActorDiedError, ObjectLostError

from actors.actor_pool import deal_clients
from actors.calls import MIN_STORED_BYTES, ClientCalls
from actors.client import Block, BlockClient, BlockReplies, ClientActor
from actors.fleet import RayFleet
from actors.shards import Shards
from raylt.core.fleet.block_sums import BLOCK, SummedReply
from raylt.core.fleet.reductions import total
from raylt.core.fleet.schema import Schema
from raylt.core.fleet.wire import Fault
from raylt.core.round_stats import RoundStats
from raylt.errors import LateWrite

HERE = Path(__file__).parent
CLIENTS = 150  # one of them has no samples


def homes(slots):
    return [(slot.home_node, slot.bundle, slot.home) for slot in slots]


def test_neighbours_go_to_the_same_node_and_there_to_the_actors_in_turn():
    # 10 clients for three actors: two thirds of them, rounded down, for the node with two
    slots = deal_clients("run", [range(10)], [[0, 2], [1]])
    assert homes(slots) == [(0, 0, [0, 2, 4]), (0, 2, [1, 3, 5]), (1, 1, [6, 7, 8, 9])]
    assert [slot.name for slot in slots] == [
        "run/clients-000-002-004",
        "run/clients-001-003-005",
        "run/clients-006-007-008-and-1-more",
    ]


def test_each_node_gets_its_share_of_each_group():
    # the last two clients are new: they would otherwise all be on the last node, which would have nothing to train
    assert homes(deal_clients("run", [[0, 1, 2, 3], [4, 5]], [[0], [1]])) == [(0, 0, [0, 1, 4]), (1, 1, [2, 3, 5])]


class Actor:
    """Records the calls of an actor in place of Ray."""

    def __init__(self):
        self.sent = []
        self.run = self.add_up = self

    def options(self, num_returns=1, **_):
        self.returns = num_returns
        return self

    def remote(self, *arguments):
        self.sent.append(arguments)
        return "sums" if self.returns == 1 else [f"result {number}" for number in range(self.returns)]


def make_calls(clients, owns, sums=None, samples=100):
    """Return the calls of a function, and slots with these own clients, each on its own node but the first two."""
    slots = [
        SimpleNamespace(own=frozenset(own), home_node=max(0, number - 1), stacks=False, packs=set(), actor=Actor())
        for number, own in enumerate(owns)
    ]
    home_nodes = [next(slot.home_node for slot in slots if id in slot.own) for id in range(clients)]
    fleet = fake_fleet(dict.fromkeys(range(clients), samples), slots, home_nodes)
    fleet.round, fleet.round_stats, fleet.notes = 1, RoundStats(), []
    fleet.shards = Shards([f"pack {number}" for number in range(clients)], list(range(clients)))
    fleet.private, fleet.patience, fleet.keep = lambda id: None, lambda name, clients: 60.0, lambda private: private
    fleet.record_seconds, fleet.note = lambda *_: None, fleet.notes.append
    calls = ClientCalls(fleet, trouble.count, list(range(clients)), "message", clients, lambda *_: True, sums)
    return calls, slots


def test_an_idle_actor_prefers_clients_of_its_node_and_keeps_only_their_data():
    calls, (first, second, third) = make_calls(4, [[0], [1], [2, 3]])

    def submit(slot, reach):
        submitted = calls.submit(slot, reach)
        return None if submitted is None else submitted[1].ids

    assert [submit(first, "own") for _ in range(2)] == [[0], None]
    assert [submit(first, "node") for _ in range(2)] == [[1], None]
    assert submit(third, "own") == [2]
    assert submit(second, "others") == [3]
    assert [submit(slot, "others") for slot in (first, second, third)] == [None] * 3
    assert (first.packs, second.packs, third.packs) == ({0, 1}, set(), {2})
    blocks = [arguments[2] for slot in (first, second, third) for arguments in slot.actor.sent]
    assert [(block.packs, block.keep) for block in blocks] == [([0], True), ([1], True), ([3], False), ([2], True)]


@pytest.mark.parametrize("keep", [True, False])
def test_an_actor_drops_the_data_of_a_client_of_another_node(keep):
    actor, released = make_actor(), []
    actor.host = SimpleNamespace(
        run_stacks=lambda *_: {},
        run=lambda fn, message, round, id, shard, private: (trouble.Reply(1, {"shard": shard}), {}),
        release=released.extend,
    )
    pack = SimpleNamespace(shard=lambda id: f"shard {id}")
    block, _ = actor.run(None, {}, Block(1, [5], [BlockClient(3, 5, None)], keep, False), 60.0, None, pack)
    assert block.replies[0].tree == {"shard": "shard 3"}
    assert actor.packs == ({5: pack} if keep else {})
    assert released == ([] if keep else [3])


@pytest.mark.parametrize("read_only", [True, False])
def test_after_a_client_changed_the_message_of_a_block_no_other_client_of_the_block_uses_it(read_only):
    w = np.ones(2, np.float32)
    w.flags.writeable = not read_only  # as arrays of the object store, which torch writes to all the same
    actor = make_actor()

    def run(fn, message, round, id, shard, private):
        if id == 1:
            message["w"].mul_(0.5)
            raise LateWrite(1, "message.w")
        return trouble.Reply(1, {"w": message["w"]}), {}

    actor.host = SimpleNamespace(run_stacks=lambda *_: {}, run=run, device=torch.device("cpu"))
    pack = SimpleNamespace(shard=lambda id: None)
    clients = [BlockClient(id, 0, None) for id in range(3)]
    block, *_ = actor.run(None, {"w": w}, Block(1, [0], clients, True, False), 60.0, None, pack)
    first, *others = block.replies
    assert first.tree["w"].tolist() == [1, 1]
    assert w.tolist() == [1, 1]  # other blocks read the same array
    assert [(reply.code, reply.text.partition(" was")[0]) for reply in others] == [
        ("reply.late-write", "client 1: message.w"),
        ("reply.late-write", "client 2: message.w"),
    ]


def make_actor():
    """Return a client actor without a host, in this process."""
    plain = ClientActor.__ray_metadata__.modified_class
    actor = plain.__new__(plain)
    actor.packs, actor.stacks, actor._problems = {}, None, []
    return actor


def test_an_actor_returns_the_problems_of_a_call_and_each_is_noted_once():
    actor = make_actor()
    stacks = iter(["one", "one"])
    actor.host = SimpleNamespace(
        run_stacks=lambda *_: actor._note(next(stacks)) or {}, run=lambda *_: (trouble.Reply(1, {}), {})
    )
    pack = SimpleNamespace(shard=lambda id: None)
    blocks = [
        actor.run(None, {}, Block(1, [0], [BlockClient(3, 0, None)], True, False), 60.0, None, pack)[0]
        for _ in range(2)
    ]
    assert [block.problems for block in blocks] == [["one"], ["one"]]
    calls, slots = make_calls(4, [range(4)])
    calls.fleet.note_once = lambda text: RayFleet.note_once(calls.fleet, text)
    calls.fleet._noted = set()
    for block in blocks:
        _, call = calls.submit(slots[0], "own")
        calls.outcomes(call, block)
    assert calls.fleet.notes == ["count: one"]


def schema(clients, numbers=MIN_STORED_BYTES // 4):
    return Schema({"x": total.like(torch.empty(numbers, device="meta"))}, dict.fromkeys(range(clients), 100))


@pytest.mark.parametrize(
    ("clients", "sums", "samples", "stored"),
    [
        (2 * BLOCK, schema(2 * BLOCK), 100, True),
        (2 * BLOCK, None, 100, False),
        (2 * BLOCK, schema(2 * BLOCK, MIN_STORED_BYTES // 4 - 1), 100, False),
        (BLOCK, schema(BLOCK), 100, False),  # one block: its sum is as large as the server's own work
        (12 * BLOCK, schema(12 * BLOCK), 3, False),  # every actor gets whole blocks of small clients
    ],
    ids=["large replies", "each reply", "small replies", "one block", "whole blocks"],
)
def test_only_large_replies_of_several_blocks_stay_in_the_object_store(clients, sums, samples, stored):
    calls, slots = make_calls(clients, [range(0, clients, 2), range(1, clients, 2)], sums, samples)
    assert {calls._stores(id) for id in range(clients)} == {stored}
    calls.submit(slots[0], "node")
    assert slots[0].actor.sent[0][2].stores_replies == stored


def reply_to_all(calls, slots):
    """Run the calls that wait, and return those that add up."""
    additions = []
    while calls.pending:
        ref, call = next(
            submitted
            for slot in slots
            for reach in ("own", "node", "others")
            if (submitted := calls.submit(slot, reach))
        )
        if ref == "sums":
            additions.append(call)
            continue
        results = [None] * len(call.ids) if call.reply_refs else [trouble.Reply(100, {})] * len(call.ids)
        for outcome in calls.outcomes(call, BlockReplies(results, [])):
            calls.accept(outcome, 1.0)
    return additions


def test_the_sums_of_a_block_answer_for_all_of_its_clients():
    calls, slots = make_calls(BLOCK + 2, [range(BLOCK), [], range(BLOCK, BLOCK + 2)], schema(BLOCK + 2))
    additions = reply_to_all(calls, slots)
    assert sorted(call.ids for call in additions) == [list(range(BLOCK)), [BLOCK, BLOCK + 1]]
    assert (calls.arrived, calls.satisfied) == (BLOCK + 2, False)
    sums, ids, refs = slots[0].actor.sent[-1] if len(slots[0].actor.sent[-1]) == 3 else slots[2].actor.sent[-1]
    assert refs == [calls._stored_replies[id].value.ref for id in ids]
    assert sums._sizes == dict.fromkeys(ids, 100)
    for call in additions:
        for outcome in calls.outcomes(call, [SummedReply(100, 4, frozenset(), {}, None)] * len(call.ids)):
            assert outcome.private_ref is not None
            calls.accept(outcome, 1.0)
    assert calls.satisfied
    assert not calls.pending
    assert {type(answer.reply) for answer in calls.answers.values()} == {SummedReply}


def test_a_block_without_the_reply_of_a_client_that_failed_is_added_up():
    calls, slots = make_calls(BLOCK + 2, [range(BLOCK + 2)], schema(BLOCK + 2))
    calls._attempts[3] = calls.fleet.config.federation.retries
    calls._queues[0].clients.remove(3)
    calls.fail(3, Fault("client.failed", "no luck"))
    additions = reply_to_all(calls, slots)
    assert sorted(len(call.ids) for call in additions) == [2, BLOCK - 1]
    assert calls.answers[3].error.code == "client.failed"


def test_another_actor_adds_up_what_a_dead_one_did_not():
    calls, slots = make_calls(BLOCK + 2, [range(BLOCK + 2)], schema(BLOCK + 2))
    lost, _ = reply_to_all(calls, slots)
    calls.lose(lost, ActorDiedError())
    (again,) = reply_to_all(calls, slots)
    assert again.ids == lost.ids
    assert calls.fleet.round_stats.retried == []


@pytest.mark.parametrize("rejected", [False, True])
def test_clients_whose_replies_are_lost_are_asked_again_and_answer_the_server(rejected):
    calls, slots = make_calls(BLOCK + 2, [range(BLOCK + 2)], schema(BLOCK + 2))
    lost, other = reply_to_all(calls, slots)
    (calls.reject if rejected else calls.lose)(lost, ObjectLostError("", "", ""))
    assert calls.arrived == len(other.ids)
    assert reply_to_all(calls, slots) == []
    assert calls.fleet.round_stats.retried == lost.ids
    assert {type(calls.answers[id].reply) for id in lost.ids} == {trouble.Reply}


def test_a_block_is_lost_with_two_actors_at_most():
    calls, slots = make_calls(BLOCK + 2, [range(BLOCK + 2)], schema(BLOCK + 2))
    lost, _ = reply_to_all(calls, slots)
    calls.lose(lost, ActorDiedError())
    (again,) = reply_to_all(calls, slots)
    calls.lose(again, ActorDiedError())
    assert reply_to_all(calls, slots) == []
    assert set(calls.answers) == set(lost.ids)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run on_nodes.py, and return its results."""
    folder = tmp_path_factory.mktemp("nodes")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])]),
    }
    command = [sys.executable, HERE / "on_nodes.py", str(CLIENTS), folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


OUTCOME = "sums", "weights", "up", "troubles", "states"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_large_replies_are_added_up_on_their_nodes_to_the_bits_of_one_process(results):
    local, got = results["local"], results["node sums"]
    assert [got[key] for key in OUTCOME] == [local[key] for key in OUTCOME]
    assert (sorted(got["added"]), got["retried"]) == ([21, BLOCK, BLOCK], 0)
    # the float64 sums of three blocks, and less than a kilobyte for each client, in place of 149 replies
    assert 3 * 2 * MIN_STORED_BYTES < got["received"] < 3 * 2 * MIN_STORED_BYTES + CLIENTS * 1000
    assert got["up"] == (CLIENTS - 1) * MIN_STORED_BYTES  # the traffic is still that of the replies


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_an_adder_that_dies_changes_no_bit_and_no_client_is_asked_again(results):
    local, got = results["local"], results["adder dies"]
    assert [got[key] for key in OUTCOME] == [local[key] for key in OUTCOME]
    assert (len(got["added"]), got["retried"]) == (4, 0)
    assert "another process adds them up" in results["notes"][0]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_node_that_is_lost_with_replies_changes_no_bit(results):
    local, got = results["local"], results["node lost"]
    assert [got[key] for key in OUTCOME] == [local[key] for key in OUTCOME]
    assert got["lost"]
    assert got["retried"] > 0
    assert "they are asked again" in "".join(results["notes"][1:])


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_node_keeps_the_data_of_its_own_clients_only(results):
    homes = {node: {id for home_node, ids in results["homes"] if home_node == node for id in ids} for node in range(3)}
    assert [sorted(ids)[0] for ids in homes.values()] == [0, 50, 100]
    packs = [set(results["packs"][str(node)]) for node in range(3)]
    assert all(len(first & second) <= 1 for first, second in [packs[:2], packs[1:]])
    assert not packs[0] & packs[2]
