import subprocess
import sys

import pytest
import torch
from sklearn.metrics.pairwise import rbf_kernel

from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.methods.sfd.fourier import draw_frequencies, fourier, fourier_sum

PROGRAM = """
import torch
from raylt.core.checkpoint.checkpoint import hash_tensors
from raylt.methods.sfd.fourier import draw_frequencies
torch.manual_seed(99)                   # the global generator plays no part
print(hash_tensors({kind: draw_frequencies(24, 100, 0.01, kind, 7) for kind in ("orf", "iid")}))
"""


@pytest.mark.slow
def test_another_process_draws_the_same_bits_from_the_seed():  # T-SFD-9
    ours = hash_tensors({kind: draw_frequencies(24, 100, 0.01, kind, 7) for kind in ("orf", "iid")})
    theirs = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert theirs.stdout.strip() == ours


def test_another_seed_draws_other_frequencies():
    assert not torch.equal(draw_frequencies(24, 100, 0.01, "orf", 7), draw_frequencies(24, 100, 0.01, "orf", 8))


@pytest.mark.parametrize("kind", ["orf", "iid"])
def test_features_have_length_one_and_approximate_the_kernel(kind):
    z = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) / 2
    phi = fourier(z, draw_frequencies(64, 5000, 0.01, kind, 3))
    assert phi.shape == (40, 5000)
    assert torch.allclose(phi.norm(dim=1), torch.ones(40), atol=1e-5)
    error = (phi @ phi.T - torch.from_numpy(rbf_kernel(z, gamma=0.01))).abs().max()
    assert error < (0.01 if kind == "orf" else 0.04)


def test_orthogonal_frequencies_are_orthogonal_within_a_block():
    omega = draw_frequencies(16, 80, 0.5, "orf", 0)
    assert omega.shape == (40, 16)
    for block in omega.split(16):
        gram = block @ block.T
        assert torch.allclose(gram, gram.diagonal().diag(), atol=1e-5)


def test_orthogonal_frequencies_have_uniform_directions_and_the_lengths_of_gaussian_rows():
    omega = draw_frequencies(16, 2 * 16 * 300, 0.5, "orf", 0)  # 300 blocks; with gamma = 1/2 rows have chi lengths
    lengths = omega.norm(dim=1)
    assert lengths.square().mean().item() == pytest.approx(16, rel=0.02)
    assert lengths.square().var().item() == pytest.approx(2 * 16, rel=0.1)  # chi-squared with 16 degrees
    directions = (omega / lengths[:, None]).view(300, 16, 16)
    traces = directions.diagonal(dim1=1, dim2=2).sum(1)  # of a uniform orthogonal matrix: mean 0, variance 1
    assert traces.mean().abs() < 0.25
    assert traces.var().item() == pytest.approx(1, rel=0.3)


def test_sum_of_features_does_not_depend_on_the_chunks():
    z, omega = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), draw_frequencies(8, 20, 0.1, "iid", 0)
    expected = fourier(z, omega).double().sum(0)
    for chunk in (7, 50):
        assert torch.allclose(fourier_sum(z, omega, chunk), expected, atol=1e-12)
