import math

import naive
import pytest
import torch
from killed import resume, run_and_kill
from rounds import run
from tiny import fingerprint, open_client
from torch.nn import functional as F

from raylt.data.augment import cutout
from raylt.data.image_policies import auto_augment
from raylt.methods.fedyoyo import FedYoYo, distillation, effective_fault, effective_samples, smoothed


def test_effective_samples_of_batches_worked_out_by_hand():
    # class 0: directions (1, 0) and (0, 1) with mean (1/2, 1/2), so 1 / (1/2) = 2; class 1: one sample; class 2:
    # opposite directions, 1e6
    centred = torch.tensor([[3.0, 0.0], [0.0, 0.2], [7.0, 7.0], [1.0, 2.0], [-2.0, -4.0]])
    made = effective_samples(centred, torch.tensor([0, 0, 1, 2, 2]), 4)
    assert made.tolist() == pytest.approx([2, 1, 1e6, 0])
    # two samples in the same direction count as one
    assert effective_samples(centred[:1].repeat(2, 1), torch.tensor([0, 0]), 1).item() == pytest.approx(1)


@pytest.mark.parametrize(("effective", "possible"), [([0.0, 3e6], True), ([3.01e6, 1.0], False), ([-1e-3, 1.0], False)])
def test_three_samples_are_at_most_three_batches_of_the_largest_estimate(effective, possible):
    assert (effective_fault(3, {"effective": torch.tensor(effective)}) is None) == possible


def test_estimates_are_steadied_from_round_to_round():
    first = smoothed(torch.tensor([4.0, 2e4, 8.0]), None)
    assert first.tolist() == [4, 6, 8]  # a value that is too large becomes the mean of the others
    # 0.9 * 4 + 0.1 * 14 = 5; 0.9 * 6 + 1e5 is too much, so 6 stays; 7.2 + 0.1
    assert smoothed(torch.tensor([14.0, 1e6, 1.0]), first).tolist() == pytest.approx([5, 6, 7.3])
    assert smoothed(torch.tensor([2e4, 3e4]), None).tolist() == [1, 1]


def test_an_estimate_may_leap_by_a_multiple_of_the_one_before():
    # 0.9 * 300 + 0.1 * 5000 = 770; 0.9 * 0.5 + 0.1 * 600 = 60.45 is more than a hundred times 0.5 away
    assert smoothed(torch.tensor([5000.0, 600.0]), torch.tensor([300.0, 0.5])).tolist() == pytest.approx([770, 0.5])


def test_only_what_the_weak_view_gets_right_teaches_and_nothing_moves_it():
    weak = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]], requires_grad=True)
    strong = torch.tensor([[0.0, 1.0], [5.0, 0.0], [0.5, 0.5]], requires_grad=True)
    y = torch.tensor([0, 0, 0])  # the second prediction is wrong
    expected = 0.0
    for i in (0, 2):
        p, q = (torch.tensor([math.exp(v / 2) for v in view[i].tolist()]) for view in (weak, strong))
        p, q = p / p.sum(), q / q.sum()
        expected += (p * (p / q).log()).sum().item() / 2
    loss = distillation(strong, teacher=weak, y=y, temperature=2.0)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert weak.grad is None
    assert strong.grad[1].tolist() == [0, 0]
    assert strong.grad[0].abs().min() > 0.01
    assert distillation(strong, teacher=weak, y=1 - weak.argmax(1), temperature=2.0).item() == 0


def effective_by_hand(model, x, y, order):
    """Compute the effective samples batch by batch and class by class, from the matrix of cosines."""
    z, n = naive.features(model, x).double(), [0.0] * 4
    for rows in torch.randperm(len(y), generator=order).split(naive.BATCH):
        for c in range(4):
            own = [z[i] - z[y == c].mean(0) for i in rows.tolist() if y[i] == c]
            cosines = [
                [(a @ b / (a.norm() * b.norm())).item() if a.norm() > 1e-6 < b.norm() else 0.0 for b in own]
                for a in own
            ]
            if own:
                n[c] += 1 if len(own) == 1 else 1 / max(sum(map(sum, cosines)) / len(own) ** 2, 1e-6)
    return n


@pytest.mark.parametrize("mixed", ["once", "each_step"])
def test_rounds_are_those_of_naive_code(tiny_task, tmp_path, mixed):
    """Compare the effective samples, the prior, both views in one batch, the two losses, and the weighted mean."""
    method = FedYoYo(kd=3.0, warm_up=3, temperature=2.0, tau=0.8, gamma=0.3, mixed=mixed)
    server = run(tiny_task, tmp_path, method, rounds=2).server
    model, effective = naive.new_model(tiny_task), None
    for t in (1, 2):
        now, ends, weights = [1.0] * 4, [], []
        for id in naive.clients_of(tiny_task):
            counted = effective_by_hand(
                model, *naive.client_data(tiny_task, id), naive.generator("order", "count", t, id)
            )
            now = [a + b for a, b in zip(now, counted, strict=True)]
        if effective is None:
            fair = [value for value in now if value <= 1e4]
            effective = [value if value <= 1e4 else sum(fair) / len(fair) for value in now]
        else:
            mixtures = [0.9 * a + 0.1 * b for a, b in zip(effective, now, strict=True)]
            effective = [a if abs(b - a) > 100 * a else b for a, b in zip(effective, mixtures, strict=True)]
        start = naive.entries(model)
        for id in naive.clients_of(tiny_task):
            local = naive.new_model(tiny_task)
            local.load_state_dict(start)
            (x, y), noise = naive.client_data(tiny_task, id), naive.generator("noise", "train", t, id)
            raw, own = torch.from_numpy(tiny_task.shards[id].x), torch.bincount(y, minlength=4) / len(y)
            prior = [0.7 * torch.tensor(effective) / sum(effective) + 0.3 * own]

            def loss(rows, local=local, x=x, y=y, noise=noise, raw=raw, own=own, prior=prior, t=t):
                strong, _ = cutout(*auto_augment(raw[rows], y[rows], noise), noise)
                logits = local(torch.cat([x[rows], naive.pixels(strong)])) + (prior[-1] ** 0.8 + 1e-9).log()
                if mixed == "each_step":
                    prior.append(0.7 * prior[-1] + 0.3 * own)
                weak, other = logits[: len(rows)].detach(), logits[len(rows) :]
                right = [i for i in range(len(rows)) if weak[i].argmax() == y[rows[i]]]
                value = F.cross_entropy(logits, torch.cat([y[rows], y[rows]]))
                for i in right:
                    p, q = (weak[i] / 2).softmax(0), (other[i] / 2).softmax(0)
                    value = value + 3.0 * t / 3 * (p * (p / q).log()).sum() / len(right)
                return value

            naive.train(local, naive.epochs_of(len(y), naive.generator("order", "train", t, id)), loss)
            ends.append(naive.entries(local))
            weights.append(len(y))
        model.load_state_dict(naive.average(ends, weights))
    assert server.state["effective"].tolist() == pytest.approx(effective, rel=1e-3)
    assert naive.differences(naive.entries(server.model), naive.entries(model), atol=1e-3) == {}


def test_clients_whose_counts_are_refused_do_not_train(tiny_task, tmp_path, monkeypatch):
    count = FedYoYo.count

    def refused_at_one(self, client, message):
        reply = count(self, client, message)
        return client.reply(effective=reply.tree["effective"] - 1e9) if client.id == 1 else reply

    monkeypatch.setattr(FedYoYo, "count", refused_at_one)
    stats = run(tiny_task, tmp_path, FedYoYo(), rounds=1, federation={"quorum": 0.5}).fleet.round_stats
    assert 1 in stats.rejected
    assert 1 not in stats.participants


def test_weight_of_the_distillation_grows_to_its_full_size(tiny_task):
    method = FedYoYo(kd=2.0, warm_up=4)
    client = open_client(tiny_task, method)
    message, batch, sizes = {"prior": torch.full((4,), 0.25)}, client.samples.batch(torch.arange(8)), []
    client.model.eval()
    for round in (1, 2, 4, 9):
        client.begin("train", round)
        client.noise.manual_seed(0)
        sizes.append(method.objective(client, message)._terms(batch)["distillation"].item())
    assert sizes[0] > 0
    assert [size / sizes[0] for size in sizes] == pytest.approx([1, 2, 4, 4])


def test_without_both_parts_it_is_plain_training_on_two_views(tiny_task):
    method = FedYoYo(kd=0, tau=0)
    client = open_client(tiny_task, method)
    client.model.eval()
    batch = client.samples.batch(torch.arange(8))
    strong, _ = cutout(
        *auto_augment(client.samples.x[:8], batch.y, noise := naive.generator("noise", "train", 1, 0)), noise
    )
    x = torch.cat([batch.x, naive.pixels(strong)])
    expected = F.cross_entropy(client.model(x), batch.y.repeat(2)).item()
    assert method.objective(client, {"prior": torch.rand(4)})(batch).item() == pytest.approx(expected, rel=1e-5)


def test_a_class_without_a_prior_has_a_billionth_whatever_the_strength(tiny_task):
    method = FedYoYo(kd=0, tau=0.1, gamma=1.0)
    client = open_client(tiny_task, method, 1)  # the client lacks class 3
    client.model.eval()
    batch, own = client.samples.batch(torch.arange(8)), client.counts / client.counts.sum()
    assert own[3] == 0
    noise = naive.generator("noise", "train", 1, 1)
    strong, _ = cutout(*auto_augment(client.samples.x[:8], batch.y, noise), noise)
    logits = client.model(torch.cat([batch.x, naive.pixels(strong)])) + (own**0.1 + 1e-9).log()
    expected = F.cross_entropy(logits, batch.y.repeat(2)).item()
    made = method.objective(client, {"prior": torch.full((4,), 0.25)})(batch).item()
    assert made == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.soak
def test_killed_between_its_two_questions_and_resumed_it_ends_the_same(tmp_path):
    run_and_kill(
        tmp_path,
        ["method=fedyoyo", "federation.rounds=2", "local.epochs=1", "data.clients=3"],
        "raylt.methods.fedyoyo",
        "smoothed",
        2,
    )
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 1
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]


@pytest.mark.parametrize(
    "field",
    [{"kd": 1.0}, {"warm_up": 5}, {"temperature": 3.0}, {"tau": 0.5}, {"gamma": 0.8}, {"mixed": "each_step"}],
    ids=str,
)
def test_every_field_changes_the_model(tiny_task, tmp_path, field):
    base = {"warm_up": 1, "gamma": 0.3}
    plain, other = (
        fingerprint(run(tiny_task, tmp_path, FedYoYo(**base | fields), rounds=1).server.model.state_dict())
        for fields in ({}, field)
    )
    assert plain != other
