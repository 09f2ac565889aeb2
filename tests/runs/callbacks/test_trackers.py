"""Runs that are logged to MLflow and W&B, also after an interruption."""

import sys
import time
from types import SimpleNamespace

import pytest
from refusals import refused
from small_runs import make_tiny_run

import raylt
from raylt.config import load
from raylt.errors import ConfigError
from raylt.runs.callbacks.tensorboard import figures_of
from raylt.runs.callbacks.trackers import trackers


class Stopping(raylt.Callback):
    """Interrupts a run after its first step."""

    def on_step(self, report):
        if report.step == 1:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("runs"), "fedprox", "data.partition=by_id").config


def interrupted_and_resumed(config, folder, names) -> raylt.Run:
    """Interrupt a run of two rounds after the first; return the resumed run."""
    with pytest.raises(KeyboardInterrupt):
        raylt.run(config, out=folder, name="one", fleet="local", quiet=True, callbacks=[*trackers(names), Stopping()])
    return raylt.resume(folder / "one", fleet="local", quiet=True, callbacks=trackers(names))


class FakeWandb:
    """An in-memory stand-in for the part of wandb that raylt uses."""

    def __init__(self):
        self.sessions = []

    def init(self, **asked):
        resumed = asked.get("resume") == "allow" and any(session["id"] == asked["id"] for session in self.sessions)
        session = {**asked, "steps": {}, "logged": [], "code": None, "summary": {}}
        self.sessions.append(session)
        return SimpleNamespace(
            resumed=resumed,
            summary=session["summary"],
            log=lambda figures, step=None: (
                session["logged"].append(figures) if step is None else session["steps"].setdefault(step, figures)
            ),
            finish=lambda exit_code: session.update(code=exit_code),
        )

    def Image(self, image, caption):
        return image.format, image.size, caption


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("raylt.runs.callbacks.trackers.find_spec", lambda name: True)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return fake


def test_wandb_gets_settings_and_curves_and_continues(config, tmp_path, wandb):
    run = interrupted_and_resumed(config, tmp_path, ["wandb"])
    first, second = wandb.sessions
    assert (first["project"], first["name"], first["dir"]) == ("raylt", "one", str(run.folder))
    assert first["config"]["method.mu"] == run.method.model_dump()["mu"]
    assert first["config"]["federation.rounds"] == 2
    assert (first["code"], second["code"], second["id"] == first["id"]) == (1, 0, True)
    assert {**first["steps"], **second["steps"]} == {report["step"]: dict(figures_of(report)) for report in run.reports}
    assert [*second["steps"]] == [2]
    assert second["steps"][2]["accuracy/test set"] == run.summary["accuracy"]["last"]
    assert second["summary"]["model_sha256"] == run.summary["model_sha256"]
    ((kind, (width, height), model),) = [shown["predictions"] for shown in second["logged"]]
    assert (kind, model, first["logged"]) == ("PNG", "global model", [])
    assert min(width, height) > 96


def test_a_picture_that_a_tool_refuses_is_reported_and_the_run_is_done(config, tmp_path, wandb):
    class Messages(raylt.Callback):
        def on_message(self, text, minor=False):
            messages.append(text)

    messages = []
    wandb.Image = lambda *asked, **named: 1 / 0
    run = raylt.run(
        config, out=tmp_path, name="one", fleet="local", quiet=True, callbacks=[*trackers(["wandb"]), Messages()]
    )
    assert run.state == "done"
    assert wandb.sessions[0]["code"] == 0
    assert messages[-1].startswith("no picture of predictions: trackers: wandb failed (ZeroDivisionError")


def test_wandb_writes_into_the_folder_that_its_variable_names(config, tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    raylt.run(config, out=tmp_path, name="one", fleet="local", quiet=True, callbacks=trackers(["wandb"]))
    assert wandb.sessions[0]["dir"] == str(tmp_path / "elsewhere")


def test_a_run_that_was_not_logged_before_is_logged_from_its_first_step(config, tmp_path, wandb):
    with pytest.raises(KeyboardInterrupt):
        raylt.run(config, out=tmp_path, name="one", fleet="local", quiet=True, callbacks=[Stopping()])
    raylt.resume(tmp_path / "one", fleet="local", quiet=True, callbacks=trackers(["wandb"]))
    assert [*wandb.sessions[0]["steps"]] == [1, 2]


def test_what_a_tool_trips_over_is_one_line_and_the_run_can_go_on(config, tmp_path, wandb):
    wandb.init = lambda **asked: 1 / 0
    with refused("run.tracker-failed", name="wandb") as caught:
        raylt.run(config, out=tmp_path, name="one", fleet="local", quiet=True, callbacks=trackers(["wandb"]))
    assert "raylt.resume" in str(caught.value)
    assert caught.value.details["reason"].startswith("ZeroDivisionError")
    assert raylt.resume(tmp_path / "one", fleet="local", quiet=True).state == "done"


def test_what_is_no_tracker_or_not_installed_is_refused(monkeypatch):
    with refused("config.unknown-name", ConfigError, key="--track", value="elsewhere"):
        trackers(["elsewhere"])
    monkeypatch.setattr("raylt.runs.callbacks.trackers.find_spec", lambda name: None)
    with refused("config.missing-package", ConfigError, key="--track", name="mlflow"):
        trackers(["mlflow"])


# the real packages, if they are installed


def records_of(content: bytes) -> list[bytes]:
    """Return the records of W&B's file: after 7 bytes, a log in LevelDB's format with blocks of 32 KiB."""
    records, parts, at = [], b"", 7
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # too little room for a header, so the rest of the block is empty
            at += 2**15 - at % 2**15
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(parts)
            parts = b""
    return records


@pytest.mark.slow
def test_mlflow_keeps_one_run_in_a_table_beside_the_run_folder(config, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = interrupted_and_resumed(config, tmp_path, ["mlflow"])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(tmp_path.name).experiment_id
    (logged,) = client.search_runs([experiment])
    assert (logged.info.run_name, logged.info.status) == ("one", "FINISHED")
    assert logged.data.params["method.name"] == "fedprox"
    assert logged.data.tags["raylt.model_sha256"] == run.summary["model_sha256"]
    curve = client.get_metric_history(logged.info.run_id, "accuracy/test set")
    assert [(point.step, point.value) for point in curve] == [
        (report["step"], report["accuracy"]) for report in run.reports
    ]
    assert "clients/local mean" in logged.data.metrics
    (picture,) = (tmp_path / "mlartifacts").rglob("predictions.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert logged.data.tags["raylt.predictions"] == "global model"


@pytest.mark.slow
def test_wandb_offline_writes_into_the_run_folder(config, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    run = raylt.run(config, out=tmp_path, name="one", fleet="local", quiet=True, callbacks=trackers(["wandb"]))
    (file,) = (run.folder / "wandb").glob("offline-run-*/*.wandb")
    deadline, records = time.monotonic() + 60, []
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline  # another process of W&B writes the record later
        time.sleep(0.1)
        records = [Record.FromString(content) for content in records_of(file.read_bytes())]
    curve = [
        item.value_json
        for record in records
        for item in record.history.item
        if "accuracy/test set" in (item.key, *item.nested_key)
    ]
    assert [float(value) for value in curve] == [report["accuracy"] for report in run.reports]
    shown = {
        item.nested_key[1]: item.value_json
        for record in records
        for item in record.history.item
        if item.nested_key[:1] == ["predictions"]
    }
    assert shown["caption"] == '"global model"'
    (picture,) = file.parent.rglob("predictions*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run.finished().summary["rounds"] == 2
    assert load(run.folder / "config.yaml").method["name"] == "fedprox"
