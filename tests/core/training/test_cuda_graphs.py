"""Steps that are recorded once and replayed, as CUDA graphs do, have the bits of single steps.

Recorder and device are pretended (accelerator.py), so these tests say nothing about CUDA's own streams and memory
pools.
"""

from collections.abc import Iterator
from typing import Any

import accelerator as pretend
import pytest
import torch
from refusals import refused
from test_accelerator import CASES, QUICK, device, run_on  # noqa: F401
from test_contract import marks_of
from tiny import configure, make_setup
from torch import nn
from torch.nn import functional as F

from raylt.contract.case import Case
from raylt.core.client import Client
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.training import cuda_graphs
from raylt.core.training.cuda_graphs import WARM_UP, Repeated, steady
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.sgd import sgd
from raylt.data.augment import InTurn
from raylt.data.image_policies import rand_augment
from raylt.data.samples import Samples
from raylt.methods import METHODS
from raylt.methods.bpfed.method import ScaledLinear
from raylt.models import MODELS
from raylt.models.split import SplitModel
from raylt.recordability import is_recordable, recordable

# methods whose steps draw on the host with the fields used here, or whose loops train two models without `sgd`
EAGER = {"balancefl", "fedgrab", "fedyoyo", "apfl", "pfedme"}
PLACE = torch.device(pretend.NAME)
# enough steps on 24 and on 5 samples that some are replayed
STEPS = {"classification": {"batch": 8, "epochs": 2}, "segmentation": {"batch": 2, "epochs": 3}}
QUICKLY = ("fedavg", "bpfed")


def cases() -> Iterator[Any]:
    """Yield one method for each way of training; many methods differ only at the server."""
    seen = set()
    for name, kind in CASES:
        method = METHODS[name]
        own = (method.objective, method.train, method.settle, method.finish, kind)
        if own not in seen:
            yield pytest.param(name, kind, marks=marks_of(name, kind, QUICKLY), id=f"{name}-{kind}")
        seen.add(own)


@pytest.fixture
def recorder(device, monkeypatch):  # noqa: F811
    """Let the pretend device record from its first call on."""
    recorder = pretend.Recorder(device)
    monkeypatch.setitem(cuda_graphs._RECORDERS, pretend.NAME, recorder)
    return recorder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), list(cases()))
def test_replayed_steps_have_the_bits_of_eager_ones(recorder, tmp_path, name, kind):
    case = Case(METHODS[name](**QUICK.get(name, {})), kind, tmp_path)
    expected, got = run_on(case, "cpu", **STEPS[kind]), run_on(case, pretend.NAME, **STEPS[kind])
    assert not any(report.lost or report.rejected for report in got.reports)
    assert got.bits == expected.bits
    assert (recorder.recordings > 0) == (name not in EAGER)


# fields that decide whether a step can be recorded
VARIANTS: list[tuple[str, dict[str, Any], bool]] = [
    ("bpfed", {"mixup": "batch", "crt": False, "lws": False}, False),
    ("balancefl", {"fa": False}, True),
    ("mupfl", {"bavd_reset": "epoch", "pkcf": False}, True),
    ("mupfl", {"bavd_reset": "never"}, True),
    ("mupfl", {"bavd_map": "bchw"}, True),
    ("sfd", {"abbl": "la", "safs": False}, True),
    ("la", {"prior": "global"}, True),
    ("fedsm", {"retrain": "after"}, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fields", "recorded"), VARIANTS)
def test_fields_decide_whether_steps_are_recorded_and_bits_are_the_same(recorder, tmp_path, name, fields, recorded):
    case = Case(METHODS[name](**QUICK.get(name, {}) | fields), "classification", tmp_path)
    expected, got = run_on(case, "cpu", epochs=2), run_on(case, pretend.NAME, epochs=2)
    assert got.bits == expected.bits
    assert (recorder.recordings > 0) == recorded


def client_on(task, place, augment=None, **local):
    config = configure(method={"name": "fedavg"}, local={"batch": 4, "epochs": 2} | local)
    setup = make_setup(config)
    model = setup.new_model(task.spec).to(place)
    client = Client(
        0,
        Samples(task.shards[0], task.spec, place),
        EvaluationSet(task.test, task.spec, place),
        model,
        config,
        place,
        augment,
    )
    client.begin("train", 1)
    return client, setup.method.objective(client, {})


def trained(task, place, **how) -> tuple[float, list]:
    client, objective = client_on(task, torch.device(place), **how)
    loss = sgd(client, objective)
    return loss, [value.cpu().tolist() for value in client.model.state_dict().values()]


@pytest.mark.parametrize("augment", ["crop_flip", "resized_crop_flip", "scale_crop_flip"])
def test_draws_on_the_device_continue_from_replay_to_replay(recorder, tiny_task, augment):
    from raylt.data.augment import AUGMENTATIONS

    own = AUGMENTATIONS[augment]
    assert trained(tiny_task, pretend.NAME, augment=own) == trained(tiny_task, "cpu", augment=own)
    assert recorder.recordings == 1


def test_a_replay_is_one_launch_and_the_rest_of_an_epoch_is_taken_as_it_is(recorder, device, tiny_task):  # noqa: F811
    client, objective = client_on(tiny_task, PLACE, batch=5, epochs=2)  # 24 samples: 5, 5, 5, 5, 4
    device.clear()
    sgd(client, objective)
    assert device.kernels["graph"] == 8 - WARM_UP
    assert recorder.recordings == 1


@pytest.mark.parametrize(
    "how",
    [
        {"optimiser": "adam"},
        {"augment": rand_augment},
        {"augment": InTurn((recordable(lambda x, y, _: (x, y)), rand_augment))},
    ],
)
def test_steps_with_a_part_that_is_not_recordable_are_not_recorded(recorder, tiny_task, how):
    trained(tiny_task, pretend.NAME, **how)
    assert recorder.recordings == 0


def test_an_objective_is_not_recorded_unless_it_says_that_it_may_be(recorder, tiny_task):
    client, _ = client_on(tiny_task, PLACE)
    calls = []

    def counted(batch):
        calls.append(1)
        return F.cross_entropy(client.model(batch.x), batch.y)

    sgd(client, counted)
    assert (len(calls), recorder.recordings) == (12, 0)


def test_what_is_wrongly_declared_and_waits_is_an_error_that_names_the_switch(recorder, tiny_task):
    client, _ = client_on(tiny_task, PLACE)
    bad = recordable(lambda batch: F.cross_entropy(client.model(batch.x), batch.y) * client.model(batch.x).sum().item())
    with refused("device.not-recordable", key="resources.graphs") as caught:
        sgd(client, bad)
    assert "resources.graphs=off" in str(caught.value)


class Gone(torch.AcceleratorError):
    error_code = 700  # cudaErrorIllegalAddress


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, Gone])
def test_another_error_of_a_recording_stays_what_it_is(recorder, tiny_task, monkeypatch, kind):
    def fails(fn, generator):
        raise kind("an error that no setting mends")

    monkeypatch.setattr(recorder, "record", fails)
    client, objective = client_on(tiny_task, PLACE)
    with pytest.raises(kind):
        sgd(client, objective)


@pytest.mark.parametrize("schedule", ["constant", "epoch", "iteration"])
@pytest.mark.parametrize("layers", ["linear", "scaled"])
def test_classifiers_are_fitted_alike(recorder, schedule, layers):
    def fitted(place):
        torch.manual_seed(0)
        linear = nn.Linear(6, 4)
        classifier = (linear if layers == "linear" else ScaledLinear(linear, True, True, False)).to(place)
        generator = torch.Generator().manual_seed(1)
        z, y = torch.randn(86, 6, generator=generator).to(place), torch.randint(4, (86,), generator=generator).to(place)
        loss = fit_classifier(
            classifier, z, y, epochs=3, batch=8, lr=0.1, momentum=0.9, weight_decay=0.01, seed=2, schedule=schedule
        )
        return loss, [value.cpu().tolist() for value in classifier.state_dict().values()]

    assert fitted(pretend.NAME) == fitted("cpu")
    # a constant rate needs one recording, and another one for the last epoch, which sums the loss; an epoch's rate
    # needs one for each epoch, and a rate per step cannot be recorded
    assert recorder.recordings == {"constant": 2, "epoch": 3, "iteration": 0}[schedule]


def test_a_learning_rate_for_few_steps_is_not_worth_a_recording(recorder):
    z, y = torch.randn(16, 6, device=pretend.NAME), torch.zeros(16, dtype=torch.int64, device=pretend.NAME)
    fit_classifier(
        nn.Linear(6, 4).to(pretend.NAME),
        z,
        y,
        epochs=20,
        batch=8,
        lr=0.1,
        momentum=0,
        weight_decay=0,
        seed=0,
        schedule="epoch",
    )
    assert recorder.recordings == 0


def test_every_network_here_is_steady_and_what_is_not_known_is_not():
    class Counting(nn.Linear):
        def forward(self, input):
            return super().forward(input)

    class Inherits(SplitModel):
        pass

    assert all(steady(factory(4, (32, 32, 3))) for factory in MODELS.values())
    assert not steady(nn.Sequential(Counting(1, 1)))
    assert not steady(Inherits(nn.Identity(), 1, 1))
    assert not steady(nn.BatchNorm2d(3, momentum=None))
    hooked = nn.Linear(1, 1)
    assert steady(hooked)
    hooked.register_forward_hook(lambda *_: None)
    assert not steady(hooked)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_network_is_replayed_with_the_bits_of_eager_steps(recorder, name):
    def trained(place):
        torch.manual_seed(0)
        model, x = MODELS[name](3, (32, 32, 3)).to(place), torch.randn(12, 3, 32, 32).to(place)
        labels = (12, 32, 32) if model.problem == "segmentation" else (12,)
        y = torch.randint(3, labels).to(place)

        def step(rows):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            params = list(model.parameters())
            with torch.no_grad():
                for p, g in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
                    if g is not None:
                        p.sub_(0.1 * g)

        repeated = Repeated(recordable(step), torch.device(place), [], [model])
        for i in range(WARM_UP + 2):
            repeated(((torch.arange(2) + 2 * i) % 12).to(place))
        return [value.cpu() for value in model.state_dict().values()]

    ours, plain = trained(pretend.NAME), trained("cpu")
    assert recorder.recordings == 1
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_declaration_is_of_the_function_itself():
    assert is_recordable(recordable(lambda: None))
    assert not is_recordable(lambda: None)
    assert not is_recordable(None)
