import itertools

import pytest
import torch

from raylt.methods.sfd.fourier import bootstrap_floor, draw_frequencies, fourier, fourier_sum
from raylt.methods.sfd.synthesis import (
    Parts,
    Prepared,
    Target,
    align,
    arr,
    bank_gradient,
    bank_sizes,
    cholesky,
    first_bank,
    mmd,
    synthesise,
)

DIM = 24


@pytest.fixture(scope="module")
def target():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(DIM, DIM, generator=generator) / DIM**0.5
    z = (torch.randn(300, DIM, generator=generator) @ mixing + 0.2).relu()
    omega = draw_frequencies(DIM, 300, 0.05, "orf", 1)
    factor, _ = cholesky(torch.cov(z.double().T, correction=0), 1e-5)
    return Target(z.double().mean(0), factor, fourier_sum(z, omega) / len(z), omega)


def synthesis_loss(z, target, parts):
    """Return the sum of the active losses of Eq. 15-17, for autograd."""
    loss = z.new_zeros(())
    if parts.mmd:
        loss = loss + mmd(z, target)
    if parts.arr:
        loss = loss + arr(z)
    return loss


def draw_bank(size, seed=0):
    return torch.randn(size, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [DIM + 1, 2 * DIM])
def test_aligned_features_have_the_targets_mean_and_covariance(target, size):  # T-SFD-8
    z = align(draw_bank(size), target)
    cov = target.factor @ target.factor.T
    assert torch.allclose(z.mean(0), target.mean, atol=1e-10)
    # the jitter of 1e-6 is added to the bank's covariance, whose smallest eigenvalue at M = d + 1 is about 1e-3
    assert ((torch.cov(z.T) - cov).norm() / cov.norm()).item() < 1e-4


@pytest.mark.parametrize("size", [DIM, DIM // 2])
def test_too_few_features_are_refused(target, size):
    with pytest.raises(ValueError, match="at least 25 are needed"):
        align(draw_bank(size), target)


@pytest.mark.parametrize("terms", [Parts(*flags) for flags in itertools.product([True, False], repeat=3)], ids=str)
def test_gradient_in_closed_form_is_that_of_autograd(target, terms):
    raw = 0.5 + 2 * draw_bank(3 * DIM)  # not white, so that the gradient of Cholesky's factor matters
    leaf = raw.double().requires_grad_()
    z = align(leaf, target) if terms.aligner else leaf
    loss = synthesis_loss(z, target, terms)
    expected = torch.autograd.grad(loss, leaf)[0] if loss.requires_grad else torch.zeros_like(leaf)
    gradient, value = bank_gradient(raw, Prepared.of(target, terms))
    assert value.item() == pytest.approx(loss.item(), rel=1e-5)
    assert (gradient - expected).norm() <= 1e-5 * expected.norm()


def test_gradient_is_that_of_finite_differences(target):
    raw, terms, step = draw_bank(2 * DIM).double(), Parts(), 1e-6
    gradient, _ = bank_gradient(raw.float(), Prepared.of(target, terms))
    for row, column in [(0, 0), (3, 7), (20, 23), (47, 5)]:
        moved = []
        for sign in (1, -1):
            rounded = raw.float().double()
            rounded[row, column] += sign * step
            moved.append(synthesis_loss(align(rounded, target), target, terms).item())
        assert gradient[row, column].item() == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-3, abs=1e-5)


def test_columns_taken_in_parts_give_the_same_gradient(target, monkeypatch):
    raw, prepared = draw_bank(2 * DIM), Prepared.of(target, Parts())
    monkeypatch.setattr("raylt.methods.sfd.synthesis.CHUNK_SIZE", 1000)
    whole, _ = bank_gradient(raw, prepared)
    monkeypatch.setattr("raylt.methods.sfd.synthesis.CHUNK_SIZE", 7)
    parts, _ = bank_gradient(raw, prepared)
    assert (whole - parts).norm() < 1e-5 * whole.norm()


def test_synthesis_lowers_the_loss_and_the_negative_mass(target):  # T-SFD-10
    made = {}
    for steps in (0, 60):
        z, (start, end) = synthesise(target, 4 * DIM, Parts(), steps, 1.0, 0.9, torch.Generator().manual_seed(0))
        made[steps] = synthesis_loss(z, target, Parts()).item(), z.clamp(max=0).sum().item()
        assert sum(end) == pytest.approx(made[steps][0], rel=1e-5)
        assert sum(start) == pytest.approx(made[0][0], rel=1e-5)
        assert end.arr == pytest.approx(-made[steps][1] / (4 * DIM), rel=1e-5)
    assert made[60][0] < 0.9 * made[0][0]
    assert made[60][1] > 0.9 * made[0][1]  # both values are negative, so there is less mass below zero


def test_bank_follows_momentum_sgd_with_a_cosine_rate(target):
    """Compare with torch.optim.SGD and CosineAnnealingLR over autograd of the equations."""
    bank = torch.nn.Parameter(draw_bank(3 * DIM, seed=5))
    optimiser = torch.optim.SGD([bank], lr=0.5, momentum=0.8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=6)
    for _ in range(6):
        optimiser.zero_grad()
        synthesis_loss(align(bank, target), target, Parts()).backward()
        optimiser.step()
        schedule.step()
    z, _ = synthesise(target, 3 * DIM, Parts(), 6, 0.5, 0.8, torch.Generator().manual_seed(5))
    assert torch.allclose(z.double(), align(bank.detach(), target), atol=1e-4)


def test_without_aligner_the_bank_itself_is_moved(target):
    z, (start, end) = synthesise(target, 2 * DIM, Parts(aligner=False), 30, 1.0, 0.9, torch.Generator().manual_seed(0))
    assert sum(end) < sum(start)
    assert not torch.allclose(z.double().mean(0), target.mean, atol=1e-2)


def test_class_of_one_sample_gets_features_close_to_it():
    mean = torch.rand(DIM, dtype=torch.float64)
    factor, jitter = cholesky(torch.zeros(DIM, DIM, dtype=torch.float64), 1e-5)
    omega = draw_frequencies(DIM, 100, 0.05, "orf", 1)
    target = Target(mean, factor, fourier_sum(mean[None].float(), omega), omega)
    z, _ = synthesise(target, 2 * DIM, Parts(), 5, 1.0, 0.9, torch.Generator().manual_seed(0))
    assert jitter == 1e-5
    assert (z - mean).abs().max() < 0.03  # N(0, 1e-5)


def test_jitter_rises_until_the_covariance_is_positive_definite_or_gives_up():
    cov = torch.diag(torch.tensor([1.0, -5e-4], dtype=torch.float64))
    factor, jitter = cholesky(cov, 1e-5)
    assert jitter == pytest.approx(1e-3)
    assert torch.allclose(factor @ factor.T, cov + jitter * torch.eye(2))
    assert cholesky(cov / 10, 1e-5)[1] == pytest.approx(1e-4)
    assert cholesky(10 * cov, 1e-5)[1] == pytest.approx(1e-2)  # the last one that is tried
    with pytest.raises(ValueError, match="not positive definite"):
        cholesky(cov - torch.eye(2), 1e-5)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([50, 50, 5000], [2000, 2000, 600]),  # T-SFD-11
        ([7, 7], [2000, 2000]),
        ([100, 10, 1], [600, 1300, 2000]),
        # ranks 1, 2, 3, 4: the sizes differ by 1400 / 3
        ([4, 3, 2, 1], [600, 1067, 1533, 2000]),
    ],
)
def test_bank_sizes_fall_with_the_rank_of_the_class(counts, expected):
    assert bank_sizes(counts, 600, 2000) == expected


def test_each_loss_is_reported_whether_it_is_used_or_not(target):
    ends = {}
    for name, parts in {"mmd": Parts(arr=False), "arr": Parts(mmd=False), "none": Parts(mmd=False, arr=False)}.items():
        z, (start, ends[name]) = synthesise(target, 4 * DIM, parts, 40, 30.0, 0.9, torch.Generator().manual_seed(0))
        assert ends[name] == pytest.approx((mmd(z, target).item(), arr(z).item()))
    assert ends["none"] == start
    assert ends["mmd"].mmd < 0.8 * start.mmd
    assert ends["arr"].arr < 0.8 * start.arr
    assert ends["mmd"].mmd < ends["arr"].mmd  # each loss lowers its own value more
    assert ends["arr"].arr < ends["mmd"].arr


@pytest.mark.parametrize("size", [50, 400])
@pytest.mark.parametrize("gamma", [0.001, 0.01, 0.3])
def test_floor_is_that_of_a_bootstrap_of_real_features(size, gamma):
    """Compare with 200 draws of a bootstrap of 300 features behind a ReLU."""
    generator = torch.Generator().manual_seed(1)
    z = (torch.randn(300, DIM, generator=generator) + 0.2).relu()
    omega = draw_frequencies(DIM, 400, gamma, "orf", 1)
    phi = fourier(z, omega).double()
    target = Target(z.mean(0).double(), torch.eye(DIM).double(), phi.mean(0), omega)
    draws = [mmd(z[torch.randint(300, (size,), generator=generator)], target).item() for _ in range(200)]
    floor = bootstrap_floor(phi.mean(0), omega, target.mean, torch.cov(z.double().T, correction=0), size)
    assert floor == pytest.approx(sum(draws) / 200, rel=0.03)


def test_floor_of_features_that_are_all_alike_is_zero():
    z, omega = torch.ones(20, DIM), draw_frequencies(DIM, 60, 0.1, "orf", 1)
    phi = fourier(z, omega).double().mean(0)
    assert bootstrap_floor(phi, omega, torch.ones(DIM).double(), torch.zeros(DIM, DIM).double(), 10) < 1e-2


@pytest.mark.parametrize("start", ["noise", "scaled", "mean"])
def test_bank_starts_with_the_mean_and_the_scale_that_its_setting_names(start):
    mean = torch.arange(DIM).double()
    target = Target(mean, 3 * torch.eye(DIM).double(), torch.zeros(4).double(), torch.zeros(2, DIM))
    bank = first_bank(target, 50_000, start, torch.Generator().manual_seed(0))
    assert torch.allclose(bank.mean(0).double(), mean if start == "mean" else 0 * mean, atol=0.1)
    assert torch.allclose(bank.std(0), torch.full((DIM,), 1.0 if start == "noise" else 3.0), atol=0.05)


def test_start_of_the_bank_is_that_of_the_synthesis():
    target = Target(torch.ones(DIM).double(), torch.eye(DIM).double() / 2, torch.zeros(4).double(), torch.zeros(2, DIM))
    made = [
        synthesise(target, 2 * DIM, Parts(aligner=False), 0, 1.0, 0.9, torch.Generator().manual_seed(0), start)[0]
        for start in ("noise", "mean")
    ]
    assert torch.allclose(made[1], made[0] / 2 + 1, atol=1e-6)
