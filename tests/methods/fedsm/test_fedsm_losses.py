import math

import pytest
import torch
from torch.nn import functional as F

from raylt.methods.fedsm.losses import margin_softmax
from raylt.ops.distillation import distillation


def draw(batch=12, classes=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, classes, generator=generator, dtype=dtype)
    h = F.normalize(torch.randn(batch, 8, generator=generator, dtype=dtype), dim=1)
    y = torch.tensor([0, 2, 3])[torch.randint(3, (batch,), generator=generator)]
    return logits, h, y


def test_distillation_is_zero_with_its_gradient_where_logits_agree_up_to_a_constant():  # T-FSM-3
    teacher = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = (teacher + torch.arange(6.0)[:, None]).requires_grad_()
    loss = distillation(logits, log_teacher=(teacher / 3).log_softmax(1), temperature=3.0)
    (grad,) = torch.autograd.grad(loss, logits)
    assert abs(loss.item()) < 1e-6
    assert grad.abs().max() < 1e-6


def test_distillation_takes_the_teacher_as_target_and_its_gradient_is_the_difference_of_softmaxes():  # T-FSM-3
    # q = (0.9, 0.1), p = (0.5, 0.5): KL(q || p) = 0.9 ln 1.8 + 0.1 ln 0.2; KL(p || q) would be 0.5 ln(25 / 9)
    temperature = 2.0
    q = torch.tensor([[0.9, 0.1]])
    logits = torch.zeros(1, 2, requires_grad=True)
    loss = distillation(logits, log_teacher=q.log(), temperature=temperature)
    assert loss.item() == pytest.approx(4 * (0.9 * math.log(1.8) + 0.1 * math.log(0.2)), rel=1e-6)
    assert loss.item() != pytest.approx(4 * 0.5 * math.log(25 / 9), rel=1e-2)
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(grad, temperature * (torch.tensor([[0.5, 0.5]]) - q), atol=1e-6)


def test_distillation_is_never_negative_and_the_mean_over_the_batch():  # T-FSM-3
    generator = torch.Generator().manual_seed(1)
    logits, teacher = torch.randn(2, 50, 7, generator=generator)
    each = [
        distillation(logits[i : i + 1], log_teacher=teacher[i : i + 1].log_softmax(1), temperature=3.0)
        for i in range(50)
    ]
    assert min(each) >= 0
    assert distillation(logits, log_teacher=teacher.log_softmax(1), temperature=3.0).item() == pytest.approx(
        (sum(each) / 50).item(), rel=1e-5
    )


def test_margin_softmax_without_margin_is_clips_cross_entropy():  # T-FSM-9
    generator = torch.Generator().manual_seed(2)
    u, text = (F.normalize(torch.randn(n, 8, generator=generator), dim=1) for n in (10, 5))
    y = torch.arange(10) % 5
    assert margin_softmax(u, y, text, 0.0, 100.0).item() == pytest.approx(
        F.cross_entropy(100 * u @ text.T, y).item(), rel=1e-6
    )


def test_margin_softmax_takes_an_adaptive_margin_from_the_true_class():  # T-FSM-9
    # s = 10, m = 0.3, cos(t_0, t_1) = 0.6: the logits lose 3 and 1.8, so the margin is 10 * 0.3 * (1 - 0.6) = 1.2
    text = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    u = torch.tensor([[0.8, 0.6]])
    logits = 10 * (u @ text.T)[0]
    expected = F.cross_entropy(logits - torch.tensor([1.2, 0.0]), torch.tensor(0))
    assert margin_softmax(u, torch.tensor([0]), text, 0.3, 10.0).item() == pytest.approx(expected.item(), rel=1e-5)
