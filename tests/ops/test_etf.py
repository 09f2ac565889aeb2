import pytest
import torch

from raylt.ops.etf import simplex_etf, sparse_etf


@pytest.mark.parametrize(("classes", "dim"), [(2, 2), (4, 4), (10, 64)])
def test_rows_of_the_frame_are_unit_vectors_with_equal_angles(classes, dim):
    cosines = simplex_etf(classes, dim, torch.Generator().manual_seed(0)).double()
    cosines = cosines @ cosines.T
    expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    assert torch.allclose(cosines, expected, atol=1e-6)


def test_frame_is_drawn_from_its_generator():
    one, same, other = (simplex_etf(3, 5, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_sparse_frame_has_the_zeros_asked_for_and_nears_its_length_and_angles():
    start, end = (sparse_etf(4, 32, 0.5, steps, torch.Generator().manual_seed(0), lr=0.003) for steps in (0, 1000))
    assert int((end == 0).sum()) == 64
    assert torch.equal(start == 0, end == 0)

    def nearest(e):
        unit = e / e.norm(dim=1, keepdim=True)
        return (unit @ unit.T - 2 * torch.eye(4)).max()

    assert nearest(end) < nearest(start)
    assert nearest(end).item() == pytest.approx(-1 / 3, abs=0.03)  # the smallest largest cosine of four rows
    assert end.norm(dim=1).tolist() == pytest.approx([0.1] * 4, abs=0.05)


def test_two_rows_in_opposite_directions_keep_them():
    """The derivative of their angle is infinite."""
    end = sparse_etf(2, 4, 0.0, 20, torch.Generator().manual_seed(0), lr=0.01)
    assert torch.cosine_similarity(end[0], end[1], dim=0).item() == pytest.approx(-1)
    assert end.norm(dim=1).max() < 0.9  # the length still falls


def test_a_share_of_the_entries_that_is_no_whole_number_is_rounded_down():
    assert int((sparse_etf(3, 5, 0.5, 0, torch.Generator().manual_seed(0)) == 0).sum()) == 7  # of 7.5


def test_first_step_of_adam_goes_a_rate_along_the_sign_of_the_gradient():
    start, end = (sparse_etf(3, 8, 0.25, steps, torch.Generator().manual_seed(0), lr=1e-3) for steps in (0, 1))
    e = start.clone().requires_grad_()
    lengths = e.norm(dim=1)
    cosines = (e @ e.T) / lengths[:, None] / lengths
    far = torch.stack([torch.stack([cosines[i, j] for j in range(3) if j != i]).max().acos() for i in range(3)])
    (((lengths - 0.1) ** 2).sum() - far.mean()).backward()
    moved = (start != 0) & (e.grad.abs() > 1e-5)
    assert torch.allclose((end - start)[moved], -1e-3 * e.grad.sign()[moved], atol=2e-5)
    assert not (end - start)[start == 0].any()


def test_frame_of_fedloge_moves_by_the_rate_of_its_code():
    start, end = (sparse_etf(3, 8, 0.25, steps, torch.Generator().manual_seed(0)) for steps in (0, 1))
    assert (end - start).abs().max().item() == pytest.approx(1e-4, rel=1e-2)
