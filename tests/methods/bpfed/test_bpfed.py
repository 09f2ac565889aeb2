import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from bpfed_runs import loss_of, open_client, run
from refusals import refused
from tiny import Recorder, configure, fingerprint, make_experiment, make_setup, make_task, private_states
from torch import tensor
from torch.nn import functional as F

from raylt import tree
from raylt.core.training.features import features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.data.task import Shard
from raylt.errors import ConfigError
from raylt.methods.bpfed.method import BPFed, ScaledLinear, balance, smooth_labels, undecided
from raylt.ops.moments import unpack
from raylt.seeds import seed_for, seeded

# stage 2 as a whole


@pytest.mark.parametrize("lws", [True, False])
def test_folding_the_scale_into_the_weights_changes_no_logit(tiny_task, lws):  # T-BPF-9
    client = open_client(tiny_task)
    head = ScaledLinear(client.model.classifier, True, lws, False)
    with torch.no_grad():
        for p in (head.linear.weight, head.linear.bias, head.scale):
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(7))
    z = torch.randn(20, 64, generator=torch.Generator().manual_seed(8))
    by_hand = torch.stack([head.scale[c] * (z @ head.linear.weight[c] + head.linear.bias[c]) for c in range(4)], 1)
    client.receive(head.folded())
    assert torch.allclose(head(z), by_hand, atol=1e-4)
    assert torch.allclose(client.model.classifier(z), by_hand, atol=1e-4)


def test_stage_2_changes_nothing_but_the_clients_classifiers(tiny_task, tmp_path):  # T-BPF-8
    experiment, _ = run(tiny_task, tmp_path, until=2)
    before, stage_1 = fingerprint(experiment.server.model.state_dict()), private_states(experiment)
    experiment.step()
    stage_2 = private_states(experiment)
    assert fingerprint(experiment.server.model.state_dict()) == before
    assert experiment.server.state == {}
    assert set(stage_2) == {0, 1, 2, 3, 5}
    for id, state in stage_2.items():
        assert state["state"] == {}  # the features were dropped
        assert state["model"].keys() == {"classifier.weight", "classifier.bias"}
        assert fingerprint(state["model"]) != fingerprint(stage_1[id]["model"])
    assert len({fingerprint(state["model"]) for state in stage_2.values()}) == 5
    host = experiment.fleet._host
    sent = [*host.messages, *(reply for *_, reply in host.replies)]
    assert not any("classifier" in path for one in sent for path, _ in tree.leaves(one))


def test_clients_start_from_classifiers_of_their_own(tiny_task, tmp_path):
    for initial, different in [("own", 5), ("common", 1)]:
        experiment = make_experiment(configure(), tiny_task, tmp_path, BPFed(initial=initial))
        experiment.fleet.begin(0)
        experiment.method.start(experiment.server, experiment.fleet)
        states = private_states(experiment)
        assert len({fingerprint(state["model"]) for state in states.values()}) == different


def test_everything_off_is_fedper_then_fine_tuned_classifiers(tiny_task, tmp_path):  # T-BPF-10
    plain = BPFed(alpha=0, fa=False, loss="ce", lws=False)
    stage_1, _ = run(tiny_task, tmp_path, plain, until=2)
    heads = private_states(stage_1)
    experiment, reports = run(tiny_task, tmp_path, plain)
    model = experiment.server.model.eval()
    assert reports[-1].traffic.keys() == {"retrain"}
    for id, state in private_states(experiment).items():
        shard = tiny_task.shards[id]
        x = torch.from_numpy(((shard.x / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2)).float()
        with torch.no_grad():
            z = model.encoder(x)
        y = torch.from_numpy(shard.y)
        head = torch.nn.Linear(64, 4)
        head.load_state_dict({name.partition(".")[2]: value for name, value in heads[id]["model"].items()})
        optimiser = torch.optim.SGD(head.parameters(), 0.01, 0.9, weight_decay=5e-4)
        order = torch.Generator().manual_seed(seed_for(0, "retrain", 3, id))
        for _ in range(5):
            for rows in torch.randperm(len(z), generator=order).split(32):
                optimiser.zero_grad()
                F.cross_entropy(head(z[rows]), y[rows]).backward()
                optimiser.step()
        assert torch.allclose(head.weight, state["model"]["classifier.weight"], atol=1e-6)
        assert torch.allclose(head.bias, state["model"]["classifier.bias"], atol=1e-6)


def test_retraining_is_that_of_the_equations_written_out(tiny_task, tmp_path):
    method = BPFed()
    experiment, _ = run(tiny_task, tmp_path, method, until=2)
    before, model = private_states(experiment), experiment.server.model.eval()
    experiment.step()
    host, after = experiment.fleet._host, private_states(experiment)
    m_glo = unpack(next(m["covariance"] for m in host.messages if "covariance" in m), 64)
    for id in (0, 1, 2, 3):  # a client with all classes, without one class, with one class, and with one sample
        client = open_client(tiny_task, id)
        client.begin("retrain", 3)
        client.model.load_state_dict(model.state_dict())
        z, y = balance(*features(client), m_glo, client.order)
        start = before[id]["model"]
        weight, bias = (start[f"classifier.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
        scale = torch.ones(4, requires_grad=True)
        optimiser = torch.optim.SGD([weight, bias, scale], 0.01, 0.9, weight_decay=5e-4)
        order = torch.Generator().manual_seed(seed_for(0, "retrain", 3, id))
        for _ in range(5):
            for rows in torch.randperm(len(z), generator=order).split(32):
                optimiser.zero_grad()
                logits = scale * (z[rows] @ weight.T + bias)
                loss_of(method, logits, y[rows], client.counts).float().backward()
                optimiser.step()
        found = after[id]["model"]
        assert torch.allclose(found["classifier.weight"], scale[:, None] * weight, atol=1e-5), id
        assert torch.allclose(found["classifier.bias"], scale * bias, atol=1e-5), id


def test_all_clients_are_retrained_also_those_never_sampled(tiny_task, tmp_path):
    experiment, reports = run(tiny_task, tmp_path, federation={"participation": 0.3})
    host = experiment.fleet._host
    called = {
        name: {id for function, _, id, _ in host.replies if function == name}
        for name in ("train", "covariance", "retrain")
    }
    assert called["train"] < called["covariance"] == called["retrain"] == {0, 1, 2, 3, 5}
    assert not reports[-1].lost


def test_client_with_one_class_and_a_softmax_over_it_keeps_its_classifier(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, BPFed(softmax="owned"), until=2)
    before = private_states(experiment)
    experiment.step()
    after = private_states(experiment)
    same = {id for id in after if fingerprint(after[id]["model"]) == fingerprint(before[id]["model"])}
    assert same == {2, 3}  # the clients with one class and with one sample


def test_client_with_two_classes_and_a_softmax_over_them_retrains_its_classifier(tiny_task):
    shard = tiny_task.shards[0]
    rows = shard.y < 2
    task = replace(tiny_task, shards=(Shard(shard.x[rows], shard.y[rows]), *tiny_task.shards[1:]))
    method = BPFed(softmax="owned", fa=False, retrain_epochs=1)
    client = open_client(task, method=method)
    before = fingerprint(client.model.classifier.state_dict())
    method.retrain(client, {"model": tree.snapshot(method.shared(client.model))})
    assert fingerprint(client.model.classifier.state_dict()) != before


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields",
    [
        {"alpha": 0, "fa": False, "loss": "ce"},
        {"fa": False, "loss": "ce"},
        {"loss": "ce"},
        {"loss": "ls_all"},
        {},
        {"lws": False},
        {"crt": False},
        {"restart": True},
        {"mixup": "batch"},
        {"cov_weight": "n-1"},
        {"softmax": "owned"},
        {"argmax": "owned"},
        {"delta": 0, "gamma": 0},
        {"retrain_epochs": 0},
        {"alpha": 0.2},
    ],
    ids=str,
)
def test_variants_run_and_send_what_they_should(tiny_task, tmp_path, fields):
    experiment, reports = run(tiny_task, tmp_path, BPFed(**fields))
    assert reports[-1].phase == "finish"
    assert math.isfinite(reports[-1].figures["retrain_loss"])
    clients, traffic = len(experiment.fleet.ids), reports[-1].traffic
    encoder = tree.nbytes(experiment.method.shared(experiment.server.model))
    triangle = 4 * 64 * 65 // 2  # section 5.1: up the encoder and M_k, then down M_glo alone
    if experiment.method.fa:
        assert traffic == {
            "covariance": {"down": clients * encoder, "up": clients * (triangle + 8), "replies": clients},
            "retrain": {"down": clients * triangle, "up": clients * 32, "replies": clients},
        }
    else:
        assert traffic == {"retrain": {"down": clients * encoder, "up": clients * 32, "replies": clients}}
    assert reports[1].traffic == {
        "train": {"down": clients * encoder, "up": clients * (encoder + 8), "replies": clients}
    }


def test_only_what_is_switched_on_is_trained(tiny_task, tmp_path):
    ends = {}
    for name, fields in [("start", {"retrain_epochs": 0}), ("lws", {"crt": False}), ("crt", {"lws": False})]:
        experiment, _ = run(tiny_task, tmp_path, BPFed(**fields))
        ends[name] = private_states(experiment)[0]["model"]["classifier.weight"]
    ratio = ends["lws"] / ends["start"]  # a scale per class does not change the direction of its weights
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-3)
    assert not torch.allclose(ratio, torch.ones_like(ratio), rtol=1e-3)
    ratio = ends["crt"] / ends["start"]
    assert not torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-3)


def test_labels_that_do_not_favour_their_own_class_are_counted(finished):
    # clients own 4, 3, 1, 1 and 4 classes; with delta = 0.5 only a client with two classes can have such a label
    figures = finished[1][-1].figures
    assert (figures["undecided"], figures["halved_clients"], figures["blind_clients"]) == (0, 0, 0)
    owned = tensor([True, False, False, True])
    for counts, vague in (([6, 0, 0, 2], 1), ([5, 0, 0, 5], 2)):
        q = smooth_labels(tensor(counts), 0.5, 0.4)
        assert q[0].tolist() == [0.5, 0, 0, 0.5]
        assert undecided(q, owned) == vague
    assert undecided(smooth_labels(tensor([5, 0, 0, 5]), 0.49, 0.4), owned) == 0
    assert undecided(smooth_labels(tensor([0, 0, 0, 5]), 0.5, 0.4), tensor([False, False, False, True])) == 0


def test_reported_loss_of_the_retraining_is_the_clients_mean(finished):
    experiment, reports = finished
    losses = [reply["loss"] for name, *_, reply in experiment.fleet._host.replies if name == "retrain"]
    assert len(losses) == 5
    assert reports[-1].figures["retrain_loss"] == pytest.approx(sum(losses) / 5)


def test_reported_means_of_the_retraining_are_over_the_clients_that_replied(tiny_task, tmp_path):
    class Loses(Recorder):
        def run(self, fn, message, round, id, shard, private):
            if fn.__name__ == "retrain" and id == 2:
                raise OSError("out of reach")
            return super().run(fn, message, round, id, shard, private)

    config = configure(federation={"rounds": 1, "quorum": 0.5, "retries": 0})
    experiment = make_experiment(config, tiny_task, tmp_path, BPFed(delta=1.0, retrain_epochs=1), host=Loses)
    experiment.step()
    figures = experiment.step().figures
    replies = [reply for name, *_, reply in experiment.fleet._host.replies if name == "retrain"]
    assert len(replies) == 4
    assert figures["undecided"] == sum(reply["undecided"] for reply in replies) / 4 > 0
    assert figures["retrain_loss"] == pytest.approx(sum(reply["loss"] for reply in replies) / 4)


@pytest.mark.parametrize(
    ("fields", "figures"),
    [({}, (3 / 3, 2, 1)), ({"delta": 0.4}, (0, 0, 0)), ({"loss": "ce"}, (0, 0, 0)), ({"loss": "ls_all"}, (0, 0, 0))],
)
def test_clients_whose_smoothed_labels_tell_less_are_reported(tmp_path, fields, figures):
    # clients with two classes of equal size, two of different sizes, and three
    y = [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 3, 3, 3]]
    rng = np.random.default_rng(0)
    shards = tuple(Shard(rng.integers(0, 256, (len(own), 8, 8, 1), dtype=np.uint8), np.array(own)) for own in y)
    whole = make_task()
    counts = np.stack([np.bincount(own, minlength=4) for own in y])
    task = replace(whole, shards=shards, client_counts=counts)
    experiment = make_experiment(
        configure(data={"clients": 3}, federation={"rounds": 1}), task, tmp_path, BPFed(**fields)
    )
    experiment.step()
    reported = experiment.step().figures
    assert (reported["undecided"], reported["halved_clients"], reported["blind_clients"]) == pytest.approx(figures)


def test_client_with_two_classes_of_equal_size_is_driven_to_tell_nothing():
    # Eq. 18 with labels (1/2, 1/2): the margin between the classes shrinks, which grows without smoothing
    z = torch.cat(
        [
            torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) + 2,
            torch.randn(40, 8, generator=torch.Generator().manual_seed(1)) - 2,
        ]
    )
    y, far = torch.arange(2).repeat_interleave(40), {}
    for delta in (0.0, 0.4, 0.5):
        head = torch.nn.Linear(8, 2)
        with torch.no_grad():
            head.weight.copy_(torch.stack([torch.ones(8), -torch.ones(8)]) / 8)
            head.bias.zero_()
        q = smooth_labels(tensor([40, 40]), delta, 0.4)
        fit_classifier(head, z, q[y], epochs=60, batch=20, lr=0.1, momentum=0.9, weight_decay=0.0, seed=0)
        logits = head(z)
        far[delta] = (logits[:, 0] - logits[:, 1]).abs().mean().item()
    assert far[0.5] < 0.3 < far[0.4] < far[0.0]


def test_own_classifiers_are_those_of_the_clients_seed(tiny_task, tmp_path):
    experiment = make_experiment(configure(seed=4), tiny_task, tmp_path, BPFed())
    experiment.fleet.begin(0)
    experiment.method.start(experiment.server, experiment.fleet)
    with seeded(4, "join", 0, 5):
        expected = torch.nn.Linear(64, 4)
    assert torch.equal(private_states(experiment)[5]["model"]["classifier.weight"], expected.weight)


@pytest.mark.parametrize(
    ("fields", "key", "value"),
    [
        ({"softmax": "owned", "loss": "ls_all"}, "method.softmax", "owned"),
        ({"restart": True, "crt": False}, "method.restart", True),
    ],
    ids=str,
)
def test_fields_that_exclude_each_other_are_refused(tiny_task, fields, key, value):
    config = configure()
    model = make_setup(config, BPFed()).new_model(tiny_task.spec)
    with refused("config.conflict", ConfigError, key=key, value=value):
        BPFed(**fields).prepare(tiny_task, config, model)
    for name, one in fields.items():
        BPFed(**{name: one}).prepare(tiny_task, config, model)
