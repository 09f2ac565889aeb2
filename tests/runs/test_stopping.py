"""`raylt stop` ends a run at its next checkpoint; the continued run has the same bits."""

import pytest
from refusals import refused

import raylt
from raylt.config import load
from raylt.errors import ConfigError
from raylt.runs.folder.reader import Files
from raylt.runs.stopping import FILE, StopAsked, ask_to_stop

SETTINGS = ["method=fedavg", "data.clients=3", "local.epochs=1", "federation.rounds=5", "output.checkpoint_every=2"]


class AskAfter(raylt.Callback):
    """Asks the run to stop after a step."""

    def __init__(self, step):
        self.step = step
        self.folder = None

    def on_start(self, folder, config, reports):
        self.folder = folder

    def on_step(self, report):
        if report.step == self.step:
            ask_to_stop(self.folder)


def start(folder, name, *callbacks):
    return raylt.run(load(None, SETTINGS), out=folder, name=name, fleet="local", quiet=True, callbacks=callbacks)


@pytest.mark.slow
def test_a_run_stops_after_the_next_checkpoint_and_continues_to_the_same_model(tmp_path):
    straight = start(tmp_path, "straight")
    with pytest.raises(StopAsked):
        start(tmp_path, "stopped", AskAfter(1))
    run = raylt.Run.open(tmp_path / "stopped")
    assert run.state == "stopped"
    assert len(run.reports) == 2  # no checkpoint was due after step 1
    resumed = raylt.resume(run.folder, fleet="local", quiet=True)  # the old request does not stop the resumed run
    assert resumed.summary["model_sha256"] == straight.summary["model_sha256"]
    assert not (run.folder / FILE).exists()


def test_a_request_during_the_last_step_changes_nothing(tmp_path):
    run = start(tmp_path, "run", AskAfter(5))
    assert run.state == "done"
    assert not (run.folder / FILE).exists()
    Files(run.folder).summary()


def test_a_run_without_a_process_cannot_be_stopped(tmp_path):
    run = start(tmp_path, "run")
    with refused("run.not-running", ConfigError, path=str(run.folder)):
        ask_to_stop(run.folder)
