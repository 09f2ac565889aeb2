"""Losses between a student and its teacher are in float32, also under autocast, where logits are in bfloat16."""

import pytest
import torch
from torch import Tensor, tensor

from raylt.methods.balancefl import mean_entropy
from raylt.ops.distillation import distillation, divergence

# logits that bfloat16 stores exactly, and whose logarithms it does not
STUDENT, TEACHER = tensor([[0.5, 2.0, -1.0], [3.0, 0.25, 1.0]]), tensor([[1.0, 1.5, 0.0], [-2.0, 0.5, 4.0]])


def by_divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    return divergence(logits, teacher=teacher, temperature=3.0)


def by_distillation(logits: Tensor, teacher: Tensor) -> Tensor:
    return distillation(logits, log_teacher=(teacher.float() / 3).log_softmax(1), temperature=3.0)


@pytest.mark.parametrize("loss", [by_divergence, by_distillation, lambda logits, _: mean_entropy(logits)])
def test_logits_in_bfloat16_give_the_loss_of_the_same_logits_in_float32(loss):
    expected = loss(STUDENT, TEACHER)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(STUDENT.bfloat16(), TEACHER.bfloat16())
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
