"""A full device: the server judges fewer images at a time, and clients' processes drop the data of waiting clients.

Anything else is one clear error. The tests raise the errors themselves, on the pretend device and on the CPU.
"""

import re
from dataclasses import replace

import accelerator as pretend
import numpy as np
import pytest
import torch
from refusals import refused
from test_accelerator import device  # noqa: F401
from tiny import configure, make_setup

from raylt.contract.case import Case
from raylt.core.client import Client, Message, Reply
from raylt.core.device import InHalves
from raylt.core.evaluation.evaluator import validate
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.errors import TooFewReplies
from raylt.methods.fedavg import FedAvg

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
OTHER = ValueError("no luck")


def limited(most, error=FULL):
    """Return a function that squares at most `most` values at a time, and the list of its call sizes."""
    sizes = []

    def squares(x):
        sizes.append(len(x))
        if len(x) > most:
            raise error
        return x * x

    return squares, sizes


@pytest.mark.parametrize("kind", ["cpu", pretend.NAME])
def test_a_batch_without_room_is_halved_and_those_after_it_are_as_small(device, kind):  # noqa: F811
    squares, sizes = limited(3)
    notes: list[str] = []
    fits = InHalves(squares, notes.append)
    for count in (13, 13, 2):
        x = torch.arange(count).to(kind)
        assert fits(x).tolist() == [i * i for i in range(count)]
    assert sizes == [13, 6, 3, 3, 3, 3, 1, 3, 3, 3, 3, 1, 2]
    assert [[int(word) for word in note.split() if word.isdigit()] for note in notes] == [[6, 13], [3, 6]]


def test_what_fits_is_computed_in_one_piece():
    squares, sizes = limited(100)
    fits = InHalves(squares, pytest.fail)
    x = torch.arange(7)
    assert fits(x).equal(x * x)
    assert fits(x[:0]).equal(x[:0])
    assert sizes == [7, 0]


@pytest.mark.parametrize(("most", "error"), [(0, FULL), (3, OTHER)])
def test_no_room_for_a_single_image_and_other_errors_stay_what_they_are(most, error):
    squares, sizes = limited(most, error)
    with pytest.raises(type(error)):
        InHalves(squares, lambda text: None)(torch.arange(4))
    assert sizes == ([4, 2, 1] if error is FULL else [4])


class Narrow(FedAvg):
    """A method whose prediction fails for more than `most` images at a time."""

    most: int

    def predict(self, model, x):
        if len(x) > self.most:
            raise FULL
        return super().predict(model, x)


class Greedy(FedAvg):
    """A method whose server runs out of device memory at the place that `where` names."""

    where: str

    def round(self, server, fleet):
        if self.where == "round":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        super().round(server, fleet)

    def train(self, client, message):
        if self.where == "client":
            raise FULL
        return super().train(client, message)

    def predict(self, model, x):
        if self.where == "evaluation":
            raise FULL
        return super().predict(model, x)


def experiment_of(method, task, kind, folder):
    setup = make_setup(configure(local={"batch": 8, "epochs": 1}, federation={"rounds": 1, "retries": 0}), method)
    fleet = LocalFleet(setup.config, task, ClientHost(setup, task.spec, task.test, torch.device(kind)))
    return Experiment(setup, task, fleet, torch.device(kind), folder)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:round 1, evaluation")
@pytest.mark.parametrize("kind", ["cpu", pretend.NAME])
def test_a_server_with_little_room_judges_as_one_with_much(device, tmp_path, kind):  # noqa: F811
    task = Case(FedAvg(), "classification", tmp_path).task
    task = replace(task, validation=task.test, validation_clients=np.zeros(len(task.test.y), np.int64))
    seen, quality = [], []
    for method in (Narrow(most=10**6), Narrow(most=3)):
        experiment = experiment_of(method, task, kind, tmp_path)
        report = experiment.step()
        seen.append(
            (
                report.confusion,
                report.accuracy,
                report.figures["validation"],
                validate(method, experiment.server, experiment.fleet, task),
            )
        )
        assert report.quality is not None
        quality.append(report.quality)
    assert seen[0] == seen[1]
    assert quality[1] == pytest.approx(quality[0])  # a figure of probabilities, whose last bits may differ


def test_the_note_on_fewer_images_names_the_round(tiny_task, tmp_path):
    with pytest.warns(RuntimeWarning, match="round 1, evaluation at the server: device out of memory; continuing with"):
        experiment_of(Narrow(most=3), tiny_task, "cpu", tmp_path).step()


@pytest.mark.parametrize("kind", ["cpu", pretend.NAME])
@pytest.mark.parametrize("where", ["round", "evaluation"])
@pytest.mark.filterwarnings("ignore:round 1, evaluation")
def test_anything_else_of_the_server_without_room_is_one_line(device, tiny_task, tmp_path, kind, where):  # noqa: F811
    with refused("device.full", step=1) as error:
        experiment_of(Greedy(where=where), tiny_task, kind, tmp_path).step()
    assert re.search("out of memory|CUBLAS", str(error.value))
    assert "raylt.resume" in str(error.value)


def test_a_clients_device_without_room_is_no_matter_of_the_servers(tiny_task, tmp_path):
    with refused("reply.too-few", TooFewReplies, client=0, cause="device.full"):
        experiment_of(Greedy(where="client"), tiny_task, "cpu", tmp_path).step()


def test_an_error_of_another_kind_is_not_touched(tiny_task, tmp_path, monkeypatch):
    experiment = experiment_of(FedAvg(), tiny_task, "cpu", tmp_path)
    monkeypatch.setattr(experiment.evaluator, "evaluate", lambda *_, **__: (_ for _ in ()).throw(OTHER))
    with pytest.raises(ValueError, match="no luck"):
        experiment.step()


def test_the_data_of_clients_that_wait_in_this_process_give_way(tiny_task):
    setup = make_setup(configure())
    host = ClientHost(setup, tiny_task.spec, tiny_task.test, torch.device("cpu"))

    def need_room(client: Client, message: Message) -> Reply:
        if len(host.clients) > 1:
            raise FULL
        return client.reply(id=client.id)

    for id in (0, 1, 2):
        reply, _ = host.run(need_room, {}, 1, id, tiny_task.shards[id], None)
        assert isinstance(reply, Reply)
        assert reply.tree == {"id": id}
        assert list(host.clients) == [id]


def test_a_client_that_is_alone_and_finds_no_room_says_so(tiny_task):
    setup, calls = make_setup(configure()), []
    host = ClientHost(setup, tiny_task.spec, tiny_task.test, torch.device("cpu"))

    def fill(client: Client, message: Message) -> Reply:
        calls.append(client.id)
        raise FULL

    with pytest.raises(torch.OutOfMemoryError):
        host.run(fill, {}, 1, 0, tiny_task.shards[0], None)
    assert calls == [0]
