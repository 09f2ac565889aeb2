"""Tensors are moved to a device and back in one copy, with their bits, without reusing a buffer too early.

The device is pretended, and reads page-locked memory as late as possible (accelerator.py).
"""

import accelerator as pretend
import pytest
import torch
from test_accelerator import device  # noqa: F401
from tiny import configure, make_setup

from raylt import staging, tree
from raylt.core.client import Reply
from raylt.core.fleet.client_host import ClientHost
from raylt.core.server import Server
from raylt.tree import Stamps

CPU, THERE = torch.device("cpu"), torch.device(pretend.NAME)


@pytest.fixture(autouse=True)
def buffer(monkeypatch):
    """Install a new buffer for the pretend device."""
    monkeypatch.setattr(staging, "_BUFFER", staging.Buffer())


def some(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, 3, 5, 7, generator=generator)
    return [
        torch.tensor([True, False, True]),
        draw,
        torch.tensor(5),
        draw.to(memory_format=torch.channels_last),
        draw.double()[0],
        draw.bfloat16().flatten(),
        torch.arange(7, dtype=torch.int8),
        draw.half()[0, 0],
    ]


def same(a, b):
    return torch.equal(a, b) and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def test_many_tensors_cross_in_one_copy_each_way_with_their_bits_and_strides(device):  # noqa: F811
    on_device = staging.moved(some(), THERE)
    assert (dict(device.transfers), dict(device.waits)) == ({"to": 1}, {})
    device.clear()
    back = staging.moved(on_device, CPU)
    assert (dict(device.transfers), dict(device.waits)) == ({"from": 1}, {"copy_ from": 1})
    assert all(map(same, back, some()))
    assert all(tensor.device.type == pretend.NAME for tensor in on_device)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in back)


def test_each_lies_as_if_it_had_been_copied_by_itself(device):  # noqa: F811
    places = [tensor.storage_offset() * tensor.element_size() for tensor in staging.moved(some(), THERE)]
    assert len(set(places)) == len(places)
    assert all(place % staging.ALIGNMENT == 0 for place in places)


def test_what_is_not_dense_or_has_a_gradient_or_is_alone_goes_by_itself(device):  # noqa: F811
    odd = [torch.zeros(4, 4)[:, 1], torch.zeros(0), torch.ones(2, requires_grad=True), torch.ones(3)]
    on_device = staging.moved(odd, THERE)
    assert device.transfers["to"] == len(odd)
    device.clear()
    assert all(torch.equal(*pair) for pair in zip(staging.moved(on_device[1:], CPU), odd[1:], strict=True))
    assert device.waits["_to_copy from"] == len(odd) - 1  # nothing is read before it has arrived
    assert on_device[2].requires_grad


def test_the_buffer_is_not_filled_again_before_it_was_read(device):  # noqa: F811
    first = staging.moved(some(0), THERE)
    second = staging.moved(some(1), THERE)  # nothing has computed with the first tensors yet
    third = staging.moved([torch.zeros(100_000), torch.ones(3)], THERE)  # moved in a larger buffer
    for arrived, seed in ((first, 0), (second, 1)):
        assert all(map(same, staging.moved(arrived, CPU), some(seed)))
    assert third[1].cpu().tolist() == [1, 1, 1]


def test_what_came_back_is_not_in_the_buffer(device):  # noqa: F811
    back = staging.moved(staging.moved(some(0), THERE), CPU)
    again = staging.moved(staging.moved(some(1), THERE), CPU)
    assert all(map(same, back, some(0)))
    assert all(map(same, again, some(1)))


def test_changes_of_one_are_no_changes_of_the_others(device):  # noqa: F811
    handed_over, other = staging.moved([torch.ones(3), torch.ones(3)], THERE)
    stamps = Stamps()
    stamps.add({"x": handed_over}, "reply")
    other.add_(1)
    assert stamps.changed() is None
    assert handed_over.cpu().tolist() == [1, 1, 1]
    handed_over.add_(1)
    assert stamps.changed() == "reply.x"


def test_what_is_too_much_for_one_copy_goes_in_several(device, monkeypatch):  # noqa: F811
    monkeypatch.setattr(staging, "MAX_COPY_BYTES", 2 * staging.ALIGNMENT)
    tensors = [torch.full((100,), float(i)) for i in range(5)]
    tensors.insert(1, torch.ones(1000))
    on_device = staging.moved(tensors[:-1], THERE)
    # one copy for the first and third tensor, one for two more, and one for the large tensor
    assert device.transfers["to"] == 3
    on_device += staging.moved(tensors[-1:], THERE)
    back = staging.moved(on_device, CPU)
    assert device.transfers["from"] == 4  # one more copy for the remaining tensor
    assert all(torch.equal(*pair) for pair in zip(back, tensors, strict=True))


def test_on_the_cpu_nothing_is_copied():
    tensors = some()
    assert all(a is b for a, b in zip(staging.moved(tensors, CPU), tensors, strict=True))
    assert len(staging._BUFFER._memory) == 0


def test_a_snapshot_shares_no_memory_wherever_its_tensors_are(device):  # noqa: F811
    for place in (CPU, THERE):
        tensors = tree.to({"a": torch.ones(3), "b": {"c": torch.zeros(2)}}, place)
        kept = tree.snapshot(tensors)
        tensors["a"].add_(1)
        assert kept["a"].tolist() == [1, 1, 1]
        assert kept["b"]["c"].device == CPU


# copies to and from the device in one call of `train` on the small network, one for each tensor of message, reply and
# state, and one for the order of the samples
ONE_BY_ONE = {"fedavg": (15, 14), "fedper": (15, 14), "scaffold": (23, 30)}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_a_call_takes_its_message_in_one_copy_and_sends_its_reply_in_one(device, tiny_task, name):  # noqa: F811
    setup = make_setup(configure(method={"name": name}, local={"batch": 8, "epochs": 1}))
    method, seen = setup.method, []
    for place in (CPU, THERE):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            host = ClientHost(setup, tiny_task.spec, tiny_task.test, place)
        message = {
            "model": tree.snapshot(method.shared(host.model)),
            "control": {name: torch.zeros(value.shape) for name, value in host.model.named_parameters()},
        }
        message = message if name == "scaffold" else {"model": message["model"]}
        host.run(method.train, message, 1, 0, tiny_task.shards[0], None)  # moves the client's data to the device
        device.clear()
        reply, private = host.run(method.train, message, 2, 0, None, None)
        assert isinstance(reply, Reply)
        seen.append(
            [
                value.tolist()
                for _, value in tree.leaves({"reply": reply.tree, "private": private})
                if isinstance(value, torch.Tensor)
            ]
        )
    assert seen[0] == seen[1]
    assert len(seen[1]) == ONE_BY_ONE[name][1]
    assert dict(device.transfers) == {"to": 2, "from": 1}  # the order of the samples is still copied by itself


def test_the_servers_model_takes_a_mean_in_one_copy(device, tiny_task):  # noqa: F811
    setup = make_setup(configure())
    model = setup.new_model(tiny_task.spec)
    mean = {name: value + 1 for name, value in model.state_dict().items()}
    server = Server(setup.config, tiny_task.spec, model.to(THERE), THERE)
    device.clear()
    server.step(mean)
    assert device.transfers == {"to": 1}
    assert all(torch.equal(value.cpu(), mean[name]) for name, value in server.model.state_dict().items())
