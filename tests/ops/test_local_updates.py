import pytest
import torch
from torch import nn

from raylt.core.training.optimisers import SGD
from raylt.ops.local_updates import gradient_mass, trained_and_rest


def test_gradient_mass_by_hand():
    assert gradient_mass(0, 0.9) == 0
    assert gradient_mass(7, 0.0) == 7
    # with a gradient of 1 the velocities are 1, 1.5, 1.75
    assert gradient_mass(3, 0.5) == 4.25


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("tau", [1, 2, 30])
def test_gradient_mass_is_fednovas_closed_form(tau, rho):
    assert gradient_mass(tau, rho) == pytest.approx((tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho))


def test_gradient_mass_is_how_far_sgd_goes_along_a_constant_gradient():
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimiser = SGD([w], lr=0.1, momentum=0.9)
    for _ in range(5):
        optimiser.step(2 * w.sum())
    assert w.item() == pytest.approx(-0.1 * 2 * gradient_mass(5, 0.9))


def test_buffers_and_frozen_parameters_are_the_rest():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    trained, rest = trained_and_rest(model, model.state_dict())
    assert set(trained) == {"0.bias", "1.weight", "1.bias"}
    assert set(rest) == {"0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
