"""Control experiments for SFD's synthesis (SAFS) that are not in the paper: other classifiers on the same encoder.

They are the classifiers of CCVR, FedNCM and Fed3R, computed from SFD's own sums. Each class has as many drawn features
as synthetic ones in SAFS, and the classifier is trained on them in the same way, so only the features differ. Their
covariance is SFD's Eq. 10, which divides by n; CCVR's divides by n - 1.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.models.split import StateDict
from raylt.ops.closed_form import nearest_mean_classifier, ridge_classifier
from raylt.ops.moments import isotropic_deviation, moments_from_sums, perturb, unpack
from raylt.seeds import seed_for
from raylt.tree import Tree

Classifier = Literal["safs", "gaussian", "means", "ncm", "ridge", "oracle"]
RIDGE = 0.01  # Fed3R's default.


def draws(kind: Classifier, sums: Mapping[int, Tree], sizes: list[int], seed: int) -> list[Tensor]:
    """Draw Gaussian features of each class, float32 [M_c, d], in the order of `sums`.

    Args:
        kind: "gaussian" draws from N(mu_c, Sigma_c). Otherwise the mean is mu_c, and the standard deviation is the same
            in every direction and for every class.
        sums: Feature sums of each class.
        sizes: Number of features of each class, M_c.
        seed: Seed of the draws.
    """
    class_moments = [moments_from_sums(of_class) for of_class in sums.values()]
    deviation = isotropic_deviation(class_moments)
    made = []
    for c, of_class, size in zip(sums, class_moments, sizes, strict=True):
        generator = torch.Generator().manual_seed(seed_for(seed, c))
        if kind == "gaussian":
            noise = perturb(of_class.cov, size, generator)
        else:
            noise = deviation * torch.randn(size, len(of_class.mean), generator=generator, dtype=torch.float64)
        made.append((of_class.mean + noise).float())
    return made


def closed_form(kind: Classifier, sums: Mapping[int, Tree], classes: int) -> StateDict:
    """Return FedNCM's classifier for the kind "ncm", and Fed3R's classifier for the kind "ridge".

    Args:
        kind: Kind of the classifier.
        sums: Feature sums of each class that any client has.
        classes: Number of classes.
    """
    dim = len(next(iter(sums.values()))["z"])
    z = torch.zeros(classes, dim, dtype=torch.float64)
    n = torch.zeros(classes, dtype=torch.float64)
    for c, of_class in sums.items():
        z[c] = of_class["z"]
        n[c] = of_class["n"]
    if kind == "ncm":
        return nearest_mean_classifier((z / n.clamp(min=1)[:, None]).float(), n > 0)
    second = sum((unpack(of_class["zz"], dim) for of_class in sums.values()), start=torch.zeros(dim, dim).double())
    constant = torch.cat([z.sum(0), n.sum()[None]])  # [d + 1]
    a = torch.cat([F.pad(second, (0, 1)) + F.pad(z.sum(0)[:, None], (dim, 0)), constant[None]])
    return ridge_classifier(a, torch.cat([z, n[:, None]], 1).T, RIDGE)
