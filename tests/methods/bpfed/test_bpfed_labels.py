import math

import pytest
import torch
from bpfed_runs import COUNTS, loss_of, open_client, retrained_loss
from torch import tensor
from torch.nn import functional as F

from raylt.methods.bpfed.method import BPFed, smooth_labels, undecided

# labels and loss, Eq. 18-20


@pytest.mark.parametrize("softmax", ["all", "owned"])
def test_without_smoothing_the_loss_is_cross_entropy(softmax):  # T-BPF-1
    y = tensor([0, 0, 2, 3, 2])
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    loss = retrained_loss(BPFed(delta=0, softmax=softmax), logits, y, COUNTS)
    owned = tensor([0, 2, 3])
    places = tensor([0, -1, 1, 2])
    expected = F.cross_entropy(logits, y) if softmax == "all" else F.cross_entropy(logits[:, owned], places[y])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_labels_by_hand():
    # n = 8, 0, 4, 2; delta 0.5, gamma 0.5: g = 0.5, -, 0.5 sqrt(1/2), 0.5 sqrt(1/4); each class has two others
    half = 0.5 * math.sqrt(0.5)
    expected = tensor([[0.5, 0, 0.25, 0.25], [0, 0, 0, 0], [half / 2, 0, 1 - half, half / 2], [0.125, 0, 0.125, 0.75]])
    assert torch.allclose(smooth_labels(COUNTS, 0.5, 0.5), expected)


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("counts", [[8, 0, 4, 2], [5, 5, 5, 5], [0, 7, 0, 0], [1, 0, 0, 1], [1, 0, 0, 0], [9]], ids=str)
def test_labels_sum_to_one_and_are_finite(counts, everywhere):  # T-BPF-2
    counts = tensor(counts)
    q = smooth_labels(counts, 0.5, 0.4, everywhere)
    assert torch.allclose(q.sum(1), (counts > 0).float())
    assert torch.isfinite(q).all()
    assert (q >= 0).all()
    if not everywhere:
        assert (q[:, counts == 0] == 0).all()
    if (counts > 0).sum() == 1 and not everywhere:
        assert q.sum() == q.diagonal().sum() == 1


@pytest.mark.parametrize(
    "fields", [{}, {"delta": 0.3, "gamma": 2.0}, {"loss": "ls_all"}, {"loss": "ce"}, {"softmax": "owned"}], ids=str
)
def test_loss_is_that_of_equations_18_to_20(fields):
    y = tensor([0, 2, 3, 0, 0])
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    method = BPFed(**fields)
    assert retrained_loss(method, logits, y, COUNTS).item() == pytest.approx(
        float(loss_of(method, logits, y, COUNTS)), rel=1e-5
    )


@pytest.mark.parametrize("softmax", ["all", "owned"])
def test_logits_of_missing_classes_are_pushed_down_or_left_alone(softmax):  # T-BPF-11
    y = tensor([0, 2, 3, 0])
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), requires_grad=True)
    (grad,) = torch.autograd.grad(retrained_loss(BPFed(softmax=softmax), logits, y, COUNTS), logits)
    missing = grad[:, 1]
    assert (missing > 0).all() if softmax == "all" else (missing == 0).all()
    assert torch.allclose(missing, (logits.softmax(1)[:, 1] / 4).detach()) == (softmax == "all")


def test_choice_among_owned_classes_never_names_another(tiny_task):
    client = open_client(tiny_task, 1)  # the client lacks class 3
    for argmax, possible in [("all", {0, 1, 2, 3}), ("owned", {0, 1, 2})]:
        model = BPFed(argmax=argmax).client_model(client).eval()
        with torch.no_grad():
            client.model.classifier.bias[3] = 100
            found = set(model(torch.randn(50, 1, 8, 8)).argmax(1).tolist())
        assert found <= possible
        assert (3 in found) == (argmax == "all")


def test_choice_among_owned_classes_may_name_a_class_of_one_sample(tiny_task):
    client = open_client(tiny_task, 5)  # it has one sample of class 3
    with torch.no_grad():
        client.model.classifier.bias[3] = 100
        model = BPFed(argmax="owned").client_model(client).eval()
        assert set(model(torch.randn(50, 1, 8, 8)).argmax(1).tolist()) == {3}


def test_of_two_unequal_classes_the_larger_alone_is_undecided():
    """Its label is (1/2, 1/2), and that of the smaller one favours its own class."""
    counts = torch.tensor([10, 1])
    assert undecided(smooth_labels(counts, 0.5, 0.4), counts > 0) == 1
