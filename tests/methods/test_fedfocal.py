import math

import pytest
import torch
from rounds import flat, run
from torch import nn, tensor
from torch.nn import functional as F

from raylt.methods.fedavg import FedAvg
from raylt.methods.fedfocal import FedFocal, focal_loss


def test_loss_by_hand():
    # the labels have p = 1/4 and 3/4; (3/4)^2 log 4 and (1/4)^2 log(4/3)
    logits = tensor([[0.0, math.log(3)], [math.log(3), 0.0]])
    expected = (0.5625 * math.log(4) + 0.0625 * math.log(4 / 3)) / 2
    assert focal_loss(logits, tensor([0, 0]), 2.0).item() == pytest.approx(expected, rel=1e-5)


def test_loss_of_a_prediction_that_is_nearly_sure():
    p = 1 - 1e-5
    logits = tensor([[math.log(p / (1 - p)), 0.0]], dtype=torch.float64)
    assert focal_loss(logits, tensor([0]), 1.0).item() == pytest.approx(1e-10, rel=1e-3)


def test_gamma_of_zero_is_fedavg(tiny_task, tmp_path):
    ends = [flat(run(tiny_task, tmp_path, method)) for method in (FedAvg(), FedFocal(gamma=0))]
    assert torch.allclose(*ends, atol=1e-6, rtol=0)
    assert not torch.allclose(ends[0], flat(run(tiny_task, tmp_path, FedFocal())), atol=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 5.0])
def test_gradient_by_finite_differences(gamma):
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randn(6, 4, generator=generator, dtype=torch.float64), tensor([0, 1, 2, 3, 0, 1])
    assert torch.autograd.gradcheck(lambda t: focal_loss(t, y, gamma), logits.requires_grad_())


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_finite_where_predictions_are_certain(gamma, scale):
    logits = nn.Parameter(tensor([[scale, 0.0, 0.0], [0.0, scale, 0.0]]))
    for y in (tensor([0, 1]), tensor([2, 0])):
        loss = focal_loss(logits, y, gamma)
        assert torch.isfinite(loss)
        assert torch.isfinite(torch.autograd.grad(loss, logits)[0]).all()


def test_correctly_classified_samples_weigh_less_than_in_cross_entropy():
    logits = tensor([[3.0, 0.0], [0.0, 3.0]])
    easy, hard = (logits[:1], tensor([0])), (logits[1:], tensor([0]))
    share = focal_loss(*easy, 2.0) / focal_loss(*hard, 2.0)
    assert share < 0.01 * F.cross_entropy(*easy) / F.cross_entropy(*hard) * 10
