"""Measures SFD's synthesis: seconds and peak memory for C classes at d = 512, D = 5000, M_c 600..2000, T = 100.

    python benchmarks/synthesis.py --classes 10
    python benchmarks/synthesis.py --classes 100 --sample 10     # every tenth class is computed, times are scaled
    python benchmarks/synthesis.py --autograd                    # one step against autograd through the same equations

Measured on one core of an AMD EPYC with AVX-512, other load on the machine: C = 10 takes 154 CPU s and re-training 8,
peak memory 0.8 GB; C = 100 takes 1,701 CPU s (from every tenth class) and re-training 99, peak memory 1.3 GB. One step
at M = 1300 takes 147 CPU ms, autograd through the same equations 308.

One process with one thread: this is what one client actor does; with n of them divide by n. CPU seconds are shown
beside wall seconds, since other load on the machine changes only the latter.

What makes it fast, from the first version to this one (raylt/methods/sfd/synthesis.py has the formulas): the gradient
in closed form instead of autograd through Cholesky; Omega L_g computed once per class instead of Z_syn at every step;
Fourier columns taken through forward and backward 128 at a time, so that nothing of size M x D is ever in memory; the
Cholesky factors in float64, all that is large in float32, and the last transform in float64; classes spread over
processes.
"""

import argparse
import resource
import time

import numpy as np
import torch

from raylt.core.training.fit_classifier import fit_classifier
from raylt.data.splits.long_tail import long_tail_counts
from raylt.methods.sfd.fourier import draw_frequencies, fourier_sum
from raylt.methods.sfd.method import SFD
from raylt.methods.sfd.synthesis import (
    Parts,
    Prepared,
    Target,
    align,
    arr,
    bank_gradient,
    bank_sizes,
    cholesky,
    mmd,
)
from raylt.models.split import linear
from raylt.ops.moments import class_sums, moments_from_sums
from raylt.tree import Tree

SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--sample", type=int, default=1, help="compute every n-th class")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--autograd", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    method = SFD()
    if arguments.autograd:
        compare(method, arguments.dim)
        return
    largest = 5000 if arguments.classes <= 10 else 500
    counts = long_tail_counts(np.full(arguments.classes, largest), 100).tolist()
    sizes = bank_sizes(counts, *method.bank(arguments.dim))
    items = [
        {"sums": sums_of(method, n, arguments.dim, c), "size": m, "fourier": SEED, "bank": c}
        for c, (n, m) in enumerate(zip(counts, sizes, strict=True))
    ]
    base = peak()
    wall, cpu = time.perf_counter(), time.process_time()
    chosen = items[:: arguments.sample]
    made = []
    for item in chosen:
        made.append(method.synthesise(item)["z"])
        print(f"  M = {item['size']}: {time.process_time() - cpu:.0f} CPU s so far", flush=True)
    share = sum(sizes) / sum(item["size"] for item in chosen)  # the cost is linear in M
    wall, cpu = (time.perf_counter() - wall) * share, (time.process_time() - cpu) * share
    # all features, as the server holds them at the end (copies replace classes that were not computed)
    z = torch.cat(
        [made[c // arguments.sample][torch.arange(m) % len(made[c // arguments.sample])] for c, m in enumerate(sizes)]
    )
    y = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    began = time.process_time()
    fit_classifier(
        linear(torch.zeros(len(sizes), arguments.dim), torch.zeros(len(sizes))),
        z,
        y,
        epochs=1,
        batch=method.retrain_batch,
        lr=method.retrain_lr,
        momentum=method.retrain_momentum,
        weight_decay=method.retrain_weight_decay,
        seed=0,
    )
    print(
        f"C = {len(sizes)}, d = {arguments.dim}, D = {method.rf_dim}, M_c {min(sizes)}..{max(sizes)} "
        f"({sum(sizes)} in all), T = {method.synthesis_steps}: {wall:.0f} s ({cpu:.0f} CPU s); re-training "
        f"{(time.process_time() - began) * method.retrain_epochs:.0f} CPU s for {method.retrain_epochs} epochs; peak "
        f"memory {peak():.2f} GB, {base:.2f} with the statistics alone"
    )


def sums_of(method: SFD, n: int, dim: int, c: int) -> Tree:
    """Return the sums of n random features that look like features after a ReLU and average pooling."""
    generator = torch.Generator().manual_seed(c)
    mixing = torch.randn(dim, dim, generator=generator) / dim**0.5
    z = (torch.randn(n, dim, generator=generator) @ mixing + 0.3).relu()
    sums = class_sums(z, torch.zeros(n, dtype=torch.int64))[0]
    return sums | {"phi": fourier_sum(z, method.frequencies(dim, SEED))}


def compare(method: SFD, dim: int) -> None:
    """Compare one step's gradient in closed form with the gradient by autograd."""
    sums = sums_of(method, 3000, dim, 0)
    of_class = moments_from_sums(sums)
    target = Target(
        of_class.mean,
        cholesky(of_class.cov, 1e-5)[0],
        sums["phi"] / sums["n"],
        draw_frequencies(dim, method.rf_dim, method.gamma_rbf, method.rf_type, SEED),
    )
    prepared = Prepared.of(target, Parts())
    raw = torch.randn(1300, dim, generator=torch.Generator().manual_seed(0))

    def by_hand() -> torch.Tensor:
        return bank_gradient(raw, prepared)[0]

    def by_autograd() -> torch.Tensor:
        leaf = raw.clone().requires_grad_()
        z = align(leaf, target).float()
        return torch.autograd.grad(mmd(z, target) + arr(z), leaf)[0]

    gradients = {}
    for name, fn in {"closed form": by_hand, "autograd": by_autograd}.items():
        gradients[name] = fn()
        began = time.process_time()
        for _ in range(5):
            fn()
        print(f"{name}: {(time.process_time() - began) / 5 * 1000:.0f} CPU ms a step at M = 1300")
    first, second = gradients.values()
    print(f"relative difference {((first - second).norm() / second.norm()).item():.1e}")


def peak() -> float:
    """Return the peak resident memory of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
