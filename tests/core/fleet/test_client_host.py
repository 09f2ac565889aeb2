"""The clients that a process keeps: it drops their data when there is no room, which changes no result."""

import torch
from refusals import refused
from tiny import configure, make_setup

from raylt import tree
from raylt.core.client import Reply
from raylt.core.fleet import wire
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.fleet.reductions import each
from raylt.core.fleet.wire import sendable
from raylt.errors import RayltError
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedper import FedPer

CPU = torch.device("cpu")


def loss(client, message):
    return client.reply(loss=float(client.samples.batch(torch.arange(len(client))).x.sum()))


def host_of(task, **room):
    setup = make_setup(configure())
    return ClientHost(setup, task.spec, task.test, CPU, **room)


def test_the_data_of_the_client_whose_call_is_longest_ago_are_dropped(tiny_task):
    # a sample takes 8 * 8 pixels and an int64 label
    sizes = {id: 72 * len(tiny_task.shards[id]) for id in (0, 1, 2)}
    host = host_of(tiny_task, samples_room=sizes[0] + sizes[1])
    for id, kept in ((0, [0]), (1, [0, 1]), (0, [1, 0]), (2, [0, 2])):
        host.run(loss, {}, 1, id, tiny_task.shards[id], None)
        assert list(host.clients) == kept


def test_one_client_stays_however_large_it_is_and_results_are_the_same(tiny_task):
    config = configure()
    roomy, tight = host_of(tiny_task), host_of(tiny_task, samples_room=1)
    got = []
    for host in (roomy, tight):
        fleet = LocalFleet(config, tiny_task, host)
        fleet.begin(1)
        for _ in range(2):
            got.append(
                fleet.ask(
                    FedAvg().train,
                    fleet.ids,
                    {"model": dict(host_of(tiny_task).model.state_dict())},
                    model=each,
                    loss=each,
                )["loss"]
            )
    assert (len(roomy.clients), len(tight.clients)) == (5, 1)
    assert got[0] == got[2]
    assert got[1] == got[3]


def test_what_is_sent_takes_no_larger_tensor_along():
    large = torch.arange(1000.0)
    reply, private = sendable(Reply(1.0, {"few": large[:2]}), {"model": {"one": large[5:6]}, "state": {}}, 10_000)
    assert isinstance(reply, Reply)
    for part, values in ((reply.tree["few"], [0, 1]), (private["model"]["one"], [5])):
        assert part.tolist() == values
        assert part.untyped_storage().nbytes() == part.nbytes


def test_a_reply_has_room_for_sixteen_models(tiny_task, monkeypatch):
    monkeypatch.setattr(wire, "MIN_ROOM", 0)
    host = host_of(tiny_task)

    def copies(client, message):
        model = client.model.state_dict()
        return client.reply(**{f"model{number}": model for number in range(message["copies"])})

    assert isinstance(host.run(copies, {"copies": 16}, 1, 0, tiny_task.shards[0], None)[0], Reply)
    reply, _ = host.run(copies, {"copies": 17}, 1, 0, tiny_task.shards[0], None)
    assert reply.fault.code == "reply.too-large"


def test_dropping_leaves_one_and_says_whether_there_were_others(tiny_task):
    host = host_of(tiny_task)
    for id in (0, 1):
        host.run(loss, {}, 1, id, tiny_task.shards[id], None)
    assert host.drop(all_but=1)
    assert list(host.clients) == [1]
    assert not host.drop(all_but=1)


def test_released_clients_leave_and_others_stay(tiny_task):
    host = host_of(tiny_task, samples_room=1e9)
    for id in (0, 1, 2):
        host.run(loss, {}, 1, id, tiny_task.shards[id], None)
    host.release([2, 0, 5])
    assert list(host.clients) == [1]
    assert host._samples_bytes == host.clients[1].samples.nbytes


def test_a_call_ends_with_the_entries_that_the_method_does_not_share(tiny_task):
    method = FedPer()
    host = ClientHost(make_setup(configure(), method), tiny_task.spec, tiny_task.test, CPU)
    shared = method.shared(host.model)
    _, private = host.run(method.train, {"model": tree.snapshot(shared)}, 1, 0, tiny_task.shards[0], None)
    assert shared.keys() | private["model"].keys() == host.model.state_dict().keys()
    assert not shared.keys() & private["model"].keys()
    for name, value in private["model"].items():
        assert torch.equal(value, host.model.state_dict()[name])


def test_every_call_starts_in_training_mode(tiny_task):
    modes = []

    def judge(client, message):
        modes.append(client.model.training)
        client.model.eval()
        return client.reply()

    host = host_of(tiny_task)
    for id in (0, 1):
        host.run(judge, {}, 1, id, tiny_task.shards[id], None)
    assert modes == [True, True]


def test_an_error_of_raylt_keeps_its_code_where_the_model_has_diverged(tiny_task):
    def fail(client, message):
        next(client.model.parameters()).data.fill_(torch.nan)
        raise message["error"]

    own = RayltError("no image is left", code="data.bad-name")
    for error, code in ((own, "data.bad-name"), (ValueError("no number"), "reply.not-finite")):
        with refused(code, RayltError):
            host_of(tiny_task).run(fail, {"error": error}, 1, 0, tiny_task.shards[0], None)


def test_a_call_has_the_threads_of_its_client_and_leaves_those_of_its_process(tiny_task):
    seen = []

    def count(client, message):
        seen.append(torch.get_num_threads())
        return client.reply()

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        host_of(tiny_task).run(count, {}, 1, 0, tiny_task.shards[0], None)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_torchs_own_generator_draws_otherwise_in_each_call_of_each_client(tiny_task):
    def draw(client, message):
        return client.reply(x=torch.rand(1).item())

    def redraw(client, message):
        return draw(client, message)

    host = host_of(tiny_task)
    drawn = {
        host.run(fn, {}, round, id, tiny_task.shards[id], None)[0].tree["x"]
        for fn in (draw, redraw)
        for round in (1, 2)
        for id in (0, 1)
    }
    assert len(drawn) == 8
