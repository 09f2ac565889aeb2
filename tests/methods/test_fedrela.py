import math

import naive
import pytest
import torch
from refusals import refused
from rounds import run
from tiny import configure, fingerprint, make_experiment, private_states
from torch.nn import functional as F

from raylt.errors import ConfigError
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedrela import FedReLa, relabel


def by_hand(p, y, counts, share, generator):
    """Compute the labels sample by sample and class by class."""
    n, c = p.shape
    s = [
        [
            (p[i, j].item() - p[y == y[i], j].mean().item()) / max(p[y == y[i], j].std(correction=0).item(), 1e-6)
            for j in range(c)
        ]
        for i in range(n)
    ]
    thresholds = [sorted((row[j] for row in s), reverse=True)[int(share * n)] for j in range(c)]
    least, most = min(counts), max(counts)
    rarity = [1 - (k - least) / (most - least) for k in counts]
    draws, labels = torch.rand(n, c, generator=generator), []
    for i in range(n):
        chances = [math.tanh(s[i][j] - thresholds[j]) * max(rarity[j] - rarity[y[i]], 0) for j in range(c)]
        flips = [j for j in range(c) if chances[j] > draws[i, j]]
        labels.append(max(flips, key=lambda j: chances[j]) if flips else int(y[i]))
    return labels


@pytest.mark.parametrize("counts", [[30, 20, 8, 2], [6, 4, 3, 2]], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_labels_are_those_of_the_formula_written_out(seed, counts):
    """In some draws several classes would take a sample; small classes show how deviations are computed."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(4).repeat_interleave(torch.tensor(counts))
    p = (3 * torch.randn(len(y), 4, generator=generator)).softmax(1)
    made = relabel(p, y, torch.tensor(counts), 0.5, torch.Generator().manual_seed(seed))
    assert made.tolist() == by_hand(p, y, counts, 0.5, torch.Generator().manual_seed(seed))
    moved = made != y
    assert moved.any()
    assert (made[moved] > y[moved]).all()  # classes are sorted by size, so labels move to rarer classes only


def test_clients_whose_classes_are_alike_change_nothing():
    p = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).softmax(1)
    y = torch.arange(20) % 2
    assert relabel(p, y, torch.tensor([10, 10]), 0.5, torch.Generator()).tolist() == y.tolist()
    assert relabel(p[:1], y[:1], torch.tensor([1, 0]), 0.5, torch.Generator()).shape == (1,)


def test_until_its_start_it_is_fedavg_to_the_bit(tiny_task, tmp_path):
    averaged, ours = (run(tiny_task, tmp_path, method) for method in (FedAvg(), FedReLa(after=1.0)))
    assert fingerprint(ours.server.model.state_dict()) == fingerprint(averaged.server.model.state_dict())
    assert not any(state["state"] for state in private_states(ours).values())


def test_first_late_round_is_that_of_naive_code(tiny_task, tmp_path):
    """Compare the labels from the received model's predictions, then local training on them."""
    experiment = run(tiny_task, tmp_path, FedReLa(after=0.0, share=0.3), rounds=1)
    own, ends, weights, changed = private_states(experiment), [], [], 0
    for id in naive.clients_of(tiny_task):
        model, (x, y) = naive.new_model(tiny_task), naive.client_data(tiny_task, id)
        call = naive.generator("order", "train", 1, id)
        with torch.no_grad():
            p = model.classifier(naive.features(model, x)).softmax(1)
        labels = torch.tensor(by_hand(p, y, torch.bincount(y, minlength=4).tolist(), 0.3, call))
        assert own[id]["state"]["labels"].tolist() == labels.tolist()
        changed += int((labels != y).sum())
        naive.train(
            model,
            naive.epochs_of(len(y), call),
            lambda rows, model=model, x=x, y=labels: F.cross_entropy(model(x[rows]), y[rows]),
            0.1 * naive.LR,
        )
        ends.append(naive.entries(model))
        weights.append(len(y))
    assert changed > 3
    assert naive.differences(naive.entries(experiment.server.model), naive.average(ends, weights)) == {}


@pytest.mark.parametrize("after", [0.0, 0.1, 0.29, 0.5, 0.9, 1.0])
def test_stage_begins_before_the_first_round_that_relabels(after):
    for rounds in (1, 2, 7, 10, 100):
        late = [round for round in range(1, rounds + 1) if round > after * rounds]
        assert FedReLa(after=after).stages(rounds)["relabelling"] == (late[0] - 1 if late else rounds)


def test_last_round_must_be_certain(tiny_task, tmp_path):
    """With federation.patience, training may stop before any client re-labels: the model would be FedAvg's."""
    config = configure(federation={"patience": 2, "rounds": 20}, data={"validation": 0.1})
    with refused("config.conflict", ConfigError, key="federation.patience", excludes="method") as caught:
        make_experiment(config, tiny_task, tmp_path, FedReLa())
    assert "relabelling" in str(caught.value)


def test_labels_are_drawn_once(tiny_task, tmp_path):
    early, late = (
        private_states(run(tiny_task, tmp_path, FedReLa(after=0.0, share=0.3), rounds=rounds)) for rounds in (1, 3)
    )
    for id in early:
        assert torch.equal(early[id]["state"]["labels"], late[id]["state"]["labels"])


@pytest.mark.parametrize("field", [{"share": 0.1}, {"after": 0.9}], ids=str)
def test_every_field_changes_the_model(tiny_task, tmp_path, field):
    base = {"after": 0.3, "share": 0.5}
    plain, other = (
        fingerprint(run(tiny_task, tmp_path, FedReLa(**base | fields), rounds=3).server.model.state_dict())
        for fields in ({}, field)
    )
    assert plain != other
