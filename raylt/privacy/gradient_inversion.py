"""Gradient inversion: reconstruct an image from a client's one-step update (Geiping et al., NeurIPS 2020).

The attack maximises the cosine between the reconstruction's gradient and the uploaded gradient, with a penalty on the
total variation that keeps the image smooth. The label follows from the classifier's gradient: if features are positive,
only the row of the true class is negative (Zhao et al., 2020).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def gradient_of(model: nn.Module, x: Tensor, y: Tensor, create_graph: bool = False) -> list[Tensor]:
    """Return the gradient of the model's cross-entropy with respect to the parameters of encoder and classifier.

    Other parts of the model, which some methods add, are left out.

    Args:
        model: The model.
        x: Images, [n, channels, H, W].
        y: Labels, int64 [n].
        create_graph: Whether the gradient can be differentiated.
    """
    parameters = [p for name, p in model.named_parameters() if name.startswith(("encoder.", "classifier."))]
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=create_graph))


def label_of(gradient: Sequence[Tensor]) -> Tensor:
    """Return the label of the image with the given gradient, int64 [1].

    The classifier must be the last matrix of the gradient.
    """
    weight = next(g for g in reversed(gradient) if g.ndim == 2)
    return weight.sum(1).argmin().reshape(1)


def total_variation(x: Tensor) -> Tensor:
    """Return the total variation of images, a scalar: the mean absolute difference of neighbouring pixels."""
    return (x.diff(dim=-1)).abs().mean() + (x.diff(dim=-2)).abs().mean()


def invert_gradient(
    model: nn.Module,
    gradient: Sequence[Tensor],
    shape: tuple[int, int, int],
    mean: Tensor,
    std: Tensor,
    steps: int = 400,
    variation: float = 1e-2,
    seed: int = 0,
    tries: int = 2,
) -> Tensor:
    """Reconstruct an image [1, channels, H, W] in [0, 1] whose gradient has the direction of the given gradient.

    Args:
        model: The model, in evaluation mode.
        gradient: The uploaded gradient, as from `gradient_of`.
        shape: Height, width and channels of the image.
        mean, std: Mean and standard deviation with which the client normalises channels, [channels] each.
        steps: Number of Adam steps.
        variation: Weight of the total variation.
        seed: Seed of the starting noise.
        tries: Number of starts from noise; the result with the closest gradient is returned.
    """
    height, width, channels = shape
    y = label_of(gradient)
    best = torch.inf
    image = torch.empty(0)

    def distance_at(x: Tensor) -> Tensor:
        return _cosine_distance(gradient_of(model, (x - mean[:, None, None]) / std[:, None, None], y, True), gradient)

    for number in range(tries):
        generator = torch.Generator().manual_seed(seed + number)
        x = torch.rand(1, channels, height, width, generator=generator).to(mean.device).requires_grad_()
        optimiser = torch.optim.Adam([x], 0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            optimiser.zero_grad()
            distance = distance_at(x)
            (distance + variation * total_variation(x)).backward()
            assert x.grad is not None
            x.grad.sign_()  # signed gradients, as in the authors' code
            optimiser.step()
            schedule.step()
            with torch.no_grad():
                x.clamp_(0, 1)
        final = distance_at(x).item()
        if final < best:
            best = final
            image = x.detach()
    return image


def _cosine_distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    product = sum(((x * y).sum() for x, y in zip(a, b, strict=True)), start=torch.zeros(()))
    lengths = [sum((x.square().sum() for x in side), start=torch.zeros(())).sqrt() for side in (a, b)]
    return 1 - product / (lengths[0] * lengths[1]).clamp(min=1e-12)
