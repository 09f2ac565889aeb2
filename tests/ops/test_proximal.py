import torch

from raylt.ops.proximal import squared_distance, with_gradient


def test_squared_distance_is_the_sum_over_all_parameters():
    # (1 - 0)^2 + (2 - 0)^2 + (5 - 3)^2 = 9; gradients 2 (p - a), halved by the factor
    params = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(5.0, requires_grad=True)]
    square = squared_distance(params, [torch.zeros(2), torch.tensor(3.0)])
    assert square.item() == 9
    (0.5 * square).backward()
    assert [p.grad.tolist() for p in params] == [[1.0, 2.0], 2.0]


def test_squared_distance_has_the_bits_of_the_formula_and_of_its_gradient():
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=draw).requires_grad_() for size in (300, 7, 1)]
    anchor = [torch.randn(p.shape, generator=draw) for p in params]
    formula = torch.stack([(p - a).square().sum() for p, a in zip(params, anchor, strict=True)]).sum()
    ours = squared_distance(params, anchor)
    assert torch.equal(ours, formula)
    for mu in (0.01, 0.3):
        got, expected = (torch.autograd.grad(mu / 2 * value, params, retain_graph=True) for value in (ours, formula))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_given_gradient_has_the_bits_of_its_formula_and_adds_zero():
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=draw).requires_grad_() for size in (300, 7, 1)]
    given = [torch.randn(p.shape, generator=draw) for p in params]
    before = [g.clone() for g in given]
    plain = torch.stack([p.square().sum() for p in params]).sum()
    formula = plain + sum(((p - p.detach()) * g).sum() for p, g in zip(params, given, strict=True))
    ours = plain + with_gradient(params, given)
    assert ours.item() == formula.item() == plain.item()
    got, expected = (torch.autograd.grad(value, params, retain_graph=True) for value in (ours, formula))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    scaled = torch.autograd.grad(3 * with_gradient(params, given), params)
    assert all(torch.equal(a, 3 * b) for a, b in zip(scaled, given, strict=True))
    # the given tensors are not changed in place
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
