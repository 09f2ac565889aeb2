"""Sums in blocks of a fixed size have the same bits in every process, and equal plain sums up to float64 rounding."""

import pickle
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from tiny import configure, fingerprint

from raylt.core.client import Reply
from raylt.core.fleet.aggregation import LayoutVote, Plain
from raylt.core.fleet.block_sums import BLOCK, SummedReply, split_into_blocks
from raylt.core.fleet.fleet import Answer, Fleet
from raylt.core.fleet.reductions import each, mean, total
from raylt.core.fleet.wire import Fault, Unusable
from raylt.errors import ClientError

CLIENTS = 3 * BLOCK - 20
IDS = list(range(5, 5 + 7 * CLIENTS, 7))  # ids with gaps, as a round samples them
LIKE = {"w": torch.zeros(4, 3), "batches": torch.tensor(0)}
PARTS = {"model": mean.like(LIKE), "loss": mean, "sums": total.within(dict.fromkeys(range(3), torch.zeros(2)))}


def tell(client, message):
    """A client function that only names the call; it never runs."""


def reply_of(id: int) -> Reply:
    """Return a reply with weight 1 + id % 9, a model, a loss and sums of two classes of three."""
    generator = torch.Generator().manual_seed(id)
    model = {"w": torch.randn(4, 3, generator=generator), "batches": torch.tensor(id % 11)}
    sums = {c: torch.randn(2, generator=generator) * 1e3 for c in (id % 3, (id + 1) % 3)}
    return Reply(1 + id % 9, {"model": model, "loss": float(torch.rand((), generator=generator)), "sums": sums})


class Scripted(Fleet):
    """A fleet of clients with scripted answers; other processes add up the blocks in `blocked`."""

    def __init__(self, answers, blocked=(), **federation):
        shards = [range(1 + id % 9) for id in range(IDS[-1] + 1)]
        super().__init__(
            configure(federation=federation),
            SimpleNamespace(shards=shards, new_clients=(), shape=(8, 8, 1), kind="classification"),
        )
        self.answers, self.blocked, self.sent = answers, blocked, 0

    def _answers(self, fn, ids, message, enough, usable, sums):
        for number, block in enumerate(split_into_blocks(ids)):
            replies = [self.answers[id] for id in block]
            if sums is not None and number in self.blocked:
                schema = pickle.loads(cloudpickle.dumps(sums.restricted_to(block)))
                replies = pickle.loads(pickle.dumps(schema.sum_block(block, replies), protocol=5))
                assert len({id(reply.sums) for reply in replies if isinstance(reply, SummedReply)}) <= 2
            self.sent += sum(isinstance(reply, Reply) for reply in replies)
            for id_, reply in zip(block, replies, strict=True):
                error = None if reply is not None else ClientError(id_, self.round, "tell", "lost")
                yield Answer(id_, reply, id_, error)

    def map(self, fn, items):
        raise NotImplementedError

    describe = private_states = restore = close = map


def ask(answers, blocked=(), parts=PARTS, **federation):
    fleet = Scripted(answers, blocked, **federation)
    fleet.begin(1)
    got = fleet.ask(tell, IDS, {"round": 1}, **parts)
    return fleet, got


def outcome(fleet, got):
    """Return everything by which a run could tell two outcomes apart."""
    round_stats = fleet.round_stats
    return (
        fingerprint(dict(got)),
        got.weights,
        round_stats.rejected,
        round_stats.lost,
        round_stats.traffic,
        fleet._private,
        round_stats.participants,
    )


def test_sums_are_those_of_blocks_of_neighbours_in_their_order():
    replies = {id: reply_of(id) for id in IDS}
    _, got = ask(replies)
    expected, weight = torch.zeros(4, 3, dtype=torch.float64), sum(reply.weight for reply in replies.values())
    for start in range(0, CLIENTS, 64):
        block = torch.zeros(4, 3, dtype=torch.float64)
        for id in IDS[start : start + 64]:
            block.add_(replies[id].tree["model"]["w"], alpha=replies[id].weight)
        expected += block
    assert torch.equal(got["model"]["w"], (expected / weight).float())
    assert got["model"]["batches"].item() == 10
    for c in range(3):
        blocks = [
            sum(
                (
                    replies[id].tree["sums"][c].double()
                    for id in IDS[start : start + 64]
                    if c in replies[id].tree["sums"]
                ),
                start=torch.zeros(2, dtype=torch.float64),
            )
            for start in range(0, CLIENTS, 64)
        ]
        assert torch.equal(got["sums"][c], blocks[0] + blocks[1] + blocks[2])
        plain = sum(replies[id].tree["sums"][c].double() for id in IDS if c in replies[id].tree["sums"])
        assert torch.allclose(got["sums"][c], plain, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("blocked", [(0,), (1, 2), (0, 1, 2)])
def test_a_block_has_the_same_sums_in_every_process(blocked):
    answers = {id: reply_of(id) for id in IDS}
    nan = reply_of(IDS[3])
    nan.tree["model"]["w"][0, 0] = float("nan")
    other = reply_of(IDS[70])
    other.tree["loss"] = torch.tensor([1.0])  # a reply with another layout than most
    answers |= {
        IDS[3]: nan,
        IDS[4]: Unusable(Fault("reply.not-sendable", "the reply is a list")),
        IDS[70]: other,
        IDS[71]: Reply(100, reply_of(IDS[71]).tree),
    }
    alone, blocks = ask(answers, quorum=0.5), ask(answers, blocked, quorum=0.5)
    assert outcome(*blocks) == outcome(*alone)
    assert set(alone[0].round_stats.rejected) == {IDS[3], IDS[4], IDS[70], IDS[71]}
    assert blocks[0].sent < alone[0].sent


def test_weights_that_the_server_declares_count_in_every_process():
    weights = {id: 2.0 + id % 5 for id in IDS}
    answers = {id: Reply(weight, reply_of(id).tree) for id, weight in weights.items()}
    outcomes = []
    for blocked in ((), (0, 1, 2)):
        fleet = Scripted(answers, blocked)
        outcomes.append(outcome(fleet, fleet.ask(tell, IDS, {}, weights, **PARTS)))
        assert fleet.round_stats.rejected == {}
    assert outcomes[0] == outcomes[1]


def test_conditions_are_checked_in_every_process():
    answers = {id: reply_of(id) for id in IDS}
    for id, loss in ((IDS[2], 7.0), (IDS[5], 8.0)):
        answers[id].tree["loss"] = loss
    seven = mean.where(lambda loss: "is seven" if loss == 7 else None)
    checked = seven.where_of(lambda id, loss: f"is eight at {id}" if loss == 8 else None)
    for blocked in ((), (0, 1, 2)):
        fleet, _ = ask(answers, blocked, parts=PARTS | {"loss": checked})
        assert fleet.round_stats.rejected == {IDS[2]: "loss is seven", IDS[5]: f"loss is eight at {IDS[5]}"}


def test_a_block_in_which_a_client_is_lost_is_added_up_without_it():
    answers = {id: reply_of(id) for id in IDS} | {IDS[5]: None}
    fleet, got = ask(answers, (1, 2), quorum=0.5)
    assert fleet.round_stats.lost == [IDS[5]]
    assert outcome(fleet, got) == outcome(*ask(answers, quorum=0.5))


def test_one_block_is_the_plain_sum():
    replies = {id: reply_of(id) for id in IDS[:BLOCK]}
    fleet = Scripted(replies)
    got = fleet.ask(tell, IDS[:BLOCK], {}, **PARTS)
    plain = torch.zeros(4, 3, dtype=torch.float64)
    for reply in replies.values():
        plain.add_(reply.tree["model"]["w"], alpha=reply.weight)
    assert torch.equal(got["model"]["w"], (plain / sum(got.weights.values())).float())


@pytest.mark.parametrize(
    ("parts", "federation"), [(PARTS | {"loss": each}, {}), (PARTS, {"robust": "median"}), (PARTS, {"secure": True})]
)
def test_what_needs_each_reply_gets_each_reply(parts, federation):
    replies = {id: reply_of(id) for id in IDS}
    fleet = Scripted(replies, blocked=(0, 1, 2), **federation)
    if federation.get("secure"):
        parts = {"loss": parts["loss"].like(0.0), "model": parts["model"]}
        fleet.answers = {
            id: Reply(reply.weight, {name: reply.tree[name] for name in parts}) for id, reply in replies.items()
        }
    asked = IDS[:6]  # only six clients, because the number of masks grows with their square
    fleet.ask(tell, asked, {"round": 1}, **parts)
    assert fleet.sent == len(asked)


def test_what_travels_to_where_a_block_is_added_up_holds_no_model():
    seen = []

    class Weighed(Scripted):
        def _answers(self, fn, ids, message, enough, usable, sums):
            seen.append(len(cloudpickle.dumps(sums.restricted_to(ids[:BLOCK]))))
            yield from super()._answers(fn, ids, message, enough, usable, sums)

    large = {"w": torch.zeros(300, 300)}
    replies = {id: Reply(1 + id % 9, {"model": large}) for id in IDS}
    Weighed(replies).ask(tell, IDS, {}, model=mean.like(large))
    assert seen[0] < 5000


def test_values_of_clients_are_in_the_order_of_ids_also_if_a_reply_was_set_aside():
    plain = Plain({"loss": each}, [0, 1, 2])
    for id in (0, 2, 1):  # the reply of client 1 was compared with all others
        plain.accept(id, Reply(1.0 + id, {"loss": 0.5 * id}))
    result = plain.result()
    assert list(result["loss"].items()) == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert list(result.weights.items()) == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_the_most_frequent_layout_is_that_of_most_clients_and_not_of_most_samples():
    vote = LayoutVote(Plain({"loss": each}, range(3)))
    for id, weight, layout in ((0, 1.0, "usual"), (1, 100.0, "other"), (2, 1.0, "usual")):
        vote.accept(id, Reply(weight, {"loss": 0.5}), frozenset({(("loss",), layout)}))
    usual, faults = vote.winner()
    assert usual is not None
    assert list(usual.weights) == [0, 2]
    assert list(faults) == [1]
