import hashlib
import itertools
import os
import subprocess
import sys

import pytest
import torch

from raylt.seeds import seed_for, seeded


def test_seed_is_the_first_63_bits_of_a_hash_of_the_keys():
    # recorded splits depend on this value, so it must never change
    digest = hashlib.sha256(b"7\0str:train\0int:3").hexdigest()
    assert seed_for(7, "train", 3) == int(digest[:16], 16) // 2


def test_seeds_differ_in_every_key_their_order_their_type_and_their_number():
    keys = [
        (),
        ("a",),
        ("b",),
        ("a", "b"),
        ("b", "a"),
        ("ab",),
        ("", "ab"),
        ("ab", ""),
        (1,),
        ("1",),
        (11,),
        (1, 1),
        (-1,),
    ]
    seeds = [seed_for(seed, *key) for seed in (0, 1, 10) for key in keys]
    assert len(set(seeds)) == len(seeds)


def test_seeds_are_what_torch_and_numpy_take():
    seeds = [seed_for(0, "range", k) for k in range(1000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # all 63 bits are used: 1000 smaller draws have probability 2^-1000


def test_seed_is_the_same_in_another_process_that_has_no_torch():
    script = (
        "import sys; from raylt.seeds import seed_for; print(seed_for(5, 'x', 2)); assert 'torch' not in sys.modules"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "123"},
    )
    assert int(answer.stdout) == seed_for(5, "x", 2)


def test_seeded_block_draws_the_same_whatever_was_drawn_before():
    draws = []
    for before in (0, 5):
        torch.rand(before)
        with seeded(3, "block", 1):
            draws.append((torch.rand(4), torch.randperm(9)))
    assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))


def test_seeded_blocks_with_other_keys_draw_otherwise():
    draws = []
    for seed, purpose, round in itertools.product((0, 1), ("a", "b"), (1, 2)):
        with seeded(seed, purpose, round):
            draws.append(torch.rand(()).item())
    assert len(set(draws)) == 8


def test_generator_is_where_it_was_after_a_seeded_block():
    torch.manual_seed(11)
    first = torch.rand(3)
    torch.manual_seed(11)
    with seeded(0, "inside"):
        torch.rand(100)
    assert torch.equal(torch.rand(3), first)


def test_generator_is_where_it_was_after_a_block_that_raised():
    torch.manual_seed(11)
    first = torch.rand(3)
    torch.manual_seed(11)
    with pytest.raises(KeyError), seeded(0, "inside"):
        raise KeyError(torch.rand(1))
    assert torch.equal(torch.rand(3), first)


def test_seeding_notes_nothing_for_gpus_where_there_are_none(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    noted = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", noted.append)
    with seeded(3, "block"):
        drawn = torch.rand(3)
    assert not noted  # torch would keep such a note, with a stack, until a GPU is used
    torch.manual_seed(seed_for(3, "block"))
    assert torch.equal(torch.rand(3), drawn)


def test_inner_block_does_not_disturb_the_outer():
    with seeded(0, "outer"):
        plain = torch.rand(2), torch.rand(2)
    with seeded(0, "outer"):
        first = torch.rand(2)
        with seeded(0, "inner"):
            torch.rand(7)
        assert torch.equal(first, plain[0])
        assert torch.equal(torch.rand(2), plain[1])
