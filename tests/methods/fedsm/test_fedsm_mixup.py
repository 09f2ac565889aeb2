import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import tensor

from raylt.methods.fedsm.mixup import draw_partners, mix_features, ranks, relevance, total_variation

TEXT = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
OFF = ~torch.eye(5, dtype=torch.bool)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def by_hand(i: int, j: int, similarity: str) -> float:
    a, b = TEXT[i].double().numpy(), TEXT[j].double().numpy()
    return {
        "cosine": a @ b / math.sqrt(a @ a) / math.sqrt(b @ b),
        "dot": a @ b,
        "l1": 1 / (1 + np.abs(a - b).sum()),
        "l2": 1 / (1 + np.sqrt(((a - b) ** 2).sum())),
    }[similarity]


@pytest.mark.parametrize("similarity", ["cosine", "dot", "l1", "l2"])
def test_relevance_is_the_similarity_with_its_diagonal_replaced_by_row_means(similarity):  # T-FSM-10
    whole = tensor([[by_hand(i, j, similarity) for j in range(5)] for i in range(5)]).float()
    alpha = relevance(TEXT, similarity)
    assert torch.allclose(alpha[OFF], whole[OFF].clamp(min=0), atol=1e-5)
    assert torch.allclose(alpha.diagonal(), whole.mean(1).clamp(min=0), atol=1e-5)
    assert (alpha >= 0).all()


def test_cosine_alone_does_not_see_the_length_of_a_text_vector():
    longer = TEXT * tensor([1.0, 2, 3, 4, 5])[:, None]
    for similarity, same in [("cosine", True), ("dot", False), ("l1", False), ("l2", False)]:
        assert torch.allclose(relevance(longer, similarity), relevance(TEXT, similarity), atol=1e-6) == same


def test_softmax_of_each_row_is_taken_before_anything_is_clipped():
    # cosines 0.6 and -1 with class 0; row mean (1 + 0.6 - 1) / 3 = 0.2
    text = tensor([[1.0, 0], [0.6, 0.8], [-1, 0]])
    weights = np.exp(np.array([0.2, 0.6, -1.0]) / 0.5)
    assert np.allclose(relevance(text, "cosine", 0.5)[0], weights / weights.sum(), atol=1e-6)
    assert np.allclose(relevance(text, "cosine")[0], [0.2, 0.6, 0], atol=1e-6)


@pytest.mark.parametrize("temperature", [None, 0.05])
def test_inverted_relevance_draws_what_is_least_alike_most_and_is_as_far_from_uniform(temperature):
    # cosines with class 0 are 0.9, 0.8, 0.5; the diagonal is their mean with 1, 0.8; mirrored between 0.5 and 0.9
    text = tensor([[1.0, 0, 0, 0], [0.9, 0.19**0.5, 0, 0], [0.8, 0, 0.6, 0], [0.5, 0, 0, 0.75**0.5]])
    plain, inverted = (relevance(text, "cosine", temperature, turned) for turned in (False, True))
    if temperature is None:
        assert torch.allclose(plain[0], tensor([0.8, 0.9, 0.8, 0.5]), atol=1e-6)
        assert torch.allclose(inverted[0], tensor([0.6, 0.5, 0.6, 0.9]), atol=1e-6)
    else:
        # softmax(-s) is 1 / softmax(s), normalised
        assert torch.allclose(inverted, (1 / plain) / (1 / plain).sum(1, keepdim=True), atol=1e-5)
    for i in range(4):
        assert plain[i].argsort(stable=True).tolist()[-1] == inverted[i].argsort(stable=True).tolist()[0]
    y, classes = torch.arange(4).repeat(5), torch.arange(4)
    drawn = [
        torch.bincount(y[draw_partners(alpha, classes, y, 4000, kind, "class", generator())[0]], minlength=4)
        for alpha, kind in ((plain, "probabilistic"), (inverted, "inverted"))
    ]
    assert drawn[0][1] > 1.3 * drawn[0][3]
    assert drawn[1][3] > 1.3 * drawn[1][1]


def test_classes_are_drawn_with_the_renormalised_relevance():  # T-FSM-6
    alpha = tensor([[0.2, 0.5, 0.9, 0.3], [1.0, 0.0, 0.5, 0.5], [0.1, 0.1, 0.1, 0.7]])
    y = tensor([3, 0, 0, 2, 0, 2, 0])  # no sample has class 1
    n = 20_000
    rows = draw_partners(alpha, tensor([0, 1, 2]), y, n, "probabilistic", "class", generator())
    assert rows.shape == (3, n)
    for c in range(3):
        share = alpha[c, [0, 2, 3]].double().numpy()
        counts = np.bincount(y[rows[c]], minlength=4)
        assert counts[1] == 0
        assert stats.chisquare(counts[[0, 2, 3]], n * share / share.sum()).pvalue > 0.001
        for owned in (0, 2, 3):  # all samples of a class are drawn equally often
            places = np.bincount(rows[c], minlength=7)[(y == owned).numpy()]
            assert places.sum() == counts[owned]
            assert len(places) == 1 or stats.chisquare(places).pvalue > 0.001


def test_row_of_relevance_belongs_to_the_class_it_was_asked_for():
    alpha = torch.eye(3).roll(1, 1)  # class c is related to class c + 1
    rows = draw_partners(alpha, tensor([2, 0]), tensor([0, 1, 2]), 4, "probabilistic", "class", generator())
    assert rows.tolist() == [[0] * 4, [1] * 4]


def test_row_without_weight_on_owned_classes_is_uniform():
    alpha = tensor([[0.0, 0, 1], [1, 1, 0], [1, 1, 1]])
    y = tensor([0, 0, 0, 1])
    drawn = y[draw_partners(alpha, tensor([0]), y, 4000, "probabilistic", "class", generator())[0]]
    assert stats.chisquare(np.bincount(drawn)).pvalue > 0.001


def test_ranks_begin_at_one_and_equal_weights_share_theirs():
    assert ranks(tensor([[0.5, 0.1, 0.5, 0.0], [1.0, 1, 1, 1]]).double()).tolist() == [[3.5, 2, 3.5, 1], [2.5] * 4]


def test_ranked_partners_are_as_far_from_uniform_whatever_the_similarities():
    # weights 1 to 10 of 55 for ten owned classes, which is 0.227 from uniform in total variation
    alpha = torch.rand(10, 10, generator=generator())
    y = torch.arange(10)
    rows = draw_partners(alpha, y, y, 20_000, "ranked", "class", generator())
    law = torch.stack([row.bincount(minlength=10) for row in rows]) / 20_000
    assert (law - 0.1).abs().sum(1).mean().item() / 2 == pytest.approx(12.5 / 55, abs=0.01)
    assert torch.equal(law.argmax(1), alpha.argmax(1))


def test_random_partners_ignore_the_relevance():
    alpha = tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0]])
    y = tensor([0, 1, 1, 1, 2])
    drawn = y[draw_partners(alpha, tensor([1]), y, 6000, "random", "class", generator())[0]]
    assert stats.chisquare(np.bincount(drawn)).pvalue > 0.001


@pytest.mark.parametrize("unit", ["class", "sample"])
def test_deterministic_partners_are_of_the_most_relevant_class_other_than_itself(unit):
    alpha = tensor([[0.9, 0.3, 0.5], [0.8, 0.1, 0.2], [0.4, 0.6, 1.0]])
    y = tensor([0, 1, 2, 1])
    rows = draw_partners(alpha, tensor([0, 1, 2]), y, 6, "deterministic", unit, generator())
    assert [set(y[row].tolist()) for row in rows] == [{2}, {0}, {1}]
    alone = draw_partners(alpha, tensor([0, 1]), tensor([1, 1]), 6, "deterministic", unit, generator())
    assert alone.shape == (2, 6)  # only class 1 itself is left
    # nothing is relevant for class 0 but itself
    other = draw_partners(tensor([[0.5, 0.0, 0.0]]), tensor([0]), y, 6, "deterministic", unit, generator())
    assert set(y[other[0]].tolist()) == {1}


def test_weighted_samples_favour_large_classes_and_are_not_drawn_twice():
    alpha = tensor([[1.0, 3.0]])
    y = tensor([0] * 90 + [1] * 10)
    rows = torch.cat(
        [draw_partners(alpha, tensor([0]), y, 1, "probabilistic", "sample", generator(s)) for s in range(3000)]
    ).flatten()
    # class 0 has 90 samples of weight 1, class 1 has 10 of weight 3
    assert stats.chisquare(np.bincount(y[rows]), [3000 * 0.75, 3000 * 0.25]).pvalue > 0.001
    once = draw_partners(alpha, tensor([0]), y, 100, "probabilistic", "sample", generator())[0]
    assert sorted(once.tolist()) == list(range(100))
    more = draw_partners(alpha, tensor([0]), y, 101, "probabilistic", "sample", generator())[0]
    assert len(more) == 101


def test_mixed_features_are_those_of_equation_4():
    z, prototypes = torch.randn(2, 3, 4, generator=generator(1)), torch.randn(2, 4, generator=generator(2))
    lam = torch.rand(2, 3, generator=generator(3))
    r = mix_features(z, prototypes, lam)
    for c in range(2):
        for s in range(3):
            expected = (1 - lam[c, s]) * z[c, s] + lam[c, s] * prototypes[c]
            assert torch.allclose(r[c, s], expected)


def test_total_variation_is_half_the_distance_to_uniform_and_the_mean_over_rows():
    # the rows (1/2, 1/2), (1, 0) and a row without weight are 0, 1/2 and 0 from uniform
    assert total_variation(tensor([[2.0, 2.0], [3.0, 0.0]])) == pytest.approx(0.25)
    assert total_variation(tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 5.0, 0.0]])) == pytest.approx(2 / 9)
    assert total_variation(torch.ones(4, 4)) == 0


def test_relevance_of_texts_as_alike_as_clips_is_uniform_unless_it_is_sharpened():
    # cosines of CLIP's class names lie between 0.75 and 0.95, which a softmax at temperature 1 does not tell apart
    cosine = 0.85 + 0.05 * torch.randn(10, 10, generator=generator()).clamp(-2, 2)
    cosine = (cosine + cosine.T) / 2
    cosine.fill_diagonal_(1)
    values, vectors = torch.linalg.eigh(cosine.double())
    text = (vectors * values.clamp(min=0).sqrt()).float()
    found = {temperature: total_variation(relevance(text, "cosine", temperature)) for temperature in (None, 1.0, 0.02)}
    assert found[None] < 0.03
    assert found[1.0] < 0.03
    assert found[0.02] > 0.2


def test_samples_are_drawn_with_replacement_where_too_few_are_related():
    """Two of five samples are of a related class, and three are needed."""
    alpha, y = torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 0, 0, 1, 1])
    rows = draw_partners(alpha, torch.tensor([0]), y, 3, "probabilistic", "sample", torch.Generator().manual_seed(0))
    assert set(rows.flatten().tolist()) <= {3, 4}
