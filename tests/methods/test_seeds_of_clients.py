"""Each call of a client draws from seeds of its own.

Clients that share a seed draw alike, and a seed that comes back in another call makes both depend on each other. That
would change results without failing any other check. So would a generator of the server that draws alike in every
round, or two that share a seed.
"""

import sys
from pathlib import Path

import pytest
import torch
from small_runs import QUICK

from raylt.contract.case import Case
from raylt.contract.trace import finish
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.function_name import function_name
from raylt.methods import METHODS
from raylt.seeds import seed_for

QUICKLY = ("bpfed", "flea", "fedsm", "mupfl", "rucr")  # methods with further seeds; the others run with the slow tests
AGAIN = ("flea",)  # methods whose clients draw the same numbers in each round, as their docstrings say

SERVERS = ("creff", "fednpc", "fedic", "fedloge", "oracle", "sfd")  # methods whose servers draw; the others, slowly

Call = tuple[str, int, int]  # (function, round, client)


def calls_by_seed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, set[Call]]:
    """Return the calls of clients in a run, by the seeds that they draw from."""
    calls: dict[int, set[Call]] = {}
    current: list[Call] = []

    def recorded(*keys):
        seed = seed_for(*keys)
        for call in current:
            calls.setdefault(seed, set()).add(call)
        return seed

    class Watched(ClientHost):
        def run(self, fn, message, round, id, shard, private):
            current.append((function_name(fn), round, id))
            try:
                return super().run(fn, message, round, id, shard, private)
            finally:
                current.clear()

    for module in [module for key, module in sys.modules.items() if key.startswith("raylt.") and key != "raylt.seeds"]:
        if vars(module).get("seed_for") is seed_for:
            monkeypatch.setattr(module, "seed_for", recorded)
    Case(METHODS[name](**QUICK.get(name, {})), METHODS[name].problems[0], folder).run(host=Watched)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in METHODS]
)
def test_no_two_calls_draw_from_one_seed(name, tmp_path, monkeypatch):
    calls = calls_by_seed(name, tmp_path, monkeypatch)
    assert calls
    assert all(len({id for _, _, id in of_seed}) == 1 for of_seed in calls.values())
    assert any(len(of_seed) > 1 for of_seed in calls.values()) == (name in AGAIN)


def draws(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[str]], set[int], set[int]]:
    """Run a method; return where the server seeds a generator, by seed, then the seeds of all generators.

    The last value has the seeds that `seed_for` returned.
    """
    places: dict[int, list[str]] = {}
    of_generators: set[int] = set()
    seeds: set[int] = set()
    in_call: list[bool] = []

    class Generator(torch.Generator):
        def manual_seed(self, seed):
            caller = sys._getframe(1)
            if caller.f_globals["__name__"] != "raylt.data.image_policies":  # which draws seeds for its generators
                of_generators.add(seed)
            if not in_call:
                places.setdefault(seed, []).append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
            return super().manual_seed(seed)

    class Watched(ClientHost):
        def run(self, fn, message, round, id, shard, private):
            in_call.append(True)
            try:
                return super().run(fn, message, round, id, shard, private)
            finally:
                in_call.clear()

    def recorded(*keys):
        seeds.add(seed_for(*keys))
        return seed_for(*keys)

    for module in [module for key, module in sys.modules.items() if key.startswith("raylt.") and key != "raylt.seeds"]:
        if vars(module).get("seed_for") is seed_for:
            monkeypatch.setattr(module, "seed_for", recorded)
    case = Case(METHODS[name](**QUICK.get(name, {})), METHODS[name].problems[0], folder)
    experiment = case.experiment(case.config(), host=Watched)
    monkeypatch.setattr(torch, "Generator", Generator)  # not before, because models draw weights when they are built
    finish(experiment)
    return places, of_generators, seeds


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SERVERS else pytest.mark.slow) for name in METHODS]
)
def test_each_generator_of_the_server_has_a_seed_of_its_own(name, tmp_path, monkeypatch):
    places, of_generators, seeds = draws(name, tmp_path, monkeypatch)
    assert bool(places) or name not in SERVERS
    assert of_generators <= seeds  # none is the run's bare seed, neither at the server nor at clients
    assert all(len(of_seed) == 1 for of_seed in places.values())
