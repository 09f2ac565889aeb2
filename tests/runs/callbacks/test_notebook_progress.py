"""`NotebookProgress` shows one output, however many rounds there are."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs import make_run, make_tiny_run

import raylt
from raylt.runs.callbacks import notebook_progress as notebook
from raylt.runs.callbacks.base import StudyStatus, TrialReport
from raylt.runs.callbacks.notebook_progress import NotebookProgress, progress_display
from raylt.runs.callbacks.terminal import TerminalProgress


@pytest.fixture
def outputs(monkeypatch):
    """Replace the notebook's display; return the updates of each output."""
    made: list[list[str]] = []

    class Output:
        def __init__(self) -> None:
            self.updates: list[str] = []
            made.append(self.updates)

        def show(self, html: str) -> None:
            self.updates.append(html)

    monkeypatch.setattr(notebook, "Output", Output)
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    return made


def test_a_notebook_shows_a_run_in_one_output(outputs, tmp_path, capsys):
    config = make_run(tmp_path, "quiet", "method=fedavg").config
    assert outputs == []
    raylt.run(config, out=tmp_path, name="shown", fleet="local", rounds=3)
    assert len(outputs) == 1
    last = outputs[0][-1]
    assert "round 3/3" in last
    assert 'value="1.0000"' in last
    assert "left" not in last.partition("<div>")[0]
    assert str(tmp_path / "shown") in last
    assert capsys.readouterr().err == ""


def test_a_run_that_fails_before_its_first_step_is_shown_without_progress(outputs):
    progress = NotebookProgress()
    progress.on_end(None)
    assert outputs[0] != []


@pytest.mark.slow
def test_a_run_whose_rounds_ended_early_is_shown_as_done(outputs, tmp_path):
    quick = ("federation.rounds=9", "federation.patience=2", "data.validation=0.2", "local.lr=0.000000001")
    config = make_tiny_run(tmp_path, "ccvr", *quick, name="quiet").config
    raylt.run(config, out=tmp_path, name="shown", fleet="local")
    text = outputs[0][-1].partition("<div>")[0]
    assert "round 3/9" in text
    assert 'value="1.0000"' in text
    assert "left" not in text


def test_a_terminal_has_its_own_display(monkeypatch):
    monkeypatch.setattr(notebook, "in_notebook", lambda: False)
    assert isinstance(progress_display(), TerminalProgress)


def test_rounds_are_shown_at_most_a_few_times_a_second(outputs, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])
    screen = NotebookProgress()
    config = SimpleNamespace(
        federation=SimpleNamespace(rounds=200), method={"name": "fedavg"}, data=SimpleNamespace(source="digits")
    )
    monkeypatch.setattr(notebook, "resolve", lambda _: SimpleNamespace(method=SimpleNamespace(finishes=False)))
    screen.on_start(Path("runs/one"), config, [])
    line = {"clients": None, "accuracy": 0.5, "global_accuracy": 0.5}
    for step in range(1, 201):
        now[0] += 0.01
        screen.on_step(
            SimpleNamespace(
                step=step,
                phase="round",
                seconds=0.01,
                evaluation_seconds=0.0,
                rejected={},
                lost=[],
                record=lambda: line,
            )
        )
    assert len(outputs) == 1
    assert len(outputs[0]) < 20
    assert "round 200/200" in outputs[0][-1]


def test_a_last_phase_is_no_round_and_a_run_that_ends_early_is_stopped(outputs, monkeypatch):
    screen = NotebookProgress()
    config = SimpleNamespace(
        federation=SimpleNamespace(rounds=2), method={"name": "ccvr"}, data=SimpleNamespace(source="digits")
    )
    monkeypatch.setattr(notebook, "resolve", lambda _: SimpleNamespace(method=SimpleNamespace(finishes=True)))
    line = {"clients": None, "accuracy": 0.5, "global_accuracy": 0.5, "seconds": 1.0, "evaluation_seconds": 0.0}
    screen.on_start(Path("runs/one"), config, [line, line])
    assert "round 2/2" in outputs[0][-1]
    assert 'value="0.6667"' in outputs[0][-1]
    screen.on_end(None)
    text = outputs[0][-1].partition("<div>")[0]
    assert "stopped" in text
    assert "left" not in text
    step = {"seconds": 1.0, "evaluation_seconds": 0.0, "rejected": {}, "lost": [], "record": lambda: line}
    screen.on_step(SimpleNamespace(step=3, phase="finish", **step))
    assert "round 2/2" in outputs[0][-1]
    screen.on_start(Path("runs/one"), config, [line] * 3)
    assert "round 2/2" in outputs[0][-1]


def test_the_last_twenty_messages_are_shown(outputs):
    screen = NotebookProgress()
    for number in range(25):
        screen.on_message(f"message {number}.")
    assert [f"message {number}." in outputs[0][-1] for number in range(25)] == [False] * 5 + [True] * 20


def test_studies_and_searches_have_one_output_too(outputs):
    screen = NotebookProgress()
    screen.on_message("left out: <b>")
    screen.on_study_progress(StudyStatus(1, 4, ["a/seed-1"], 0.25, 90.0))
    assert "1 of 4 runs, about 2 min left: a/seed-1" in outputs[0][-1]
    assert "&lt;b&gt;" in outputs[0][-1]
    screen = NotebookProgress()
    screen.on_search_start(Path("runs/s"), ["sfd"], 8, 1)
    trial = TrialReport("sfd-0", {}, "done", 9, 0.5, None)
    screen.on_trial_end(trial, trial, 2)
    assert "2 of 8 trials, best sfd-0: 50.00 %" in outputs[1][-1]
    assert 'value="0.2500"' in outputs[1][-1]
