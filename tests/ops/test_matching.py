import itertools

import pytest
import torch
from torch import nn, tensor
from torch.nn import functional as F

from raylt.ops.matching import _gradient, class_gradients, gradients_fault, match_features, mean_gradients

C, D = 4, 6


def classifier(seed=0) -> nn.Linear:
    head = nn.Linear(D, C)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(torch.randn(C, D, generator=generator))
        head.bias.copy_(torch.randn(C, generator=generator))
    return head


def features(y, seed=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(y), D, generator=generator) + torch.randn(C, D, generator=generator)[y]


def by_autograd(head, z, y) -> torch.Tensor:
    """Return the gradient of the mean cross-entropy, [C, D + 1]."""
    weight, bias = torch.autograd.grad(F.cross_entropy(head(z), y), [head.weight, head.bias])
    return torch.cat([weight, bias[:, None]], 1)


def cosine_loss(head, h, classes, targets, rows) -> torch.Tensor:
    """Compute Eq. 20 with double backward, class by class; `rows` sums over rows as CReFF's code does."""
    total = torch.zeros(())
    for z, c, target in zip(h, classes, targets, strict=True):
        loss = F.cross_entropy(F.linear(z, head.weight, head.bias), torch.full((len(z),), int(c)))
        weight, bias = torch.autograd.grad(loss, [head.weight, head.bias], create_graph=True)
        if rows:
            for a, b in [*zip(weight, target[:, :-1], strict=True), (bias, target[:, -1])]:
                total = total + 1 - F.cosine_similarity(a, b, dim=0)
        else:
            a = torch.cat([weight, bias[:, None]], 1).flatten()
            total = total + 1 - F.cosine_similarity(a, target.flatten(), dim=0)
    return total


def test_gradients_in_closed_form_are_those_of_autograd():  # T-MUP-10
    head, y = classifier(), tensor([0, 0, 2, 3, 2, 0, 3, 3])
    z = features(y)
    found = class_gradients(z, y, head)
    assert found.keys() == {0, 2, 3}
    for c, gradient in found.items():
        own = y == int(c)
        assert gradient.shape == (C, D + 1)
        assert gradient.dtype == torch.float32
        assert not gradient.requires_grad
        assert torch.allclose(gradient, by_autograd(head, z[own], y[own]), atol=1e-6)


def test_gradient_of_samples_that_are_nearly_sure_keeps_its_direction():
    head, y = classifier(), tensor([1, 1])
    with torch.no_grad():
        head.bias += tensor([0.0, 15.0, 0.0, 0.0])  # p = 1 - 4e-7, for which float32 has p - 1 only up to 15 %
    z = features(y)
    (gradient,) = class_gradients(z, y, head).values()
    head = head.double()
    assert torch.allclose(gradient.double(), by_autograd(head, z.double(), y), rtol=1e-5, atol=1e-14)


def test_gradient_of_synthetic_features_that_are_nearly_sure_keeps_its_direction():
    h, weight, bias = torch.ones(1, 1, 1), torch.zeros(3, 1), tensor([20.0, 1.0, 0.0])  # p = 1 - 8e-9
    gradient = _gradient(h, tensor([0]), weight, bias)[0, :, 1].double()
    p = bias.double().softmax(0)
    assert torch.allclose(gradient, p - tensor([1.0, 0.0, 0.0]).double(), rtol=1e-5, atol=0)


def test_mean_counts_each_client_that_owns_a_class_the_same():
    parts = [{0: torch.full((C, D + 1), 1.0), 3: torch.full((C, D + 1), 5.0)}, {3: torch.full((C, D + 1), 7.0)}]
    classes, means = mean_gradients(parts)
    assert classes.tolist() == [0, 3]
    assert means[:, 0, 0].tolist() == [1.0, 6.0]
    assert means.shape == (2, C, D + 1)
    many = {c: torch.full((C, D + 1), float(c)) for c in (10, 9, 2)}
    assert mean_gradients([many])[0].tolist() == [2, 9, 10]  # keys are sorted as numbers, not as text


@pytest.mark.parametrize("distance", ["flat", "rows"])
def test_one_step_is_that_of_double_backpropagation(distance):
    head, classes = classifier(), tensor([0, 2, 3])
    targets = torch.randn(3, C, D + 1, generator=torch.Generator().manual_seed(3))
    h = torch.randn(3, 5, D, generator=torch.Generator().manual_seed(4))
    leaf = h.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cosine_loss(head, leaf, classes, targets, distance == "rows"), leaf)
    found, _ = match_features(h, classes, targets, head, steps=1, lr=0.7, distance=distance)
    assert torch.allclose(found, h - 0.7 * gradient, atol=1e-5)


def test_real_features_match_themselves():  # T-MUP-11
    head, y = classifier(), tensor([0] * 5 + [2] * 5)
    z = features(y)
    classes, targets = mean_gradients([class_gradients(z, y, head)])
    h = torch.stack([z[:5], z[5:]])
    same, cosine = match_features(h, classes, targets, head, steps=0, lr=1.0)
    assert torch.equal(same, h)
    assert torch.allclose(cosine, torch.ones(2), atol=1e-6)
    moved, _ = match_features(h, classes, targets, head, steps=5, lr=0.01)
    assert torch.allclose(moved, h, atol=1e-3)


def test_gradients_of_features_that_the_classifier_fits_already_have_a_direction():
    head, h = classifier(), features(tensor([1, 1]))[None]
    with torch.no_grad():
        head.bias += tensor([0.0, 20.0, 0.0, 0.0])
    classes = tensor([1])
    target = _gradient(h, classes, head.weight.detach(), head.bias.detach())
    assert 0 < target.norm() < 1e-6
    assert match_features(h, classes, target, head, steps=0, lr=1.0)[1].item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("distance", ["flat", "rows"])
def test_features_follow_the_direction_of_a_target_whatever_its_length_beside_the_others(distance):
    head, y = classifier(), torch.arange(C).repeat(4)
    classes, targets = mean_gradients([class_gradients(features(y), y, head)])
    h = torch.randn(C, 8, D, generator=torch.Generator().manual_seed(5))
    shorter = targets * torch.tensor([1e-14, 1.0, 1e-7, 1.0])[:, None, None]
    ends = [
        match_features(h, classes, each, head, steps=3, lr=0.1, distance=distance)[0] for each in (targets, shorter)
    ]
    assert torch.allclose(*ends, atol=1e-5)


@pytest.mark.parametrize("distance", ["flat", "rows"])
def test_distance_falls_at_every_small_step(distance):  # T-MUP-11
    head, y = classifier(), torch.arange(C).repeat(4)
    classes, targets = mean_gradients([class_gradients(features(y), y, head)])
    h, losses = torch.randn(C, 8, D, generator=torch.Generator().manual_seed(5)), []
    for _ in range(40):
        losses.append(cosine_loss(head, h, classes, targets, distance == "rows").item())
        h, _ = match_features(h, classes, targets, head, steps=1, lr=0.1, distance=distance)
    assert all(b < a for a, b in itertools.pairwise(losses))


def test_enough_steps_find_the_direction_from_noise():
    head, y = classifier(), torch.arange(C).repeat(4)
    classes, targets = mean_gradients([class_gradients(features(y), y, head)])
    h = torch.randn(C, 20, D, generator=torch.Generator().manual_seed(6))
    found, cosine = match_features(h, classes, targets, head, steps=300, lr=10.0)
    assert (cosine > 0.99).all()
    again = torch.stack([by_autograd(head, found[c], torch.full((20,), c)) for c in range(C)])
    assert torch.allclose(F.cosine_similarity(again.flatten(1), targets.flatten(1)), cosine, atol=1e-5)
    assert head.weight.grad is None


def test_target_without_a_direction_leaves_its_features_where_they_are():
    h = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(7))
    targets = torch.randn(2, C, D + 1, generator=torch.Generator().manual_seed(8))
    targets[0] = 0
    found, cosine = match_features(h, tensor([0, 1]), targets, classifier(), steps=3, lr=1.0)
    assert torch.equal(found[0], h[0])
    assert not torch.equal(found[1], h[1])
    assert torch.isfinite(found).all()
    assert cosine[0] == 0


def test_small_targets_count_as_much_as_large_ones():
    targets = torch.randn(2, C, D + 1, generator=torch.Generator().manual_seed(8))
    h = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(7))
    ends = [
        match_features(h, tensor([0, 1]), targets * scale, classifier(), steps=5, lr=1.0)[0] for scale in (1.0, 1e-11)
    ]
    assert torch.allclose(*ends, atol=1e-4)
    assert not torch.allclose(ends[0], h, atol=1e-2)


def test_gradients_are_those_of_probabilities_and_bounded_features():
    y = torch.tensor([0, 0, 2, 2, 2])
    honest = class_gradients(features(y), y, classifier())
    assert gradients_fault(5, {"gradients": honest}) is None
    lies = (
        {},
        {2: -honest[2]},
        {2: 2 * honest[2] + 1},
        {2: honest[2] * 1.2 / honest[2][[0, 1, 3], -1].sum()},  # probabilities of other classes that sum up to 1.2
        {2: honest[2] * torch.tensor([1, 1, 0.5, 1])[:, None]},  # all of p - e_c does not sum up to 0
        {2: torch.full_like(honest[2], 1e17)},
        {2: torch.cat([1e5 * honest[2][:, :-1], honest[2][:, -1:]], 1)},
    )
    for lie in lies:
        assert gradients_fault(5, {"gradients": lie and honest | lie}), lie
    assert gradients_fault(1, {"gradients": honest})
    assert gradients_fault(1, {"gradients": honest}, labels=4) is None
