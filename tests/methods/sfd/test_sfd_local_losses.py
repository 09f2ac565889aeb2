import pytest
import torch
from torch.nn import functional as F

from raylt.methods.sfd.local_losses import adaptive_supcon, adjusted_prior, logit_shift

COUNTS = torch.tensor([40, 0, 10, 4])


def draw(batch=12, classes=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, classes, generator=generator, dtype=dtype)
    h = F.normalize(torch.randn(batch, 8, generator=generator, dtype=dtype), dim=1)
    y = torch.tensor([0, 2, 3])[torch.randint(3, (batch,), generator=generator)]
    return logits, h, y


def test_adjusted_prior_gives_missing_classes_a_share_of_the_smallest_present_count():
    assert adjusted_prior(COUNTS, 1.0).tolist() == [40, 4, 10, 4]
    assert adjusted_prior(COUNTS, 0.5).tolist() == [40, 2, 10, 4]
    assert adjusted_prior(COUNTS, 0.0).tolist() == [40, 0, 10, 4]


def test_with_all_classes_present_the_loss_is_logit_adjustment_whatever_beta():  # T-SFD-1
    logits, _, y = draw()
    counts = torch.tensor([40, 7, 10, 4])
    for beta in (0.0, 0.3, 1.0):
        loss = F.cross_entropy(logits + logit_shift(adjusted_prior(counts, beta), 0.7), y)
        # -log (n_y^g e^f_y / sum_c n_c^g e^f_c)
        mass = counts.double() ** 0.7 * logits.double().exp()
        expected = -(mass[torch.arange(len(y)), y] / mass.sum(1)).log().mean()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 0.1), (1.0, 0.1), (0.0, 1.0), (0.5, 1.0)])
def test_missing_classes_are_pushed_down_if_and_only_if_beta_is_positive(beta, gamma):  # T-SFD-2
    logits, _, y = draw()
    logits.requires_grad_()
    F.cross_entropy(logits + logit_shift(adjusted_prior(COUNTS, beta), gamma), y).backward()
    missing = logits.grad[:, 1]
    assert (missing > 0).all() if beta else (missing == 0).all()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_gamma_zero_is_plain_cross_entropy(beta):  # T-SFD-3
    logits, _, _ = draw()
    assert torch.equal(logits + logit_shift(adjusted_prior(COUNTS, beta), 0.0), logits)


def supcon(h, y, counts, tau, delta, with_self):
    """Compute Eq. 7 sample by sample, in float64."""
    total, anchors = 0.0, 0
    for i in range(len(y)):
        positives = [a for a in range(len(y)) if y[a] == y[i] and (with_self or a != i)]
        if not positives:
            continue
        denominator = sum(
            torch.exp(h[i] @ h[b] / tau)
            * (counts[y[b]] if delta == "all" or (delta == "negatives" and y[b] != y[i]) else 1)
            for b in range(len(y))
            if b != i
        )
        total += sum(-torch.log(torch.exp(h[i] @ h[a] / tau) / denominator) for a in positives) / len(positives)
        anchors += 1
    return total / max(anchors, 1)


@pytest.mark.parametrize("with_self", [True, False])
@pytest.mark.parametrize("delta", ["all", "negatives", "none"])
def test_contrastive_loss_and_its_gradient_are_those_of_the_formula(delta, with_self):
    _, h, y = draw(dtype=torch.float64)
    y[0] = 3  # this anchor is alone in its class
    y[1:] = y[1:] % 3
    ours, theirs = h.float().requires_grad_(), h.clone().requires_grad_()
    loss = adaptive_supcon(ours, y, COUNTS.log(), 0.07, delta, with_self)
    expected = supcon(theirs, y, COUNTS.double(), 0.07, delta, with_self)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-4)


def test_counts_times_seven_shift_the_loss_by_log_seven_and_keep_the_gradient():  # T-SFD-4
    _, h, y = draw()
    gradients, losses = [], []
    for counts in (COUNTS, 7 * COUNTS):
        leaf = h.clone().requires_grad_()
        loss = adaptive_supcon(leaf, y, counts.log(), 0.07)
        loss.backward()
        losses.append(loss.item())
        gradients.append(leaf.grad)
    assert losses[1] - losses[0] == pytest.approx(torch.tensor(7.0).log().item(), abs=1e-4)
    assert torch.allclose(*gradients, atol=1e-5)


def test_with_equal_counts_and_without_self_it_is_supcon_plus_the_log_count():  # T-SFD-5
    _, h, y = draw()
    counts = torch.full((4,), 9)
    plain = supcon(h.double(), y, counts.double(), 0.07, "none", False)
    ours = adaptive_supcon(h, y, counts.log(), 0.07, with_self=False)
    assert ours.item() == pytest.approx(plain.item() + torch.tensor(9.0).log().item(), rel=1e-5)


def test_order_of_the_batch_does_not_matter():  # T-SFD-6
    _, h, y = draw()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    first, second = (adaptive_supcon(h[rows], y[rows], COUNTS.log(), 0.07) for rows in (slice(None), order))
    assert first.item() == pytest.approx(second.item(), rel=1e-6)


@pytest.mark.parametrize("y", [torch.zeros(4, dtype=torch.int64), torch.tensor([0, 2, 3, 0])])
def test_loss_stays_finite_for_batches_of_one_class_and_under_autocast(y):
    h = F.normalize(torch.ones(4, 8), dim=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = adaptive_supcon(h, y, COUNTS.log(), 0.07, with_self=False)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert h.grad.isfinite().all()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_similarities_are_in_float32_under_autocast(precision):
    _, h, y = draw()
    h = h.bfloat16()
    expected = adaptive_supcon(h.float(), y, COUNTS.log(), 0.07)
    with torch.autocast("cpu", torch.bfloat16):
        loss = adaptive_supcon(h.to(precision), y, COUNTS.log(), 0.07)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
