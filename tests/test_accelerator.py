"""Every method on a second device mixes no devices and has the bits of the CPU.

The tests also count a step's launches, and check that the host waits for none. The device is pretended
(accelerator.py), so they say nothing about a GPU's own arithmetic.
"""

import pickle
from dataclasses import replace
from typing import Any

import accelerator as pretend
import numpy as np
import pytest
import teachers
import torch
from test_contract import CASES, QUICK
from tiny import configure, make_setup

from raylt.contract.case import Case
from raylt.contract.trace import Trace, finish
from raylt.core.client import Client, back_cross_entropy
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.evaluation.evaluator import validate
from raylt.core.experiment import Experiment
from raylt.core.fleet import wire
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.fleet import compute
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.server import Server
from raylt.core.training.sgd import sgd
from raylt.data.images.cache import Mapped
from raylt.data.samples import IGNORED, Samples
from raylt.data.task import Task
from raylt.methods import METHODS
from raylt.methods.balancefl import balanced


@pytest.fixture
def device(monkeypatch):
    """Provide the pretend device; yield its counts."""
    # replies must have torch's own tensor class, so pretend tensors report it, as tensors of a GPU do
    monkeypatch.setattr(
        wire, "type", lambda value: torch.Tensor if isinstance(value, pretend.Held) else type(value), raising=False
    )
    with pretend.accelerator() as counts:
        yield counts


def run_on(case: Case, place: str, batch: int = 8, epochs: int = 1, task: Task | None = None) -> Trace:
    config = case.config(local={"batch": batch, "epochs": epochs}, federation={"retries": 0, "quorum": 1.0})
    setup, task, device = case.setup(config), task or case.task, torch.device(place)
    clients = LocalFleet(config, task, ClientHost(setup, task.spec, task.test, device))
    return finish(Experiment(setup, task, clients, device, case.folder))


# the other methods run with the soak tests; test_cuda_graphs.py runs those that train in another way on this device
QUICKLY = (
    *("fedavg", "fedper", "scaffold", "sfd", "fedsm", "mupfl", "bpfed"),
    *("fedic", "promptfl", "fedbn", "noisymeans", "fedyogi"),
)


def marked(name: str, kind: str) -> Any:
    return pytest.param(name, kind, marks=[] if name in QUICKLY else pytest.mark.soak, id=f"{name}-{kind}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [marked(*case) for case in CASES])
def test_a_run_on_an_accelerator_has_the_bits_of_a_cpu(device, tmp_path, name, kind):
    case = Case(METHODS[name](**QUICK.get(name, {})), kind, tmp_path)
    expected, got = run_on(case, "cpu"), run_on(case, pretend.NAME)
    assert not any(report.lost or report.rejected for report in got.reports)
    assert got.bits == expected.bits


# fields that the tests above do not set
WITH_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("fedsm", {"teacher": "npz"}),
    ("fedsm", {"teacher": "npz", "finetune": True}),
    ("fedgrab", {"shut": 0.75}),
    ("clip2fl", {"teacher": "npz", "kd": 1.0, "contrast": 0.2}),
    ("mupfl", {"updates": "tuned"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields"), WITH_FIELDS)
def test_other_fields_have_the_bits_of_a_cpu_too(device, tmp_path, tiny_task, name, fields):
    if "teacher" in fields:
        fields = fields | {"teacher": teachers.save_features(tmp_path / "features.npz", tiny_task)}
    case = Case(METHODS[name](**QUICK.get(name, {}) | fields), "classification", tmp_path)
    assert run_on(case, pretend.NAME).bits == run_on(case, "cpu").bits


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_clients_test_images_are_counted_as_on_a_cpu(device, tmp_path, name):
    case = Case(METHODS[name](), "classification", tmp_path)
    own = tuple(np.arange(len(case.task.test))[id::7] for id in range(len(case.task.shards)))
    task = replace(case.task, own_tests=own)
    expected, got = run_on(case, "cpu", task=task), run_on(case, pretend.NAME, task=task)
    assert [report.confusion for report in got.reports] == [report.confusion for report in expected.reports]
    assert got.reports[-1].clients["local"] == expected.reports[-1].clients["local"]


def test_work_of_the_server_comes_back_to_the_cpu(device):
    def doubled(item):
        assert item["x"].device.type == pretend.NAME
        return {"x": 2 * item["x"]}

    assert torch.equal(
        compute(doubled, {"x": torch.arange(3)}, 1, torch.device(pretend.NAME))["x"], torch.tensor([0, 2, 4])
    )


def test_a_servers_step_takes_a_mean_from_wherever_it_is(device, tiny_task):
    def stepped(place, of_mean):
        setup = make_setup(configure(method={"name": "fedadam"}))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = setup.new_model(tiny_task.spec).to(place)
        server = Server(setup.config, tiny_task.spec, model, torch.device(place), setup.method.server_optimiser())
        server.step({name: (value + 1).to(of_mean) for name, value in model.state_dict().items()})
        return [value.cpu().tolist() for value in model.state_dict().values()]

    assert stepped(pretend.NAME, pretend.NAME) == stepped(pretend.NAME, "cpu") == stepped("cpu", "cpu")


def test_whether_an_encoder_is_known_is_waited_for_once(device, tiny_task):
    place = torch.device(pretend.NAME)
    encoder = make_setup(configure()).new_model(tiny_task.spec).to(place).encoder
    test = EvaluationSet(tiny_task.test, tiny_task.spec, place)
    assert not test._has_features_of(encoder)
    device.clear()
    assert test._has_features_of(encoder)
    assert device.waits == {"equal": 1}
    with torch.no_grad():
        list(encoder.parameters())[-1].flatten()[-1].add_(1)
    assert not test._has_features_of(encoder)


def test_a_clients_view_of_the_classes_is_on_its_device(device, tiny_task):
    renamed = replace(tiny_task.shards[0], view=np.array([1, 0, 3, 2]))
    samples = Samples(renamed, tiny_task.spec, torch.device(pretend.NAME))
    assert samples.view is not None
    assert samples.view[samples.view].device.type == pretend.NAME


def test_pixels_without_a_label_count_alike(device):
    def loss(place):
        generator = torch.Generator().manual_seed(0)
        logits, y = torch.randn(2, 4, 3, 3, generator=generator), torch.randint(3, (2, 3, 3), generator=generator)
        y[:, 0] = IGNORED
        return back_cross_entropy(logits.to(place), y.to(place)).item()

    assert loss(pretend.NAME) == loss("cpu")


# The waits of FedYoYo's strong views (torchvision, image by image) depend on the draws. FedALA reads one loss an epoch
# until its weights have settled, after a varying number of epochs.
OWN_WAITS = [case for case in CASES if case[0] not in ("fedyoyo", "fedala")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [marked(*case) for case in OWN_WAITS],
)
def test_twice_as_many_steps_wait_no_more_often(device, tmp_path, name, kind):
    case = Case(METHODS[name](**QUICK.get(name, {})), kind, tmp_path)
    waits = []
    for batch in (8, 4):
        device.clear()
        run_on(case, pretend.NAME, batch)
        waits.append(sum(device.waits.values()))
    assert 0 < waits[1] <= waits[0]


# Kernels of a step of `sgd` on the small network (11 trained tensors), including the batch. On a GPU each takes at
# least 5 us, whatever it computes.
BUDGET = {"fedavg": 44, "fedprox": 69, "ditto": 69, "bpfed": 79, "balancefl": 81}
AUGMENTS = {"none": 0, "crop_flip": 17, "resized_crop_flip": 45, "scale_crop_flip": 48}  # in addition to fedavg's


def batches_of(method: Any, client: Client) -> dict[str, Any]:
    """Return the batches of a method as arguments of `sgd`."""
    if method.name == "bpfed":
        return {"make": method.mixed(client)}
    return {"rows": balanced(client)} if method.name == "balancefl" else {}


def step_of(device: pretend.Counts, task: Task, name: str, augment: str = "none") -> tuple[int, dict[str, int]]:
    """Return kernels and waits of one more step: an epoch of three minus an epoch of two, on 24 samples."""
    seen = []
    for batch in (8, 12):
        config = configure(method={"name": name}, augment=augment, local={"batch": batch, "epochs": 1})
        setup, place = make_setup(config), torch.device(pretend.NAME)
        method: Any = setup.method
        model = setup.new_model(task.spec).to(place)
        client = Client(
            0,
            Samples(task.shards[0], task.spec, place),
            EvaluationSet(task.test, task.spec, place),
            model,
            config,
            place,
            setup.augment,
        )
        client.begin("join", 0)
        objective = method.near_global(client) if name == "ditto" else method.objective(client, {})
        for round in (1, 2):  # in the first round, augmentations copy their constants to the device once
            client.begin("train", round)
            device.clear()
            sgd(client, objective, **batches_of(method, client))
        seen.append((sum(device.kernels.values()), device.waits.copy()))
    (more, waits), (less, fewer) = seen
    return more - less, dict(waits - fewer)


@pytest.mark.parametrize("name", BUDGET)
def test_a_step_keeps_to_its_budget_of_kernels_and_waits_for_none(device, tiny_task, name):
    kernels, waits = step_of(device, tiny_task, name)
    assert waits == {}
    assert kernels <= BUDGET[name]


@pytest.mark.parametrize("augment", AUGMENTS)
def test_an_augmentation_keeps_to_its_budget_of_kernels_and_waits_for_none(device, tiny_task, augment):
    kernels, waits = step_of(device, tiny_task, "fedavg", augment)
    assert waits == {}
    assert kernels <= BUDGET["fedavg"] + AUGMENTS[augment]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["fedavg", "fedper"])
def test_held_out_images_are_judged_on_the_device(device, tmp_path, name):
    def judged(place):
        case = Case(METHODS[name](), "classification", tmp_path)
        test, file = case.task.test, tmp_path / "images.npy"
        np.save(file, test.x)  # images on disk, like large data sets
        held_out = replace(test, x=Mapped(str(file), np.arange(len(test))))
        task = replace(case.task, validation=held_out, validation_clients=np.zeros(len(held_out.y), np.int64))
        config = case.config(local={"batch": 8, "epochs": 1}, federation={"rounds": 1})
        setup = case.setup(config)
        fleet = LocalFleet(config, task, ClientHost(setup, task.spec, task.test, torch.device(place)))
        experiment = Experiment(setup, task, fleet, torch.device(place), tmp_path)
        experiment.step()
        return validate(setup.method, experiment.server, fleet, task)

    assert judged(pretend.NAME) == judged("cpu")


def test_what_a_gpu_refuses_is_refused():
    with pretend.accelerator():
        on_device, on_cpu, places = torch.ones(3, device=pretend.NAME), torch.ones(3), torch.tensor([1, 2])
        with pytest.raises(RuntimeError, match="some tensors are on pretend, others"):
            on_device[places]
        with pytest.raises(RuntimeError, match="indices on pretend, the indexed tensor on the CPU"):
            on_cpu[places.to(pretend.NAME)]
        with pytest.raises(TypeError, match="a tensor on pretend is sent to another process"):
            pickle.dumps(on_device)
        with pytest.raises(RuntimeError, match="some tensors are on pretend, others"):
            on_device + on_cpu
        with pytest.raises(RuntimeError, match="draws on pretend with a generator of cpu"):
            torch.rand(3, device=pretend.NAME, generator=torch.Generator())
        with pytest.raises(TypeError, match="can't convert a tensor on pretend to numpy"):
            on_device.numpy()
        assert (on_device.cpu() + on_cpu).tolist() == [2, 2, 2]


def test_what_is_launched_and_waited_for_is_counted():
    with pretend.accelerator() as counts:
        x = torch.ones(3).to(pretend.NAME, non_blocking=True)
        y = (x * 2)[1:] + x[:2]
        assert (sum(counts.kernels.values()), dict(counts.waits)) == (3, {})  # the copy, the product, the sum
        y.sum().item()
        y[y > 1]
        y.cpu()
    assert sum(counts.waits.values()) == 3
