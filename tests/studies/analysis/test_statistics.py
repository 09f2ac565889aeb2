import numpy as np
import pytest
from scipy import stats

from raylt.studies.analysis import statistics
from raylt.studies.analysis.claims import Claim, ClaimFigures, judge
from raylt.studies.analysis.statistics import Interval, holm, improvement, mean_interval, over_cells, paired


def test_interval_of_the_mean_by_hand():
    # mean 3, sd sqrt(2.5), n = 5: 3 +- t(0.975, 4) * sqrt(2.5 / 5) = 3 +- 2.776445 * 0.707107 = 3 +- 1.963243
    found = mean_interval([1, 2, 3, 4, 5])
    assert (found.estimate, found.low, found.high) == (3.0, pytest.approx(1.036757), pytest.approx(4.963243))


def test_one_value_has_no_interval_and_equal_ones_have_one_without_width():
    assert mean_interval([0.5]).low is None
    assert not mean_interval([0.5]).holds(0.5)
    same = mean_interval([0.5, 0.5])
    assert (same.low, same.high) == (0.5, 0.5)


def test_paired_agrees_with_scipys_test_of_related_samples():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.6, 0.02, 8), rng.normal(0.5, 0.02, 8)
    found, expected = paired(a.tolist(), b.tolist()), stats.ttest_rel(a, b)
    assert found.p == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval(0.95)
    assert (found.difference.low, found.difference.high) == (pytest.approx(low), pytest.approx(high))


def test_interval_of_a_difference_has_the_level_that_is_asked_for():
    # differences 1 2 3 4 5: 3 +- t(0.95, 4) * sqrt(2.5 / 5) = 3 +- 2.131847 * 0.707107 = 3 +- 1.507443
    found = paired([2, 4, 6, 8, 10], [1, 2, 3, 4, 5], 0.9).difference
    assert (found.estimate, found.low, found.high) == (3.0, pytest.approx(1.492557), pytest.approx(4.507443))


def test_no_p_value_under_six_seeds_or_without_any_spread():
    assert paired([1, 2, 3, 4, 6], [0, 0, 0, 0, 0]).p is None
    assert paired([1, 2, 3, 4, 5, 7], [0] * 6).p is not None
    assert paired([1] * 6, [0] * 6).p is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e9 / 3])  # bytes are large numbers
def test_what_rounding_leaves_is_no_spread(unit):
    reference = [unit * (0.3 + 0.01 * seed) for seed in range(6)]
    found = paired([value + 0.1 * unit for value in reference], reference)
    assert (found.p, found.difference.low) == (None, found.difference.high)


def test_holm_by_hand():
    # sorted 0.01 0.03 0.04 0.5: x4 = 0.04, x3 = 0.09, x2 = 0.08, raised to 0.09, x1 = 0.5
    assert holm([0.04, 0.01, 0.5, 0.03]) == pytest.approx([0.09, 0.04, 0.5, 0.09])
    assert holm([]) == []


def test_interquartile_mean_leaves_a_quarter_at_each_end_out():
    # the middle four of 8 values are 3 4 5 6
    found = over_cells([[1, 2, 3, 4], [5, 6, 7, 800]])
    assert found.estimate == 4.5
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 4.5 <= found.high


def test_over_cells_draws_the_same_every_time_and_asks_for_two_cells_of_three_seeds():
    cells = np.random.default_rng(0).random((2, 6)).tolist()
    assert over_cells(cells) == over_cells(cells)
    assert over_cells([[1, 2, 3]]).low is None
    assert over_cells([[1, 2], [3, 4]]).low is None
    assert over_cells([[0.1, 0.2, 0.3], [0.5]]).low is None  # three seeds of each cell


def test_probability_of_improvement_counts_pairs_and_ties_half():
    # cell 1: (2, 3) over (1, 2): 2>1, 2=2, 3>1, 3>2, so 3.5 / 4; cell 2: none
    assert improvement([[2, 3], [0, 0]], [[1, 2], [1, 1]]).estimate == (3.5 / 4 + 0) / 2


def test_intervals_over_cells_have_the_level_that_is_asked_for():
    rng = np.random.default_rng(3)
    arm, reference = rng.normal(0.6, 0.05, (2, 6)), rng.normal(0.57, 0.05, (2, 6))  # [cell, seed]
    seeds = rng.integers(6, size=(4000, 2, 6))  # seeds are drawn in each cell, for both arms together
    drawn, drawn_reference = (np.take_along_axis(values[None], seeds, axis=2) for values in (arm, reference))
    middles = np.sort(drawn.reshape(4000, 12))[:, 3:9].mean(1)
    wins = (drawn[..., :, None] > drawn_reference[..., None, :]).mean((1, 2, 3))
    ties = (drawn[..., :, None] == drawn_reference[..., None, :]).mean((1, 2, 3))
    for of_level, resampled in (
        (lambda level: over_cells(arm.tolist(), level), middles),
        (lambda level: improvement(arm.tolist(), reference.tolist(), level), wins + ties / 2),
    ):
        half, most = of_level(0.5), of_level(0.95)
        assert most.low < half.low < half.estimate < half.high < most.high
        for found, quantiles in ((half, (0.25, 0.75)), (most, (0.025, 0.975))):
            # widened by sqrt(6 / 5) and by the t distribution with 5 degrees of freedom in each of two cells
            factor = (6 / 5) ** 0.5 * stats.t.ppf(quantiles[1], 10) / stats.norm.ppf(quantiles[1])
            # draws of other numbers, whose quantiles differ by a small part of the spread
            expected = found.estimate + factor * (np.quantile(resampled, quantiles) - found.estimate)
            assert (found.low, found.high) == pytest.approx(expected, abs=0.2 * resampled.std())


@pytest.mark.parametrize(("seeds", "fewest", "freedom"), [([6, 6], 6, 10), ([3] * 9, 3, 18), ([4, 3, 8], 3, 12)])
def test_few_seeds_widen_intervals_by_their_variance_and_by_the_t_distribution(seeds, fewest, freedom):
    quantiles = stats.t.ppf(0.95, freedom) / stats.norm.ppf(0.95)
    assert statistics._widening(seeds, 0.9) == pytest.approx((fewest / (fewest - 1)) ** 0.5 * quantiles)


def test_probability_of_improvement_stays_between_0_and_1():
    above, below = [[1, 2, 3, 4]] * 3, [[0, 0, 3, 0], [0] * 4, [0] * 4]
    assert 0 < improvement(above, below).low < improvement(above, below).estimate < 1
    assert (improvement(above, below).high, improvement(below, above).low) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("cells", "seeds"), [(2, 3), (4, 3), (4, 6)])
def test_intervals_over_cells_cover_the_truth_with_few_seeds(cells, seeds, monkeypatch):
    """Cells whose means differ by 1 from one to the next; the reference is 0.5 above the arm, in units of the noise."""
    monkeypatch.setattr(statistics, "RESAMPLES", 500)
    rng = np.random.default_rng(0)
    means = np.arange(cells)[:, None]

    def drawn(*first: int) -> np.ndarray:
        return means + rng.standard_normal((*first, cells, seeds))

    middle = stats.trim_mean(drawn(20_000).reshape(20_000, -1), 0.25, axis=1).mean()
    better = stats.norm.cdf(0.5 / 2**0.5)
    covered = []
    for _ in range(300):
        arm, reference = drawn(), drawn() + 0.5
        covered.append([over_cells(arm).holds(middle), improvement(reference, arm).holds(better)])
    assert np.mean(covered, axis=0) == pytest.approx([0.94, 0.94], abs=0.04)


@pytest.mark.parametrize(
    ("measure", "sign", "verdict"),
    [("accuracy", 1, "holds"), ("accuracy", -1, "refuted"), ("bytes_up", -1, "holds"), ("bytes_up", 1, "refuted")],
)
def test_the_better_side_of_a_claim_is_that_of_its_measure(measure, sign, verdict):
    better = {("a", ""): {seed: sign * (10.0 + (-1) ** seed) for seed in range(6)}}
    worse = {("b", ""): dict.fromkeys(range(6), 0.0)}
    figures = ClaimFigures(Claim("a", "b", measure), "last", better, worse, {}, {"": 6})
    (judged,) = judge([figures], [""], 0.95)
    assert judged.verdict == verdict
    assert figures.verdict("", judged.difference, 0.05) == "open"


def test_an_interval_holds_its_ends():
    values = (-0.1, 0.0, 1.0, 2.0, 2.1)
    assert [Interval(1.0, 0.0, 2.0).holds(value) for value in values] == [False, True, True, True, False]
    assert not Interval(1.0, None, None).holds(1.0)


def test_claims_that_hold_one_by_one_are_open_as_a_family():
    # six differences m - 1, m + 1, m - 1, ... have the standard error 1 / sqrt(5), so t = m sqrt(5)
    cells = {"c0": 0.03, "c1": 0.04}
    claim = Claim("a", "b", "accuracy")
    better = {
        ("a", cell): {seed: stats.t.isf(p / 2, 5) / 5**0.5 + (-1) ** seed for seed in range(6)}
        for cell, p in cells.items()
    }
    worse = {("b", cell): dict.fromkeys(range(6), 0.0) for cell in cells}
    figures = ClaimFigures(claim, "last", better, worse, {}, dict.fromkeys(cells, 6))
    together = judge([figures], list(cells), 0.95)
    assert [each.difference.p for each in together] == pytest.approx([0.03, 0.04])
    assert [each.p for each in together] == pytest.approx([0.06, 0.06])  # twice 0.03, and no less than that
    assert [each.verdict for each in together] == ["open", "open"]
    assert [judge([figures], [cell], 0.95)[0].verdict for cell in cells] == ["holds", "holds"]


@pytest.mark.slow
def test_intervals_of_a_thousand_synthetic_studies_cover_the_truth_and_holm_keeps_false_claims_rare():
    # Each study has 3 arms, 2 cells and 6 seeds. All arms share the difficulty of a split (sd 0.03); each run has noise
    # of its own (sd 0.01). "better" is 0.02 above the reference and "equal" is not, so four of the eight claims are
    # false: "equal > reference" twice, and "reference > equal" twice.
    rng = np.random.default_rng(17)
    effects = {"reference": 0.0, "better": 0.02, "equal": 0.0}
    claims = [
        Claim("better", "reference", "accuracy"),
        Claim("equal", "reference", "accuracy"),
        Claim("reference", "equal", "accuracy"),
        Claim("better", "equal", "accuracy"),
    ]
    cells = ["c0", "c1"]
    covered, intervals, false_claims, true_ones = 0, 0, 0, 0
    for _ in range(1000):
        hard, noise = rng.normal(0, 0.03, (2, 6)), rng.normal(0, 0.01, (3, 2, 6))
        values = {
            (arm, cell): dict(enumerate(effect + hard[c] + noise[a, c]))
            for a, (arm, effect) in enumerate(effects.items())
            for c, cell in enumerate(cells)
        }
        judged = judge(
            [ClaimFigures(claim, "last", values, values, {}, dict.fromkeys(cells, 6)) for claim in claims], cells, 0.95
        )
        assert len(judged) == 8
        for each in judged:
            intervals += 1
            covered += each.difference.difference.holds(effects[each.claim.better] - effects[each.claim.worse])
        false_claims += any(each.verdict == "holds" and each.claim.better != "better" for each in judged)
        true_ones += sum(each.verdict == "holds" and each.claim.better == "better" for each in judged)
    assert 0.93 <= covered / intervals <= 0.97
    assert false_claims / 1000 < 0.05  # counts studies with any false claim, not claims
    assert true_ones / 4000 > 0.3  # true differences are found
