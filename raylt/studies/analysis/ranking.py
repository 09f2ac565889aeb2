"""`rank`: order the arms of studies by paired comparisons, with intervals.

A block is one seed of one cell of one study; its runs share the split and the initial weights. Within a block every
pair of arms is compared, and a tie counts half. The strengths s are those of the Bradley-Terry model (Biometrika 1952),
in which arm i is better than arm j with probability 1 / (1 + exp(s_j - s_i)). Two arms without a common block are
compared through arms that share blocks with both.

A diverged run counts as worse than every finished run of its block. Other runs without a result are left out and named,
because their failure says nothing about the arm.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from raylt.errors import ConfigError, count_of
from raylt.studies.analysis.comparison import check_at, lacking_text, line_of_arm, unfinished, whose_models
from raylt.studies.analysis.costs import client_passes
from raylt.studies.analysis.measures import At, measure_of, value_of
from raylt.studies.analysis.statistics import Interval
from raylt.studies.records.record import RunRecord

# Added wins and losses of each arm against strength 0, which keep the strength of an arm that always wins finite.
PRIOR = 0.5
MAX_STEPS = 100  # limit on Newton steps; fits need fewer
MAX_CHANGE = 2.0  # maximum change of a strength in one Newton step, to prevent overshooting
TOLERANCE = 1e-8  # the fit ends when no strength changes by more
BASELINE = "fedavg"  # arm whose runs are the unit of durations
Block = Mapping[str, float | None]  # value by arm; None for a diverged run


@dataclass(frozen=True)
class Ranked:
    """The position of an arm in a ranking, with its uncertainty.

    Attributes:
        strength: Log-odds against an arm of mean strength, with the interval of `half_widths`.
        chance: Probability of being better than a random other arm.
        finished: Number of finished runs.
        planned: Number of seeds in the cells in which the arm has a run in any state.
        diverged: Number of diverged runs.
        time: Duration of a run, including the server's work, as a multiple of FedAvg's in the same block. Median over
            blocks, or None if no block has both.
        cost: Forward and backward passes of a client in a run, as a multiple of FedAvg's; None if not measured.
    """

    arm: str
    strength: Interval
    chance: float
    finished: int
    planned: int
    diverged: int
    time: float | None
    cost: float | None = None


@dataclass(frozen=True)
class Ranking:
    """A ranking of arms, strongest first.

    Attributes:
        studies: Names of the studies that have a block.
        cells: Number of cells over all studies.
        blocks: Number of blocks with at least two arms.
        left_out: One line with the reason for each run that neither finished nor diverged, and for each arm and cell
            with runs that lack the measure or are the only ones of their seed.
        models: One line for each study in which some arms have clients' own models and others do not.
        versions: One line for each study whose runs were made by several versions of the code.
        unsealed: One line for each study with runs that no hash binds to their summaries.
    """

    measure: str
    at: At
    level: float
    studies: list[str]
    cells: int
    blocks: int
    arms: list[Ranked]
    left_out: list[str]
    models: list[str]
    versions: list[str]
    unsealed: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the ranking as JSON values."""
        return {"schema": 1, **asdict(self)}


def rank(
    studies: Mapping[str, Sequence[RunRecord]], measure: str = "accuracy", at: At = "last", level: float = 0.95
) -> Ranking:
    """Rank the arms of studies; arms with the same name count as one method.

    Args:
        studies: Records in any state, by name of the study.
        measure: Name of the measure.
        at: Round whose figure counts.
        level: Confidence of the intervals.

    Raises:
        ConfigError: The measure is unknown, only the last round has it, no block has two arms with it, or no chain of
            blocks connects two arms.
    """
    check_at(measure, at)
    cells = _cells(studies, measure, at)
    blocks = [block for each in cells.values() for block in each]
    arms = sorted({arm for block in blocks for arm in block})
    if not blocks:
        raise ConfigError(
            f"measure: no seed has two arms with this measure ({measure}). Run more arms, or choose another measure.",
            code="study.no-figure",
            key="measure",
            value=measure,
        )
    _check_connected(blocks)
    higher = measure_of(measure).higher
    wins = [np.stack([_wins(block, arms, higher) for block in each]) for each in cells.values()]  # [B, A, A] each
    strengths = fit(np.concatenate(wins).sum(0))
    chances = _chances(strengths)
    halves = half_widths(wins, strengths, level)
    records = [record for each in studies.values() for record in each]
    planned = _planned(studies)
    times = _relative_times(studies)
    finished = {name: [record for record in each if record.state == "done"] for name, each in studies.items()}
    ranked = [
        Ranked(
            arm,
            _interval(strengths[i], halves[i]),
            float(np.delete(chances[i], i).mean()),
            sum(record.arm == arm and record.state == "done" for record in records),
            planned[arm],
            sum(record.arm == arm and record.diverged for record in records),
            times.get(arm),
        )
        for i, arm in enumerate(arms)
    ]
    # rounded, since the last bit of equal strengths depends on the processor
    ranked.sort(key=lambda each: (-round(each.strength.estimate, 9), each.arm))
    return Ranking(
        measure,
        at,
        level,
        list(dict.fromkeys(study for study, _ in cells)),
        len(cells),
        len(blocks),
        ranked,
        _left_out(studies, measure, at),
        [f"{name}, {line}" for name, done in finished.items() for line in whose_models(done, measure)],
        _versions(finished),
        _unsealed(finished),
    )


def _check_connected(blocks: Sequence[Block]) -> None:
    """Check that blocks connect all arms with each other, directly or through other arms.

    Only the prior would decide between two arms that nothing connects.
    """
    groups: list[set[str]] = []
    for block in blocks:
        apart = [group for group in groups if group.isdisjoint(block)]
        joined = [group for group in groups if not group.isdisjoint(block)]
        groups = [*apart, set(block).union(*joined)]
    if len(groups) > 1:
        names = sorted(", ".join(sorted(group)) for group in groups)
        raise ConfigError(
            f"arms: no seeds connect these groups with each other ({'; '.join(names)}). Rank each group alone, or run "
            "an arm of one group on the cells and seeds of the other.",
            code="study.not-connected",
            key="arms",
            groups=names,
        )


def _left_out(studies: Mapping[str, Sequence[RunRecord]], measure: str, at: At) -> list[str]:
    """Return the lines about runs that the ranking does not count; see `Ranking`."""
    lines = []
    for name, records in studies.items():
        uncounted: dict[tuple[str, str, str], list[RunRecord]] = {}
        with_value = [record for record in records if _counts(record, measure, at)]
        of_seed = Counter((record.cell, record.seed) for record in with_value)
        for record in records:
            if record.state != "done" and not record.diverged:
                lines.append(f"{name}, {unfinished(record)}")
            elif not _counts(record, measure, at):
                uncounted.setdefault((record.cell, record.arm, lacking_text(measure, at)), []).append(record)
            elif of_seed[record.cell, record.seed] == 1:
                alone = "no other arm has this figure with the same seed"
                uncounted.setdefault((record.cell, record.arm, alone), []).append(record)
        lines += [f"{name}, {line_of_arm(runs, problem)}" for (_, _, problem), runs in uncounted.items()]
    return lines


def _counts(record: RunRecord, measure: str, at: At) -> bool:
    """Return whether a run can be compared with others: it has the measure, or it diverged."""
    return record.diverged or (record.state == "done" and value_of(record, measure, at) is not None)


def _versions(finished: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """Return a line with the number of versions of the code, or of a plugin, for each study whose runs have several."""
    versions: dict[tuple[str, str], set[str]] = {}
    for name, done in finished.items():
        for run in done:
            versions.setdefault((name, ""), set()).update(run.made.get("codes", ()))
            for plugin, sha256 in run.made.get("plugins", {}).items():
                versions.setdefault((name, f" of {plugin}"), set()).add(sha256)
    return [f"{name}: {len(each)} versions{what}" for (name, what), each in versions.items() if len(each) > 1]


def _unsealed(finished: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """Return a line with the number of unsealed runs, for each study that has some."""
    counts = {name: sum(not run.sealed for run in done) for name, done in finished.items()}
    return [f"{name}: {count_of(count, 'run')}" for name, count in counts.items() if count]


def _relative_times(studies: Mapping[str, Sequence[RunRecord]]) -> dict[str, float]:
    """Return the duration of each arm's runs as a multiple of FedAvg's, the median over blocks."""
    ratios: dict[str, list[float]] = {}
    for records in studies.values():
        done = [record for record in records if record.state == "done" and record.seconds]
        of_baseline = {(record.cell, record.seed): record.seconds for record in done if record.arm == BASELINE}
        for record in done:
            if (record.cell, record.seed) in of_baseline:
                ratio = record.seconds / of_baseline[record.cell, record.seed]
                ratios.setdefault(record.arm, []).append(ratio)
    return {arm: statistics.median(each) for arm, each in ratios.items()}


def with_costs(ranking: Ranking, studies: Mapping[str, Sequence[RunRecord]]) -> Ranking:
    """Return the ranking with each arm's costs, computed from its first run; see `client_passes`."""
    settings: dict[str, Mapping[str, Any]] = {}
    for records in studies.values():
        for record in records:
            if record.config:
                settings.setdefault(record.arm, record.config)
    arms = [replace(arm, cost=client_passes(settings[arm.arm])) if arm.arm in settings else arm for arm in ranking.arms]
    return replace(ranking, arms=arms)


def _interval(strength: float, half: float) -> Interval:
    if np.isnan(half):
        return Interval(float(strength), None, None)
    return Interval(float(strength), float(strength - half), float(strength + half))


def fit(wins: np.ndarray) -> np.ndarray:
    """Fit the Bradley-Terry model to wins, and return the strengths with mean 0, float64 [A].

    The strengths maximise a concave likelihood, with damped Newton steps. A minorisation algorithm would need thousands
    of sweeps if an arm wins nearly always.

    Args:
        wins: Number of comparisons that the first arm won against the second, [A, A]; ties count 1/2.
    """
    met = wins + wins.T
    won = wins.sum(1) + PRIOR
    strengths = np.zeros(len(wins))
    for _ in range(MAX_STEPS):
        own = _logistic(strengths)  # win probability against strength 0, for the prior
        slope = won - (met * _chances(strengths)).sum(1) - 2 * PRIOR * own
        step = np.linalg.solve(_curvature(met, strengths), slope)
        step *= min(1.0, MAX_CHANGE / max(np.abs(step).max(), TOLERANCE))
        strengths += step
        if np.abs(step).max() < TOLERANCE:
            break
    return strengths - strengths.mean()


def half_widths(wins: Sequence[np.ndarray], strengths: np.ndarray, level: float) -> np.ndarray:
    """Return half the widths of t intervals of the strengths, float64 [A], NaN for an arm without two blocks in a cell.

    The comparisons of a block are not independent, because its runs share the split and the initial weights. So the
    larger of two variances is used. The first is that of the likelihood, as if comparisons were independent. The second
    is that of the blocks' slopes around the mean slope of their cell (the sandwich estimate for clusters, Liang and
    Zeger, Biometrika 1986). The second is too small if all blocks agree, and the first if they do not. The t
    distribution of an arm has one degree of freedom for each of the arm's blocks beyond its first in a cell, since
    blocks without the arm say little about its spread. In simulations (tests/studies/analysis/test_ranking.py) such
    intervals cover at least 93 % at a level of 95 %: with three and six seeds, and of an arm with few blocks.

    Args:
        wins: Wins in the B blocks of each cell, [B, A, A].
        strengths: Strengths from `fit`, [A].
        level: Confidence of the intervals.
    """
    arms = len(strengths)
    total = np.concatenate(wins).sum(0)
    centre = np.eye(arms) - 1 / arms
    inverse = np.linalg.inv(_curvature(total + total.T, strengths))
    spread = np.zeros((arms, arms))
    for blocks in wins:
        met = blocks + blocks.swapaxes(1, 2)
        slopes = blocks.sum(2) - (met * _chances(strengths)).sum(2)
        slopes -= slopes.mean(0)
        if len(blocks) > 1:
            spread += slopes.T @ slopes * len(blocks) / (len(blocks) - 1)
    of_blocks = np.diag(centre @ inverse @ spread @ inverse @ centre)
    of_comparisons = np.diag(centre @ inverse @ centre)
    freedom = sum(np.maximum(_with_arm(blocks) - 1, 0) for blocks in wins)  # [A]
    return stats.t.ppf((1 + level) / 2, freedom) * np.sqrt(np.maximum(of_blocks, of_comparisons))


def _with_arm(blocks: np.ndarray) -> np.ndarray:
    """Return the number of a cell's blocks that contain each arm, [A], from the wins in its blocks, [B, A, A]."""
    return ((blocks + blocks.swapaxes(1, 2)).sum(2) > 0).sum(0)


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _chances(strengths: np.ndarray) -> np.ndarray:
    """Return the probability that the first arm is better than the second, [A, A]."""
    return _logistic(strengths[:, None] - strengths[None, :])


def _curvature(met: np.ndarray, strengths: np.ndarray) -> np.ndarray:
    """Return the negative second derivative of the log likelihood, [A, A].

    Args:
        met: Number of comparisons of each pair, [A, A].
    """
    chance, own = _chances(strengths), _logistic(strengths)
    bend = met * chance * (1 - chance)
    return np.diag(bend.sum(1) + 2 * PRIOR * own * (1 - own)) - bend


def _cells(
    studies: Mapping[str, Sequence[RunRecord]], measure: str, at: At
) -> dict[tuple[str, str], list[dict[str, float | None]]]:
    """Return, for each cell, one mapping per seed (a block) from arms to measured values.

    Blocks of a single arm are left out.
    """
    cells: dict[tuple[str, str], dict[int, dict[str, float | None]]] = {}
    for name, records in studies.items():
        for record in records:
            if _counts(record, measure, at):
                value = None if record.diverged else value_of(record, measure, at)
                cells.setdefault((name, record.cell), {}).setdefault(record.seed, {})[record.arm] = value
    kept = {key: [block for block in each.values() if len(block) > 1] for key, each in cells.items()}
    return {key: each for key, each in kept.items() if each}


def _planned(studies: Mapping[str, Sequence[RunRecord]]) -> Counter[str]:
    """Return each arm's number of seeds, summed over the cells in which the arm has a run."""
    planned: Counter[str] = Counter()
    for records in studies.values():
        for cell in {record.cell for record in records}:
            own = [record for record in records if record.cell == cell]
            seeds = len({record.seed for record in own})
            planned.update(dict.fromkeys({record.arm for record in own}, seeds))
    return planned


def _wins(block: Block, arms: Sequence[str], higher: bool) -> np.ndarray:
    """Return the matrix of wins between arms in a block, float64 [A, A]: 1/2 for ties, 0 for missing arms."""
    values = np.array([_signed(block[arm], higher) if arm in block else np.nan for arm in arms])
    present = ~np.isnan(values)
    better = (values[:, None] > values[None]) + 0.5 * (values[:, None] == values[None])
    return better * (present[:, None] & present[None] & ~np.eye(len(arms), dtype=bool))


def _signed(value: float | None, higher: bool) -> float:
    """Return a value with its sign changed if lower is better; a diverged run counts as minus infinity."""
    if value is None:
        return -np.inf
    return value if higher else -value
