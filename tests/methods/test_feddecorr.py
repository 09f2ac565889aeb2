import numpy as np
import pytest
import torch
from rounds import flat, run
from tiny import fingerprint, open_client
from torch.nn import functional as F

from raylt.methods.fedavg import FedAvg
from raylt.methods.feddecorr import FedDecorr, decorrelation


def features(n=12, d=5, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator) @ torch.randn(d, d, generator=generator)


def test_paper_is_the_mean_square_of_numpys_correlations():
    z = features()
    # the deviation divides by n - 1 and the product by n: K = (n - 1) / n corrcoef
    expected = np.square(11 / 12 * np.corrcoef(z.double().numpy().T)).mean()
    assert decorrelation(z, "paper").item() == pytest.approx(expected, rel=1e-4)


def test_code_is_b_times_the_mean_over_different_dimensions():
    z = features()
    k = 11 / 12 * np.corrcoef(z.double().numpy().T)
    expected = 12 * (np.square(k).sum() - np.square(np.diagonal(k)).sum()) / (5 * 4)
    assert decorrelation(z, "code").item() == pytest.approx(expected, rel=1e-4)


def test_independent_dimensions_cost_nothing_and_equal_ones_most():
    z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert decorrelation(z, "code").item() == pytest.approx(0, abs=1e-6)
    same = z[:, :1].repeat(1, 3)
    # every correlation is 1: (n - 1) / n = 3/4, squared, times B = 4
    assert decorrelation(same, "code").item() == pytest.approx(4 * (3 / 4) ** 2, rel=1e-5)


def test_it_does_not_depend_on_shift_and_scale_of_a_dimension():
    z = features()
    moved = z * torch.tensor([1.0, 10.0, 0.1, 3.0, 7.0]) + 5
    assert decorrelation(moved, "code").item() == pytest.approx(decorrelation(z, "code").item(), rel=1e-3)


@pytest.mark.parametrize("scale", ["code", "paper"])
def test_gradient_by_finite_differences(scale):
    z = features().requires_grad_()
    (gradient,) = torch.autograd.grad(decorrelation(z, scale), z)
    for i, j in ((0, 0), (3, 2), (7, 4), (11, 1), (5, 3)):
        step = torch.zeros_like(z)
        step[i, j] = 1e-2
        with torch.no_grad():
            difference = (decorrelation(z + step, scale) - decorrelation(z - step, scale)) / 2e-2
        assert gradient[i, j].item() == pytest.approx(difference.item(), rel=2e-2, abs=1e-4)


@pytest.mark.parametrize("scale", ["code", "paper"])
def test_finite_where_a_dimension_or_all_samples_are_constant(scale):
    for z in (torch.zeros(4, 3), torch.ones(2, 3), torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 1.0]])):
        z.requires_grad_()
        loss = decorrelation(z, scale)
        assert torch.isfinite(loss)
        assert torch.isfinite(torch.autograd.grad(loss, z)[0]).all()


def test_objective_adds_beta_times_the_term(tiny_task):
    client = open_client(tiny_task, FedDecorr())
    client.model.eval()
    batch = client.samples.batch(torch.arange(8))
    with torch.no_grad():
        z = client.model.encoder(batch.x)
        plain = F.cross_entropy(client.model(batch.x), batch.y)
        for beta, scale in ((0.1, "code"), (0.3, "paper")):
            value = FedDecorr(beta=beta, loss=scale).objective(client, {})(batch)
            assert value.item() == pytest.approx((plain + beta * decorrelation(z, scale)).item(), rel=1e-6)


def test_beta_of_zero_is_fedavg_to_the_bit(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, method) for method in (FedAvg(), FedDecorr(beta=0))]
    assert fingerprint(ends[0].server.model.state_dict()) == fingerprint(ends[1].server.model.state_dict())
    others = [flat(run(tiny_task, tmp_path, FedDecorr(**fields))) for fields in ({}, {"beta": 0.3}, {"loss": "paper"})]
    assert all(not torch.equal(flat(ends[0]), other) for other in others)


def test_features_correlate_less_after_training_with_it(tiny_task, tmp_path):
    correlations = []
    for method in (FedAvg(), FedDecorr(beta=1.0)):
        experiment = run(tiny_task, tmp_path, method, rounds=5)
        client = open_client(tiny_task, method)
        client.receive(experiment.server.model.state_dict())
        with torch.no_grad():
            z = client.model.eval().encoder(client.samples.batch(torch.arange(24)).x)
        correlations.append(decorrelation(z, "paper").item())
    assert correlations[1] < 0.8 * correlations[0]
