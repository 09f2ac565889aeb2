"""Each call of a client draws from seeds of its own.

Clients that share a seed draw alike, and a seed that comes back in another call makes both depend on each other. That
would change results without failing any other check.
"""

import sys
from pathlib import Path

import pytest
from small_runs import QUICK

from raylt.contract.case import Case
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.function_name import function_name
from raylt.methods import METHODS
from raylt.seeds import seed_for

QUICKLY = ("bpfed", "flea", "fedsm", "mupfl", "rucr")  # methods with further seeds; the others run with the slow tests
AGAIN = ("flea",)  # methods whose clients draw the same numbers in each round, as their docstrings say

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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICKLY else pytest.mark.slow) for name in METHODS]
)
def test_no_two_calls_draw_from_one_seed(name, tmp_path, monkeypatch):
    calls = calls_by_seed(name, tmp_path, monkeypatch)
    assert calls
    assert all(len({id for _, _, id in of_seed}) == 1 for of_seed in calls.values())
    assert any(len(of_seed) > 1 for of_seed in calls.values()) == (name in AGAIN)
