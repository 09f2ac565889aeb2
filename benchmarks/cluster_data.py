"""Measures, round by round, whether MuPFL's client clusters follow the clients' data.

    python benchmarks/cluster_data.py RUN [RUN ...]

Two clients differ by the total variation distance of their class shares. Prints, for each run, the mean over its
rounds of the share of 300 random assignments (the same cluster sizes) whose clients differ more within clusters: 50 %
is chance.
"""

import argparse
from pathlib import Path

import numpy as np

from raylt.errors import RayltError
from raylt.runs.run import Run

DRAWS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    for folder in parser.parse_args().runs:
        run = Run.open(folder)
        beaten, kappas = follow(run)
        print(
            f"{run.name}: {np.mean(kappas):.1f} clusters, beats {100 * np.mean(beaten):.0f} % of random ones "
            f"({len(beaten)} rounds)"
        )


def follow(run: Run) -> tuple[list[float], list[int]]:
    """Compare each round's clusters with random assignments; return the shares of worse ones and the cluster counts.

    Both lists cover the rounds with more than one cluster.
    """
    counts = run.task.client_counts
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    distances = np.abs(shares[:, None] - shares[None]).sum(-1) / 2  # [K, K]
    rng, beaten, kappas = np.random.default_rng(0), [], []
    for report in run.reports:
        labels = np.array(report["figures"].get("clusters", []))
        if len(set(labels.tolist())) > 1:
            ids = report["figures"].get("clustered", report["participants"])
            between = distances[np.ix_(ids, ids)]
            random = [within(rng.permutation(labels), between) for _ in range(DRAWS)]
            beaten.append(float(np.mean(within(labels, between) < np.array(random))))
            kappas.append(report["figures"]["kappa"])
    return beaten, kappas


def within(labels: np.ndarray, distances: np.ndarray) -> float:
    """Return the mean distance between two members of the same cluster; 0 if each member is alone."""
    same = (labels[:, None] == labels[None]) & ~np.eye(len(labels), dtype=bool)
    return float(distances[same].mean()) if same.any() else 0.0


if __name__ == "__main__":
    try:
        main()
    except RayltError as error:
        raise SystemExit(f"error: {error}") from None
