import math

import pytest
import torch
from torch.nn import functional as F

from raylt.methods.fedsm.losses import distillation, margin_softmax
from raylt.methods.sfd.losses import adaptive_supcon, adjusted_prior, logit_shift

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


def test_with_all_classes_present_the_loss_is_logit_adjustment_whatever_beta():       # T-SFD-1
    logits, _, y = draw()
    counts = torch.tensor([40, 7, 10, 4])
    for beta in (0.0, 0.3, 1.0):
        loss = F.cross_entropy(logits + logit_shift(adjusted_prior(counts, beta), 0.7), y)
        # -log (n_y^g e^f_y / sum_c n_c^g e^f_c), written out
        mass = counts.double() ** 0.7 * logits.double().exp()
        expected = -(mass[torch.arange(len(y)), y] / mass.sum(1)).log().mean()
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 0.1), (1.0, 0.1), (0.0, 1.0), (0.5, 1.0)])
def test_missing_classes_are_pushed_down_if_and_only_if_beta_is_positive(beta, gamma):         # T-SFD-2
    logits, _, y = draw()
    logits.requires_grad_()
    F.cross_entropy(logits + logit_shift(adjusted_prior(COUNTS, beta), gamma), y).backward()
    missing = logits.grad[:, 1]
    assert (missing > 0).all() if beta else (missing == 0).all()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_gamma_zero_is_plain_cross_entropy(beta):                                     # T-SFD-3
    logits, _, _ = draw()
    assert torch.equal(logits + logit_shift(adjusted_prior(COUNTS, beta), 0.0), logits)


def supcon(h, y, counts, tau, delta, with_self):
    """Eq. 7 sample by sample, in float64."""
    total, anchors = 0.0, 0
    for i in range(len(y)):
        positives = [a for a in range(len(y)) if y[a] == y[i] and (with_self or a != i)]
        if not positives:
            continue
        denominator = sum(torch.exp(h[i] @ h[b] / tau) * (
            counts[y[b]] if delta == "all" or (delta == "negatives" and y[b] != y[i]) else 1)
            for b in range(len(y)) if b != i)
        total += sum(-torch.log(torch.exp(h[i] @ h[a] / tau) / denominator) for a in positives) / len(positives)
        anchors += 1
    return total / max(anchors, 1)


@pytest.mark.parametrize("with_self", [True, False])
@pytest.mark.parametrize("delta", ["all", "negatives", "none"])
def test_contrastive_loss_and_its_gradient_are_those_of_the_formula(delta, with_self):
    _, h, y = draw(dtype=torch.float64)
    y[0] = 3                                            # an anchor may be alone in its class
    y[1:] = y[1:] % 3
    ours, theirs = h.float().requires_grad_(), h.clone().requires_grad_()
    loss = adaptive_supcon(ours, y, COUNTS.log(), 0.07, delta, with_self)
    expected = supcon(theirs, y, COUNTS.double(), 0.07, delta, with_self)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(ours.grad.double(), theirs.grad, atol=1e-4)


def test_counts_times_seven_shift_the_loss_by_log_seven_and_keep_the_gradient():      # T-SFD-4
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


def test_with_equal_counts_and_without_self_it_is_supcon_plus_the_log_count():        # T-SFD-5
    _, h, y = draw()
    counts = torch.full((4,), 9)
    plain = supcon(h.double(), y, counts.double(), 0.07, "none", False)
    ours = adaptive_supcon(h, y, counts.log(), 0.07, with_self=False)
    assert ours.item() == pytest.approx(plain.item() + torch.tensor(9.0).log().item(), rel=1e-5)


def test_order_of_the_batch_does_not_matter():                                        # T-SFD-6
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


# distillation and Margin Metric Softmax: FedSM

def test_distillation_is_zero_with_its_gradient_where_logits_agree_up_to_a_constant():                # T-FSM-3
    teacher = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = (teacher + torch.arange(6.0)[:, None]).requires_grad_()
    loss = distillation(logits, (teacher / 3).log_softmax(1), 3.0)
    (grad,) = torch.autograd.grad(loss, logits)
    assert abs(loss.item()) < 1e-6
    assert grad.abs().max() < 1e-6


def test_distillation_takes_the_teacher_as_target_and_its_gradient_is_the_difference_of_softmaxes():  # T-FSM-3
    # q = (0.9, 0.1), p = (0.5, 0.5): KL(q || p) = 0.9 ln 1.8 + 0.1 ln 0.2; KL(p || q) would be 0.5 ln(25 / 9)
    temperature = 2.0
    q = torch.tensor([[0.9, 0.1]])
    logits = torch.zeros(1, 2, requires_grad=True)
    loss = distillation(logits, q.log(), temperature)
    assert loss.item() == pytest.approx(4 * (0.9 * math.log(1.8) + 0.1 * math.log(0.2)), rel=1e-6)
    assert loss.item() != pytest.approx(4 * 0.5 * math.log(25 / 9), rel=1e-2)
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(grad, temperature * (torch.tensor([[0.5, 0.5]]) - q), atol=1e-6)


def test_distillation_is_never_negative_and_the_mean_over_the_batch():                                # T-FSM-3
    generator = torch.Generator().manual_seed(1)
    logits, teacher = torch.randn(2, 50, 7, generator=generator)
    each = [distillation(logits[i:i + 1], teacher[i:i + 1].log_softmax(1), 3.0) for i in range(50)]
    assert min(each) >= 0
    assert distillation(logits, teacher.log_softmax(1), 3.0).item() == pytest.approx(
        (sum(each) / 50).item(), rel=1e-5)


def test_margin_softmax_without_margin_is_clips_cross_entropy():                                      # T-FSM-9
    generator = torch.Generator().manual_seed(2)
    u, text = (F.normalize(torch.randn(n, 8, generator=generator), dim=1) for n in (10, 5))
    y = torch.arange(10) % 5
    assert margin_softmax(u, y, text, 0.0, 100.0).item() == pytest.approx(
        F.cross_entropy(100 * u @ text.T, y).item(), rel=1e-6)


def test_margin_softmax_takes_an_adaptive_margin_from_the_true_class():                               # T-FSM-9
    # s = 10, m = 0.3, cos(t_0, t_1) = 0.6: the logits lose 3 and 1.8, so the margin is 10 * 0.3 * (1 - 0.6) = 1.2
    text = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    u = torch.tensor([[0.8, 0.6]])
    logits = 10 * (u @ text.T)[0]
    expected = F.cross_entropy(logits - torch.tensor([1.2, 0.0]), torch.tensor(0))
    assert margin_softmax(u, torch.tensor([0]), text, 0.3, 10.0).item() == pytest.approx(expected.item(), rel=1e-5)
