"""Answers of two arms to the same test images: exact McNemar test, and the bound where none differs."""

import math

import pytest
import torch
from made import record
from refusals import refused

from raylt import metrics
from raylt.errors import CheckpointError
from raylt.studies.analysis.answers import Flips, by_cell, flips
from raylt.studies.analysis.claims import Claim
from raylt.studies.analysis.comparison import compare
from raylt.studies.report.comparison_tables import answers_text, claims_table, comparison_table


def with_answers(arm, seed, right, images=None):
    """Return the record of a run that answered these images correctly."""
    right = torch.tensor(right, dtype=torch.bool)
    one = record(arm, seed, right.float().mean().item())
    one.summary["answers"] = metrics.packed(right)
    one.summary["accuracy"]["last"] = right.double().mean().item()
    images = len(right) if images is None else images
    one.summary["tests"] = {
        "images": images,
        "groups": {"many": images, "medium": 0, "few": 0},
        "thresholds": [20, 100],
        "own": None,
        "one_class": [],
    }
    return one


def test_truth_values_come_back_from_their_text():
    for n in (1, 7, 8, 9, 300):
        right = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5
        assert metrics.unpacked(metrics.packed(right), n).tolist() == right.tolist()
    with pytest.raises(ValueError, match="truth values"):
        metrics.unpacked(metrics.packed(torch.ones(9, dtype=torch.bool)), 17)


def test_flips_are_counted_over_the_seeds_that_both_have():
    better = {seed: with_answers("b", seed, [1, 1, 1, 0, 1]) for seed in (0, 1, 3)}
    worse = {seed: with_answers("a", seed, [1, 0, 0, 1, 1]) for seed in (0, 1, 2)}
    assert flips(better, worse) == Flips(answers=10, images=5, better_alone=4, worse_alone=2)
    assert flips(better, {2: worse[2]}) is None


def test_the_mcnemar_test_is_exact():
    # 4 against 2 of 6 fair coins: 2 (C(6,4) + C(6,5) + C(6,6)) / 2^6
    assert Flips(10, 5, 4, 2).p == pytest.approx(2 * (15 + 6 + 1) / 64)
    assert Flips(10, 5, 5, 0).p == pytest.approx(2 / 32)
    assert Flips(1800, 300, 0, 0).p == 1


def test_what_stays_open_depends_on_the_images_and_not_on_the_seeds():
    # the largest rate under which none of n images flips in 2.5 % of cases
    assert Flips(1800, 300, 0, 0).largest == pytest.approx(1 - math.exp(math.log(0.025) / 300))
    assert Flips(300, 300, 0, 0).largest == Flips(1800, 300, 0, 0).largest


def test_answers_count_only_where_they_are_those_of_the_judged_model():
    whole = {0: with_answers("a", 0, [1, 0, 1])}
    assert flips({0: with_answers("b", 0, [1, 1, 1])}, whole) == Flips(3, 3, 1, 0)
    own_models = with_answers("b", 0, [1, 1, 1])
    own_models.summary["accuracy"]["last"] = 0.9  # of clients' own models
    assert flips({0: own_models}, whole) is None
    assert flips({0: record("b", 0, 0.5)}, whole) is None  # a record from before answers were kept
    assert flips({0: with_answers("b", 0, [1, 1, 1, 1])}, whole) is None  # another test set


def test_answers_that_cannot_be_read_are_refused():
    damaged = with_answers("b", 0, [1, 1, 1], images=99)
    with refused("file.malformed", CheckpointError, key="answers"):
        flips({0: damaged}, {0: with_answers("a", 0, [1, 0, 1])})


def test_a_claim_without_a_clear_verdict_has_a_line_on_its_answers():
    right = [1] * 290 + [0] * 10
    records = [with_answers(arm, seed, right) for seed in range(6) for arm in "ab"]
    assert by_cell(records, "b", "a") == {"": Flips(1800, 300, 0, 0)}
    compared = compare(records, "a", [Claim("b", "a", "accuracy"), Claim("b", "a", "few")])
    assert [(each.verdict, each.flips) for each in compared.claims] == [
        ("no difference", Flips(1800, 300, 0, 0)),
        ("no difference", None),
    ]
    for table in (comparison_table(compared), claims_table({"study": compared})):
        text = table.markdown()
        assert "of 1,800 answers, none is right with one arm only; with 300 images, up to 1.22 points" in text
        assert "n = 300 test images, one image is 0.33 points" in text
    best = compare(records, "a", [Claim("b", "a", "accuracy")], at="best")
    assert best.claims[0].flips is None  # the answers are those of the last round
    clear = [with_answers("b", seed, [1] * (292 + seed) + [0] * (8 - seed)) for seed in range(6)]
    judged = compare(clear + records[::2], "a", [Claim("b", "a", "accuracy")])
    assert judged.claims[0].verdict == "holds"
    assert judged.claims[0].flips is not None
    assert "McNemar" not in claims_table({"study": judged}).markdown()
    other = [1] * 289 + [0] * 10 + [1]
    mixed = [with_answers("a", seed, right) for seed in range(6)] + [
        with_answers("b", seed, other) for seed in range(6)
    ]
    assert (
        "6 are right only with the first and 6 only with the second; exact McNemar p = 1.000, treating all answers "
        "as independent" in claims_table({"study": compare(mixed, "a", [Claim("b", "a", "accuracy")])}).markdown()
    )
    assert "exact McNemar p < 0.001, treating" in answers_text(Flips(1800, 300, 100, 20))


@pytest.mark.parametrize(("seeds", "verdict"), [(6, "open"), (2, "too few seeds")])
def test_answers_are_named_where_seeds_decide_nothing(seeds, verdict):
    right = {"a": [1] * 290 + [0] * 10, "b": [0] + [1] * 290 + [0] * 9}
    records = [
        with_answers(arm, seed, right[arm][(seed % 2) * (arm == "b") :]) for seed in range(seeds) for arm in "ab"
    ]
    compared = compare(records, "a", [Claim("b", "a", "accuracy")])
    assert [each.verdict for each in compared.claims] == [verdict]
    assert "McNemar" in comparison_table(compared).markdown()
