"""The death of a server process is noted and counted in the summary."""

from contextlib import contextmanager

import pytest
from refusals import refused

import raylt
from raylt.errors import ServerLost
from raylt.runs import runner
from raylt.runs.folder.writer import NOTES, SERVER_DIED

SETTINGS = ["federation.rounds=2", "local.steps=1", "data.clients=3", "data.imbalance=100"]


@pytest.fixture
def dying(monkeypatch):
    """Return a function that lets the server die `deaths` times before its first step."""

    def set_deaths(deaths):
        real = runner._in_this_process
        left = [deaths]

        @contextmanager
        def experiment(*arguments):
            if left[0]:
                left[0] -= 1
                raise ServerLost(f"{SERVER_DIED} (ActorDiedError)")
            with real(*arguments) as made:
                yield made

        monkeypatch.setattr(runner, "_in_this_process", experiment)

    return set_deaths


def test_a_server_that_died_is_in_the_notes_and_in_the_summary(tmp_path, dying):
    dying(2)
    run = raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=SETTINGS)
    note = f"{SERVER_DIED} (ActorDiedError); starting it again from the last checkpoint\n"
    assert (run.folder / NOTES).read_text() == 2 * note
    assert run.summary["troubles"]["server_deaths"] == 2


def test_the_third_death_in_a_step_ends_the_run_and_is_noted(tmp_path, dying):
    dying(3)
    with refused("server.lost", ServerLost):
        raylt.run("fedavg", out=tmp_path, name="r", fleet="local", quiet=True, overrides=SETTINGS)
    assert (tmp_path / "r" / NOTES).read_text().splitlines()[-1].endswith("; the run ends")
