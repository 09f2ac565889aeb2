"""Paired answers of two arms to the same test images: exact McNemar test, and a bound if no answer differs.

Runs with several seeds share one test set. A small test set cannot show small differences: with 300 images, one image
is 0.33 points. Intervals over seeds do not reflect this limit, in particular if two arms have equal accuracies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from raylt import metrics
from raylt.errors import CheckpointError
from raylt.studies.records.record import RunRecord

TOLERANCE = 1e-9  # maximum difference between an accuracy and the share of correct answers


@dataclass(frozen=True)
class Flips:
    """The differing answers of two arms to the same images, over all seeds that both arms have.

    Attributes:
        answers: Number of images times number of seeds.
        images: Number of test images, which all seeds share.
        better_alone: Number of answers that only the arm called better in the claim gets right.
        worse_alone: Number of answers that only the other arm gets right.
    """

    answers: int
    images: int
    better_alone: int
    worse_alone: int

    @property
    def p(self) -> float:
        """The p value of the exact two-sided McNemar test, as if all answers were independent."""
        flipped = self.better_alone + self.worse_alone
        return float(stats.binomtest(self.better_alone, flipped).pvalue) if flipped else 1.0

    @property
    def largest(self) -> float:
        """An upper bound on the share of differing images, if no answer differs (97.5 %, Clopper and Pearson).

        Smaller differences of accuracies cannot be excluded. More seeds do not lower the bound, since they use the same
        images.
        """
        return 1 - 0.025 ** (1 / self.images)


def flips(better: Mapping[int, RunRecord], worse: Mapping[int, RunRecord]) -> Flips | None:
    """Count the flipped answers between two arms in one cell.

    Args:
        better: Runs of the arm that the claim calls better, by seed.
        worse: Runs of the other arm, by seed.

    Returns:
        The counts, or None if no seed has the answers of both arms. Older runs and clients' own models have no recorded
        answers.
    """
    counts = np.zeros(3, dtype=np.int64)
    images = 0
    for seed in sorted(better.keys() & worse.keys()):
        one, other = _answers(better[seed]), _answers(worse[seed])
        if one is not None and other is not None and len(one) == len(other):
            counts += len(one), (one & ~other).sum(), (other & ~one).sum()
            images = max(images, len(one))
    answers, better_alone, worse_alone = counts.tolist()
    return Flips(answers, images, better_alone, worse_alone) if answers else None


def by_cell(records: Sequence[RunRecord], better: str, worse: str) -> dict[str, Flips]:
    """Return the flipped answers between two arms, by cell; cells without recorded answers are left out."""
    runs: dict[str, dict[str, dict[int, RunRecord]]] = {}
    for record in records:
        if record.state == "done" and record.arm in (better, worse):
            runs.setdefault(record.cell, {better: {}, worse: {}})[record.arm][record.seed] = record
    counted = {cell: flips(arms[better], arms[worse]) for cell, arms in runs.items()}
    return {cell: each for cell, each in counted.items() if each is not None}


def _answers(record: RunRecord) -> np.ndarray | None:
    """Return which images the run's judged model classifies correctly, bool [n], or None if this is unknown.

    The recorded answers are those of the global model. They are not used if the run's accuracy is that of clients' own
    models.

    Raises:
        CheckpointError: The summary has answers for another number of images.
    """
    summary = record.summary or {}
    text = summary.get("answers")
    tests = summary.get("tests")
    if text is None or tests is None:
        return None
    try:
        right = metrics.unpacked(text, tests["images"])
    except ValueError as error:
        raise CheckpointError(
            f"{record.folder}: the answers in its summary cannot be read ({error}). Restore the original file.",
            code="file.malformed",
            path=record.folder,
            key="answers",
        ) from None
    return right if abs(right.mean() - summary["accuracy"]["last"]) < TOLERANCE else None
