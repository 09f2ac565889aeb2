"""Sums that clients send for a ridge regression are those of whole samples with bounded features."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.ops.closed_form import ridge_sums_fault
from raylt.ops.moments import pack

Y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])


def features() -> Tensor:
    """Return features of length 2 in which one of the first two entries is 0."""
    z = torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
    z[::2, 0] = 0
    z[1::2, 1] = 0
    return 2 * F.normalize(z)


def sums_of(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of [z; 1] [z; 1]^T and of [z; 1] e_y^T."""
    x = F.pad(z.double(), (0, 1), value=1.0)
    return x.T @ x, x.T @ F.one_hot(Y, 3).double()


def fault(a: Tensor, b: Tensor, n: int = 8, negative: bool = True) -> str | None:
    return ridge_sums_fault(n, {"a": pack(a), "b": b}, 3.0, negative)


def test_honest_sums_are_believed():
    a, b = sums_of(features())
    assert fault(a, b) is None
    assert fault(a, b, negative=False) is None
    assert ridge_sums_fault(8, {"a": pack(a), "b": b}) is None


def test_sums_count_the_clients_samples():
    a, b = sums_of(features())
    assert fault(a, b, n=7)
    assert fault(a, b, n=9)
    b[-1] += torch.tensor([0.25, -0.25, 0.0])
    assert fault(a, b)


def test_no_feature_is_longer_than_the_bound():
    z = features()
    z[7] *= 1.6  # the only sample of its class
    assert fault(*sums_of(z))
    a, b = sums_of(features())
    a[:4, :4] += 20 * torch.eye(4)
    assert fault(a, b)


def test_both_sums_are_of_the_same_features():
    a, b = sums_of(features())
    b[2, 0] += 0.01
    assert fault(a, b)
    a, b = sums_of(features())
    b[3] += torch.tensor([3.0, -3.0, 0.0])  # class means further apart than all samples
    assert fault(a, b)


@pytest.mark.parametrize("part", ["a", "b"])
def test_behind_a_relu_no_sum_is_negative(part):
    a, b = sums_of(features())
    if part == "a":
        a[0, 1] = a[1, 0] = -1e-3
    else:
        b[1] += torch.tensor([0.0, 0.01, -0.01])  # class 2 has 0 there
    assert fault(a, b) is None
    assert fault(a, b, negative=False)
