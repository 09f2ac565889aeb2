"""Masked sums are exact to the bit, in any order and with lost members, and hide the values that they add up."""

import contextlib
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from refusals import refused
from scipy import stats

from raylt.core.protection.masking import (
    PRIME,
    Collector,
    Member,
    add_pair,
    agree,
    evaluate,
    hash_of,
    introduce,
    join,
    split,
    stream,
)
from raylt.core.protection.survivors import fewest_survivors
from raylt.errors import RayltError, TooFewReplies


def session(count: int, length: int) -> tuple[list[Member], Collector]:
    """Return members that have dealt their shares, and the server's collector."""
    members = [Member(id) for id in range(count)]
    return members, Collector(introduce(members, fewest_survivors(count)), length)


def is_probable_prime(n: int) -> bool:
    """Test primality by Miller and Rabin with forty witnesses."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    rng = random.Random(0)
    return all(
        any(pow(a, odd << i, n) == n - 1 for i in range(twos)) or pow(a, odd, n) == 1
        for a in (rng.randrange(2, n - 1) for _ in range(40))
    )


def test_the_field_is_one():
    assert is_probable_prime(PRIME)
    assert PRIME > 2**256


def test_any_threshold_of_shares_gives_the_secret_and_one_fewer_another():
    secret = bytes(range(32))
    shares = split(secret, range(1, 6), 3)
    for some in itertools.combinations(shares, 3):
        assert join({x: shares[x] for x in some}) == secret
    for some in itertools.combinations(shares, 2):
        # two shares usually, but not always, join to a value that is too large, which raises
        with contextlib.suppress(ValueError):
            assert join({x: shares[x] for x in some}) != secret


def test_shares_of_no_secret_are_refused():
    with pytest.raises(ValueError, match="2 shares give no secret of 1 bytes: too few"):
        join({1: 5, 2: 700}, length=1)


def test_one_share_fewer_is_as_likely_under_any_secret():
    # field of size 7, threshold 3, 49 polynomials: each pair of values at 1 and 2 occurs once for every secret
    pairs = [
        sorted((evaluate([secret, a, b], 1, 7), evaluate([secret, a, b], 2, 7)) for a in range(7) for b in range(7))
        for secret in range(7)
    ]
    assert pairs[0] == sorted(itertools.product(range(7), range(7)))
    assert all(other == pairs[0] for other in pairs)


CASES = [pytest.param(range(60), id="60"), pytest.param(range(60, 300), id="300", marks=pytest.mark.slow)]


@pytest.mark.parametrize("cases", CASES)
def test_masked_sums_are_plain_sums_to_the_bit_with_up_to_30_percent_lost(cases):
    for case in cases:
        rng = np.random.default_rng(case)
        count, length = int(rng.integers(2, 9)), int(rng.integers(1, 20))
        members, collector = session(count, length)
        vectors = rng.integers(0, 2**64, (count, length), dtype=np.uint64)
        lost = int(rng.integers(0, int(0.3 * count) + 1))
        order = rng.permutation(count)
        sent = order[: count - lost].tolist()
        for id in sent:
            collector.add(id, members[id].mask(vectors[id]))
        # before round 3 as many of the senders are lost as are allowed, or none
        left = sent[: max(fewest_survivors(count), len(sent) - int(rng.integers(0, 2)))]
        got = collector.unmasked({id: members[id].unmask(sent) for id in left}, fewest_survivors(count))
        assert np.array_equal(got, vectors[sent].sum(0, dtype=np.uint64)), case


def test_fewer_than_the_threshold_cannot_take_the_masks_off():
    members, collector = session(5, 3)
    for member in members[:3]:
        collector.add(member.id, member.mask(np.zeros(3, dtype=np.uint64)))
    with refused("reply.too-few", TooFewReplies, usable=3, asked=5, needed=4):
        collector.unmasked({id: members[id].unmask([0, 1, 2]) for id in (0, 1, 2)}, fewest_survivors(5))


LIES = {
    "another number": lambda kind, share: (kind, share + 1),
    "the same number modulo the prime": lambda kind, share: (kind, share + PRIME),
    "a number of more bytes than a share has": lambda kind, share: (kind, share + 2**300),
    "no number": lambda kind, share: (kind, -1),
    "the other kind": lambda kind, share: ("key" if kind == "seed" else "seed", share),
}


@pytest.mark.parametrize("about", [0, 3], ids=["seed", "key"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_wrong_share_is_noticed_and_not_summed(lie, about):
    members, collector = session(6, 3)
    sent = [0, 1, 2, 4, 5]
    vectors = np.arange(18, dtype=np.uint64).reshape(6, 3)
    for id in sent:
        collector.add(id, members[id].mask(vectors[id]))
    answers = {id: members[id].unmask(sent) for id in sent}
    answers[0][about] = lie(*answers[0][about])
    got = collector.unmasked(answers, fewest_survivors(6))
    assert np.array_equal(got, vectors[sent].sum(0, dtype=np.uint64))
    assert list(collector.wrong) == [0]
    with refused("reply.too-few", TooFewReplies, usable=3, asked=6, needed=4):
        collector.unmasked({id: answers[id] for id in (0, 1, 2, 4)}, fewest_survivors(6))


@pytest.mark.parametrize("about", [0, 3], ids=["seed", "key"])
@pytest.mark.parametrize("withheld", [True, False])
def test_a_right_share_of_the_secret_that_is_not_asked_for_and_none_at_all_are_noticed(about, withheld):
    members, collector = session(6, 3)
    sent = [0, 1, 2, 4, 5]
    for id in sent:
        collector.add(id, members[id].mask(np.arange(3, dtype=np.uint64)))
    answers = {id: members[id].unmask(sent) for id in sent}
    if withheld:
        del answers[0][about]
    else:
        seed, key = members[0]._shares[about]
        answers[0][about] = ("key", key) if about in sent else ("seed", seed)
    assert collector.unmasked(answers, fewest_survivors(6)).tolist() == [0, 5, 10]
    assert list(collector.wrong) == [0]


class DealsAnotherSecret(Member):
    """A member that deals shares of a false secret but commits itself to its own secret."""

    def __init__(self, id: int, secret: str):
        super().__init__(id)
        self.secret = secret

    def deal(self, all_keys, threshold):
        own = getattr(self, self.secret)
        setattr(self, self.secret, bytes(range(32)))
        sealed = super().deal(all_keys, threshold)
        setattr(self, self.secret, own)
        self.commitment = replace(self.commitment, seed=hash_of(int.from_bytes(self._seed, "big")))
        return sealed


@pytest.mark.parametrize(("secret", "sent"), [("_seed", range(4)), ("_mask_key", range(1, 4))])
def test_shares_of_another_secret_than_the_committed_one_are_noticed(secret, sent):
    members = [DealsAnotherSecret(0, secret), *(Member(id) for id in (1, 2, 3))]
    collector = Collector(introduce(members, 3), 1)
    for id in sent:
        collector.add(id, members[id].mask(np.zeros(1, dtype=np.uint64)))
    with refused("reply.wrong-share", RayltError, member=0):
        collector.unmasked({id: members[id].unmask(sent) for id in (1, 2, 3)}, 3)


def test_no_member_gives_shares_of_both_secrets_of_a_member():
    members, _ = session(4, 1)
    assert {kind for kind, _ in members[0].unmask([0, 1, 2]).values()} == {"seed", "key"}
    assert [members[0].unmask([0, 1, 2])[id][0] for id in range(4)] == ["seed", "seed", "seed", "key"]


def test_members_draw_secrets_of_their_own_and_other_ones_for_shares_than_for_masks():
    drawn = [secret for m in (Member(0), Member(0)) for secret in (m._seed, m._share_key, m._mask_key)]
    assert len(set(drawn)) == 6


def test_no_two_messages_between_members_have_the_same_nonce():
    # the two members of a pair encrypt their shares with one key
    pairs = list(itertools.permutations(range(20), 2))
    assert len({Member._nonce(sender, receiver) for sender, receiver in pairs}) == len(pairs)


def seen_by_server(vector: np.ndarray, shares: int) -> np.ndarray:
    """Return a member's masked vector after the server has removed everything that it knows.

    The server knows the pairwise masks, as if it had broken every other member, and `shares` shares of the member's
    seed. It needs four.
    """
    members, _ = session(5, len(vector))
    masked = members[0].mask(vector)
    keys = {member.id: member.keys for member in members}
    for other in members[1:]:
        pair = np.zeros(len(vector), dtype=np.uint64)
        add_pair(pair, 0, other.id, agree(other._mask_key, keys[0][1], b"mask"))
        masked = masked - pair
    known_shares = {other.id + 1: other.unmask(range(5))[0][1] for other in members[1 : 1 + shares]}
    try:
        seed = join(known_shares)
    except ValueError:
        seed = bytes(32)
    return masked - stream(seed, len(vector))


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "told_apart"), [(4, True), (3, False)])
def test_a_server_that_lacks_one_share_cannot_tell_two_inputs_apart(shares, told_apart):
    zeros, ones = np.zeros(64, dtype=np.uint64), np.arange(1, 65, dtype=np.uint64)
    # the distinguisher counts how many of the highest bits are set; neither input sets any
    views = [[seen_by_server(vector, shares) for _ in range(40)] for vector in (zeros, ones)]
    guessed = [[bool(np.array_equal(view, ones)) for view in of_input] for of_input in views]
    assert (guessed == [[False] * 40, [True] * 40]) == told_apart
    high, low = (
        [int((view >> np.uint64(shift) & np.uint64(1)).sum()) for of_input in views for view in of_input]
        for shift in (63, 0)
    )
    if told_apart:
        assert set(high) == {0}
    else:
        for bits in (high, low):  # sums of 64 fair coins each: the views do not depend on the input
            assert stats.mannwhitneyu(bits[:40], bits[40:]).pvalue > 1e-6
            assert stats.binomtest(sum(bits), 64 * 80).pvalue > 1e-6


def test_masked_vectors_are_uniform_whatever_they_hide():
    members, _ = session(3, 4096)
    seen = members[0].mask(np.full(4096, 7, dtype=np.uint64)).view(np.uint8)
    assert stats.chisquare(np.bincount(seen, minlength=256)).pvalue > 1e-6
