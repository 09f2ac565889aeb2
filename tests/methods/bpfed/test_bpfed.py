import math

import pytest
import torch
from bpfed_runs import loss_of, open_client, run
from tiny import configure, fingerprint, make_experiment, private_states
from torch import tensor
from torch.nn import functional as F

from raylt import tree
from raylt.core.features import features
from raylt.methods.bpfed.method import BPFed, ScaledLinear, balance
from raylt.methods.bpfed.smoothing import smooth_labels
from raylt.ops.moments import unpack
from raylt.seeds import seed_for, seeded

# stage 2 as a whole

@pytest.mark.parametrize("lws", [True, False])
def test_folding_the_scale_into_the_weights_changes_no_logit(tiny_task, lws):                        # T-BPF-9
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


def test_stage_2_changes_nothing_but_the_clients_classifiers(tiny_task, tmp_path):                   # T-BPF-8
    experiment, _ = run(tiny_task, tmp_path, until=2)
    before, stage_1 = fingerprint(experiment.server.model.state_dict()), private_states(experiment)
    experiment.step()
    stage_2 = private_states(experiment)
    assert fingerprint(experiment.server.model.state_dict()) == before
    assert experiment.server.state == {}
    assert set(stage_2) == {0, 1, 2, 3, 5}
    for id, state in stage_2.items():
        assert state["state"] == {}                                 # the features are gone
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


def test_everything_off_is_fedper_then_fine_tuned_classifiers(tiny_task, tmp_path):                  # T-BPF-10
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
    for id in (0, 1, 2, 3):                         # all classes, one missing, one class, one sample
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
    called = {name: {id for function, _, id, _ in host.replies if function == name} for name in
              ("train", "covariance", "retrain")}
    assert called["train"] < called["covariance"] == called["retrain"] == {0, 1, 2, 3, 5}
    assert not reports[-1].lost


def test_client_with_one_class_and_a_softmax_over_it_keeps_its_classifier(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, BPFed(softmax="owned"), until=2)
    before = private_states(experiment)
    experiment.step()
    after = private_states(experiment)
    same = {id for id in after if fingerprint(after[id]["model"]) == fingerprint(before[id]["model"])}
    assert same == {2, 3}                           # one class; one sample


@pytest.mark.parametrize("fields", [
    {"alpha": 0, "fa": False, "loss": "ce"}, {"fa": False, "loss": "ce"}, {"loss": "ce"}, {"loss": "ls_all"}, {},
    {"lws": False}, {"crt": False}, {"restart": True}, {"mixup": "batch"}, {"cov_weight": "n-1"}, {"softmax": "owned"},
    {"argmax": "owned"}, {"delta": 0, "gamma": 0}, {"epochs": 0}, {"alpha": 0.2}], ids=str)
def test_variants_run_and_send_what_they_should(tiny_task, tmp_path, fields):
    experiment, reports = run(tiny_task, tmp_path, BPFed(**fields))
    assert reports[-1].phase == "finish"
    assert math.isfinite(reports[-1].figures["retrain_loss"])
    clients, traffic = len(experiment.fleet.ids), reports[-1].traffic
    encoder = tree.nbytes(experiment.method.shared(experiment.server.model))
    triangle = 4 * 64 * 65 // 2                     # 5.1: the encoder and M_k, then M_glo alone
    if experiment.method.fa:
        assert traffic == {
            "covariance": {"down": clients * encoder, "up": clients * (triangle + 8), "replies": clients},
            "retrain": {"down": clients * triangle, "up": clients * 16, "replies": clients}}
    else:
        assert traffic == {"retrain": {"down": clients * encoder, "up": clients * 16, "replies": clients}}
    assert reports[1].traffic == {
        "train": {"down": clients * encoder, "up": clients * (encoder + 8), "replies": clients}}


def test_only_what_is_switched_on_is_trained(tiny_task, tmp_path):
    ends = {}
    for name, fields in [("start", {"epochs": 0}), ("lws", {"crt": False}), ("crt", {"lws": False})]:
        experiment, _ = run(tiny_task, tmp_path, BPFed(**fields))
        ends[name] = private_states(experiment)[0]["model"]["classifier.weight"]
    ratio = ends["lws"] / ends["start"]             # a scale per class turns no direction
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-3)
    assert not torch.allclose(ratio, torch.ones_like(ratio), rtol=1e-3)
    ratio = ends["crt"] / ends["start"]
    assert not torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-3)


def test_labels_that_do_not_favour_their_own_class_are_counted(finished):
    # owned classes 4, 3, 1, 1 and 4 with delta = 0.5: only a client with two classes has such a label
    assert finished[1][-1].figures["undecided"] == 0
    q = smooth_labels(tensor([6, 0, 0, 2]), 0.5, 0.4)
    assert q[0].tolist() == [0.5, 0, 0, 0.5]


def test_own_classifiers_are_those_of_the_clients_seed(tiny_task, tmp_path):
    experiment = make_experiment(configure(seed=4), tiny_task, tmp_path, BPFed())
    experiment.fleet.begin(0)
    experiment.method.start(experiment.server, experiment.fleet)
    with seeded(4, "join", 0, 5):
        expected = torch.nn.Linear(64, 4)
    assert torch.equal(private_states(experiment)[5]["model"]["classifier.weight"], expected.weight)
