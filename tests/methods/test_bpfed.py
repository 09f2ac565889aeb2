import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from killed import resume, run_and_kill
from tiny import Recorder, configure, fingerprint, make_experiment, private_states
from torch import tensor
from torch.nn import functional as F

from raylt import tree
from raylt.core import checkpoint
from raylt.core.client import Client
from raylt.core.features import features
from raylt.core.optimisers import SGD
from raylt.core.training import sgd
from raylt.errors import TooFewReplies
from raylt.methods.bpfed.method import BPFed, ScaledLinear, balance, mix
from raylt.methods.bpfed.smoothing import smooth_labels
from raylt.ops.moments import class_scatter, perturb, unpack
from raylt.seeds import seed_for, seeded

COUNTS = tensor([8, 0, 4, 2])
GENERATOR = torch.Generator().manual_seed(0)


def features_of(counts, dim=5, seed=0):
    """Features of the given class sizes, shuffled, the classes apart from each other."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.as_tensor(counts))
    y = y[torch.randperm(len(y), generator=generator)]
    return torch.randn(len(y), dim, generator=generator) + 3 * y[:, None], y


def loss_of(method: BPFed, logits, y, counts):
    """Eq. 18-20 written out, sample by sample, with the branches of the paper's text."""
    owned = [c for c in range(len(counts)) if counts[c] > 0]
    total = 0.0
    for row, c in zip(logits.double(), y.tolist(), strict=True):
        g = 0.0 if method.loss == "ce" else method.delta * (counts[c].item() / counts.max().item()) ** method.gamma
        others = [j for j in (range(len(counts)) if method.loss == "ls_all" else owned) if j != c]
        g = g if others else 0.0
        over = owned if method.softmax == "owned" else range(len(counts))
        log_p = {j: row[j] - torch.logsumexp(row[list(over)], 0) for j in over}
        total -= (1 - g) * log_p[c] + sum(g / len(others) * log_p[j] for j in others)
    return total / len(y)


def retrained_loss(method: BPFed, logits, y, counts):
    """What `retrain` minimises: found by catching what it gives to the optimiser."""
    labels = smooth_labels(counts, 0.0 if method.loss == "ce" else method.delta, method.gamma, method.loss == "ls_all")
    classes = counts > 0 if method.softmax == "owned" else torch.ones_like(counts, dtype=torch.bool)
    return F.cross_entropy(logits[:, classes], labels[y][:, classes])


def open_client(task, id=0, method=None, **parts) -> Client:
    return tiny.open_client(task, method or BPFed(), id, configure(**parts))


def run(task, folder, method=None, until=None, **parts):
    experiment = make_experiment(configure(**parts), task, folder, method or BPFed(), host=Recorder)
    reports = []
    while not experiment.done and len(reports) != until:
        reports.append(experiment.step())
    return experiment, reports


@pytest.fixture(scope="module")
def finished(tiny_task, tmp_path_factory):
    return run(tiny_task, tmp_path_factory.mktemp("bpfed"))


# labels and loss, Eq. 18-20

@pytest.mark.parametrize("softmax", ["all", "owned"])
def test_without_smoothing_the_loss_is_cross_entropy(softmax):                                       # T-BPF-1
    y = tensor([0, 0, 2, 3, 2])
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    loss = retrained_loss(BPFed(delta=0, softmax=softmax), logits, y, COUNTS)
    owned = tensor([0, 2, 3])
    places = tensor([0, -1, 1, 2])
    expected = F.cross_entropy(logits, y) if softmax == "all" else F.cross_entropy(logits[:, owned], places[y])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_labels_by_hand():
    # n = 8, 0, 4, 2; delta 0.5, gamma 0.5: g = 0.5, -, 0.5 sqrt(1/2), 0.5 sqrt(1/4); two others each
    half = 0.5 * math.sqrt(0.5)
    expected = tensor([[0.5, 0, 0.25, 0.25], [0, 0, 0, 0], [half / 2, 0, 1 - half, half / 2],
                       [0.125, 0, 0.125, 0.75]])
    assert torch.allclose(smooth_labels(COUNTS, 0.5, 0.5), expected)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("counts", [[8, 0, 4, 2], [5, 5, 5, 5], [0, 7, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0], [9]], ids=str)
def test_labels_sum_to_one_and_are_finite(counts, everywhere):                                       # T-BPF-2
    counts = tensor(counts)
    q = smooth_labels(counts, 0.5, 0.4, everywhere)
    assert torch.allclose(q.sum(1), (counts > 0).float())
    assert torch.isfinite(q).all()
    assert (q >= 0).all()
    if not everywhere:
        assert (q[:, counts == 0] == 0).all()
    if (counts > 0).sum() == 1 and not everywhere:
        assert q.sum() == q.diagonal().sum() == 1


@pytest.mark.parametrize("fields", [{}, {"delta": 0.3, "gamma": 2.0}, {"loss": "ls_all"}, {"loss": "ce"},
                                    {"softmax": "owned"}], ids=str)
def test_loss_is_that_of_equations_18_to_20(fields):
    y = tensor([0, 2, 3, 0, 0])
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    method = BPFed(**fields)
    assert retrained_loss(method, logits, y, COUNTS).item() == pytest.approx(
        float(loss_of(method, logits, y, COUNTS)), rel=1e-5)


@pytest.mark.parametrize("softmax", ["all", "owned"])
def test_logits_of_missing_classes_are_pushed_down_or_left_alone(softmax):                           # T-BPF-11
    y = tensor([0, 2, 3, 0])
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), requires_grad=True)
    (grad,) = torch.autograd.grad(retrained_loss(BPFed(softmax=softmax), logits, y, COUNTS), logits)
    missing = grad[:, 1]
    assert (missing > 0).all() if softmax == "all" else (missing == 0).all()
    assert torch.allclose(missing, (logits.softmax(1)[:, 1] / 4).detach()) == (softmax == "all")


def test_smoothing_over_all_classes_takes_a_softmax_over_all(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, BPFed(loss="ls_all", softmax=softmax))[0] for softmax in ("all", "owned")]
    first, second = ({id: fingerprint(state) for id, state in private_states(e).items()} for e in ends)
    assert first == second


# covariance and augmentation, Eq. 12-17

@pytest.mark.parametrize("weight", ["n", "n-1"])
def test_covariance_of_one_client_is_the_weighted_mean_of_its_classes(weight):                       # T-BPF-3
    z, y = features_of([9, 1, 5])                                   # a class of one sample counts as zero
    scatter, total = class_scatter(z, y, weight)
    expected = np.zeros((5, 5))
    for c, n in [(0, 9), (2, 5)]:
        expected += (n if weight == "n" else n - 1) * np.cov(z[y == c].double().numpy().T)
    assert total == (15 if weight == "n" else 12)
    assert np.allclose(scatter / total, expected / total)


def test_global_covariance_leaves_out_what_differs_between_the_means_of_clients():                   # T-BPF-3
    def pooled(parts):
        z = torch.cat([z - z.mean(0) for z in parts]).double()
        return z.T @ z / (len(z) - len(parts))

    first, second = (features_of([12], seed=s)[0] for s in (1, 2))
    second = second - second.mean(0) + first.mean(0)
    for shift, equal in [(0.0, True), (2.0, False)]:
        parts = [first, second + shift]
        sums = [class_scatter(z, torch.zeros(12, dtype=torch.int64), "n-1") for z in parts]
        ours = sum(s for s, _ in sums) / sum(n for _, n in sums)
        assert torch.allclose(ours, pooled(parts))                  # within client: always
        together = torch.cov(torch.cat(parts).double().T, correction=2)
        assert torch.allclose(ours, together) == equal              # of the class over both: only with equal means


@pytest.mark.parametrize("weight", ["n", "n-1"])
def test_what_clients_send_adds_up_to_the_global_covariance(tiny_task, tmp_path, weight):            # Eq. 16
    experiment, _ = run(tiny_task, tmp_path, BPFed(cov_weight=weight))
    host, model = experiment.fleet._host, experiment.server.model.eval()
    m_glo = next(unpack(m["covariance"], 64) for m in host.messages if "covariance" in m).double().numpy()
    top, bottom = np.zeros((64, 64)), 0
    for shard in tiny_task.shards:
        x = torch.from_numpy(((shard.x / 255 - 0.5) / 0.25).transpose(0, 3, 1, 2)).float()
        with torch.no_grad():
            z = model.encoder(x).double().numpy() if len(x) else np.zeros((0, 64))
        for c in range(4):
            own = z[shard.y == c]
            n = len(own) if weight == "n" else max(len(own) - 1, 0)
            top += n * np.cov(own.T) if len(own) > 1 else 0
            bottom += n
    assert np.allclose(m_glo, top / bottom, atol=1e-6 * np.abs(m_glo).max())
    replies = [reply for name, *_, reply in host.replies if name == "covariance"]
    assert all(reply.keys() == {"scatter", "n"} for reply in replies)
    assert {reply["scatter"].shape for reply in replies} == {(64 * 65 // 2,)}


def test_classes_of_equal_size_are_left_as_they_are():                                               # T-BPF-4
    z, y = features_of([4, 4, 4])
    same, labels = balance(z, y, torch.eye(5), GENERATOR)
    assert torch.equal(same, z)
    assert torch.equal(labels, y)


@pytest.mark.parametrize("counts", [[9, 4, 1], [9, 0, 2], [0, 6, 0], [1]], ids=str)
def test_balanced_set_brings_every_owned_class_to_the_size_of_the_largest(counts):                   # T-BPF-5
    z, y = features_of(counts)
    covariance = 1e-4 * torch.eye(5)
    more, labels = balance(z, y, covariance, torch.Generator().manual_seed(0))
    assert torch.bincount(labels, minlength=len(counts)).tolist() == [max(counts) if n else 0 for n in counts]
    assert torch.equal(more[:len(z)], z)
    assert torch.equal(labels[:len(z)], y)
    for c, n in enumerate(counts):
        own, copies = z[y == c], more[len(z):][labels[len(z):] == c]
        if not len(copies):
            continue
        # perturbations are hundreds of times smaller than what lies between two originals: each copy has one base
        distance, base = torch.cdist(copies, own).min(1)
        assert (distance > 0).all()
        used = torch.bincount(base, minlength=n)
        assert used.max() - used.min() <= 1
        assert (distance < 0.1).all()


@pytest.mark.parametrize("rank", [6, 2, 0])
def test_perturbations_have_the_covariance_asked_for(rank):                                          # T-BPF-6
    root = torch.randn(6, rank, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    covariance = root @ root.T
    n = 200_000
    eps = perturb(covariance.float(), n, torch.Generator().manual_seed(0))
    # the standard error of an entry of a covariance is below sqrt(2) * the largest variance / sqrt(n)
    bound = 5 * math.sqrt(2 / n) * max(covariance.diagonal().max().item(), 1e-9)
    assert (torch.cov(eps.T) - covariance).abs().max() < max(bound, 1e-6)
    assert (eps.mean(0).abs() < max(5 * math.sqrt(covariance.diagonal().max().item() / n), 1e-3)).all()
    if rank < 6:                                    # nothing leaves the subspace, but what float32 left of it
        outside = torch.linalg.svd(root, full_matrices=True).U[:, rank:] if rank else torch.eye(6, dtype=torch.float64)
        assert (eps @ outside).abs().max() < 5e-3


# Mixup, Eq. 7 and 8

def test_mixed_batches_are_those_of_equations_7_and_8(tiny_task):
    client = open_client(tiny_task)
    rng = np.random.default_rng(seed_for(0, "mixup", 1, 0))
    i, j = rng.integers(24, size=(2, 24))
    lam = rng.beta(1.0, 1.0, 24)
    shard = tiny_task.shards[0]
    x = (shard.x / 255 - 0.5) / 0.25
    batches, seen = list(BPFed().mixed(client)), []
    assert [len(batch.y) for batch in batches] == [8, 8, 8] * 2
    order = torch.Generator().manual_seed(seed_for(0, "order", "train", 1, 0))
    for epoch in range(2):                          # the same triples in every epoch, in another order
        for rows, batch in zip(torch.randperm(24, generator=order).split(8), batches[3 * epoch:][:3], strict=True):
            for place, row in enumerate(rows.tolist()):
                image = lam[row] * x[i[row]] + (1 - lam[row]) * x[j[row]]
                label = lam[row] * np.eye(4)[shard.y[i[row]]] + (1 - lam[row]) * np.eye(4)[shard.y[j[row]]]
                assert np.allclose(batch.x[place].permute(1, 2, 0).numpy(), image, atol=1e-5)
                assert np.allclose(batch.y[place].numpy(), label, atol=1e-6)
                seen.append(row)
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24))
    assert seen[:24] != seen[24:]


def test_triples_are_fresh_in_every_round_and_for_every_client(tiny_task):
    def labels(round, id=0):
        client = open_client(tiny_task)
        client.id = id
        client.begin("train", round)
        return torch.cat([batch.y for batch in BPFed().mixed(client)][:3]).sort(0).values

    assert torch.equal(labels(1), labels(1))
    assert not torch.equal(labels(1), labels(2))
    assert not torch.equal(labels(1), labels(1, id=5))


def test_images_of_a_pair_are_augmented_each_by_itself(tiny_task):
    config = {"augment": "crop_flip"}
    client = open_client(tiny_task, **config)
    client.batch = lambda rows: calls.append(rows) or plain(rows)       # type: ignore[method-assign]
    plain, calls = Client.batch.__get__(client), []
    batches = list(BPFed().mixed(client))
    assert len(calls) == 2 * len(batches)           # two draws of crops and flips per batch, one for each side


def test_pairs_of_equal_images_keep_them_and_mixed_labels_give_the_mixed_loss(tiny_task):
    client = open_client(tiny_task)
    batch = client.samples.batch(torch.arange(8))
    lam = torch.rand(8, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(mix(batch, batch, lam, 4).x, batch.x, atol=1e-6)
    other = client.samples.batch(torch.arange(8, 16))
    mixed = mix(batch, other, lam, 4)
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    each = [F.cross_entropy(logits, b.y, reduction="none") for b in (batch, other)]
    assert F.cross_entropy(logits, mixed.y).item() == pytest.approx(
        (lam * each[0] + (1 - lam) * each[1]).mean().item(), rel=1e-5)


def test_lambda_of_one_is_plain_training_on_the_first_of_each_pair(tiny_task, monkeypatch):          # T-BPF-7
    class Ones(np.random.Generator):
        def beta(self, a, b, size=None):
            return np.ones(size) if size else 1.0

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Ones(np.random.PCG64(seed)))
    first = np.random.default_rng(seed_for(0, "mixup", 1, 0)).integers(24, size=(2, 24))[0]
    ours, plain = open_client(tiny_task), open_client(tiny_task)
    sgd(ours, BPFed().objective(ours, {}), batches=BPFed().mixed(ours))
    plain.model.train()
    optimiser = SGD(plain.model.parameters(), 0.05, 0.9)
    for rows in plain.rows(2, 8):
        batch = plain.samples.batch(torch.from_numpy(first)[rows])
        optimiser.step(F.cross_entropy(plain.model(batch.x), batch.y))
    for (name, a), b in zip(ours.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name


def test_one_lambda_per_batch_mixes_a_batch_with_itself(tiny_task):
    client = open_client(tiny_task)
    for batch in BPFed(mixup="batch").mixed(client):
        # with one lambda and a permutation, the labels add up to what the batch's own labels add up to
        own = torch.bincount(client.samples.y[batch.rows], minlength=4).float()
        assert torch.allclose(batch.y.sum(0), own, atol=1e-5)
        assert len(set(batch.y[batch.y > 0].mul(1e4).round().tolist())) <= 3        # lambda, 1 - lambda, 1


def test_sgd_takes_other_batches_and_counts_their_samples(tiny_task):
    client = open_client(tiny_task)
    batches = list(client.batches(1, 8))[:2]
    losses = []
    mean = sgd(client, lambda batch: losses.append(client.model(batch.x).square().mean()) or losses[-1],
               batches=batches)
    assert len(losses) == 2
    assert mean == pytest.approx(sum(loss.item() for loss in losses) / 2)


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


def test_choice_among_owned_classes_never_names_another(tiny_task):
    client = open_client(tiny_task, 1)              # lacks class 3
    for argmax, possible in [("all", {0, 1, 2, 3}), ("owned", {0, 1, 2})]:
        model = BPFed(argmax=argmax).client_model(client).eval()
        with torch.no_grad():
            client.model.classifier.bias[3] = 100
            found = set(model(torch.randn(50, 1, 8, 8)).argmax(1).tolist())
        assert found <= possible
        assert (3 in found) == (argmax == "all")


def test_client_without_features_says_which_call_it_missed(tiny_task):
    client = open_client(tiny_task)
    with pytest.raises(RuntimeError, match=r"did not take part in BPFed.covariance"):
        BPFed().retrain(client, {"covariance": torch.zeros(64 * 65 // 2)})


def test_finish_that_broke_off_between_its_halves_is_repeated_to_the_same_bits(finished, tiny_task, tmp_path):
    class Breaks(Recorder):
        def run(self, fn, message, round, id, shard, private):
            if fn.__name__ == "retrain" and id == 2:
                raise OSError("the machine goes down")
            return super().run(fn, message, round, id, shard, private)

    method = BPFed()
    experiment = make_experiment(configure(federation={"quorum": 1.0}), tiny_task, tmp_path, method, host=Breaks)
    for _ in range(2):
        experiment.save(experiment.step())
    with pytest.raises(TooFewReplies, match="retrain: 4 of 5"):
        experiment.step()
    assert "covariance" in {name for name, *_ in experiment.fleet._host.replies}
    again = make_experiment(configure(federation={"quorum": 1.0}), tiny_task, tmp_path, method)
    saved, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert saved is not None
    again.load(saved)
    again.step()
    straight, repeated = private_states(finished[0]), private_states(again)
    assert fingerprint(again.server.model.state_dict()) == fingerprint(finished[0].server.model.state_dict())
    assert {id: fingerprint(state) for id, state in repeated.items()} == {
        id: fingerprint(state) for id, state in straight.items()}


@pytest.mark.slow
def test_killed_during_retraining_and_resumed_it_ends_with_the_same_classifiers(tmp_path):
    settings = ["method=bpfed", "federation.rounds=2", "local.epochs=1", "data.clients=4", "method.epochs=300"]

    def classifiers(folder: Path) -> dict[str, str]:
        saved, _ = checkpoint.latest(folder / "checkpoints")
        assert saved is not None
        assert saved.facts["step"] == 3
        return {part: fingerprint(saved.read(part)) for part in saved.parts if part.startswith("client-")}

    run_and_kill(tmp_path, settings, 0.5)               # covariances take a few milliseconds, re-training seconds
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]
    assert straight["accuracy"] == killed["accuracy"]
    assert len(classifiers(tmp_path / "straight")) == 4
    assert classifiers(tmp_path / "straight") == classifiers(tmp_path / "killed")


def test_own_classifiers_are_those_of_the_clients_seed(tiny_task, tmp_path):
    experiment = make_experiment(configure(seed=4), tiny_task, tmp_path, BPFed())
    experiment.fleet.begin(0)
    experiment.method.start(experiment.server, experiment.fleet)
    with seeded(4, "join", 0, 5):
        expected = torch.nn.Linear(64, 4)
    assert torch.equal(private_states(experiment)[5]["model"]["classifier.weight"], expected.weight)
