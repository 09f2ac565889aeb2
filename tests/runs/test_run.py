import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file
from small_runs import make_run

import raylt
from raylt import Run
from raylt.core.checkpoint.client_states import SavedStates
from raylt.data.images.cache import load as load_images
from raylt.errors import CheckpointError, ConfigError, DataError

SETTINGS = "federation.rounds=3", "data.clients=4", "output.keep=3"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs"), "plain", *SETTINGS, "method=fedprox", "evaluation.every=2")


@pytest.fixture(scope="module")
def personal(tmp_path_factory) -> Run:
    return make_run(tmp_path_factory.mktemp("runs"), "personal", *SETTINGS, "method=fedper")


def copied(run: Run, place: Path) -> Run:
    return Run.open(shutil.copytree(run.folder, place))


def accuracy(model: torch.nn.Module, run: Run) -> float:
    labels = model.predict(load_images(run.task.test.x)).labels  # pyright: ignore[reportCallIssue]
    return float((labels == torch.from_numpy(run.task.test.y)).double().mean())


# properties of the run folder


def test_a_run_says_what_was_asked_for(plain):
    run = Run.open(str(plain.folder))
    assert (run.name, run.config.method, run.method.name) == ("plain", {"name": "fedprox", "mu": 0.01}, "fedprox")
    assert run.split.sha256 == run.task.split.sha256 == run.summary["split_sha256"]
    assert repr(run) == f"Run('{plain.folder}', done)"


@pytest.mark.parametrize("made", [True, False])
def test_open_refuses_what_is_no_run_folder_and_leaves_nothing_there(tmp_path, made):
    folder = tmp_path / "other"
    if made:
        folder.mkdir()
    with refused("run.not-found", CheckpointError, path=str(folder)):
        Run.open(folder)
    assert Run(folder).state == "missing"
    assert not made or list(folder.iterdir()) == []


@pytest.mark.slow
def test_state_is_missing_running_stopped_or_done(plain, tmp_path):
    run = copied(plain, tmp_path / "run")
    assert run.state == "done"
    (run.folder / "summary.json").unlink()
    assert run.state == "stopped"
    script = f"""
import time
from pathlib import Path
from raylt.runs.folder.writer import Journal
journal = Journal(Path({str(run.folder)!r}))
print("held", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert run.state == "running"
        with refused("run.busy", CheckpointError, path=str(run.folder)):
            run.resume(fleet="local", quiet=True)
        holder.kill()
    assert run.state == "stopped"
    with refused("run.not-finished", CheckpointError, path=str(run.folder)) as caught:
        assert run.summary
    assert f"raylt.resume({str(run.folder)!r})" in str(caught.value)


def test_a_line_that_is_being_written_is_no_report_yet(plain, tmp_path):
    run = copied(plain, tmp_path / "run")
    (run.folder / "summary.json").unlink()
    with (run.folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "acc')
    assert [report["step"] for report in run.reports] == [1, 2, 3]


# tables


def test_metrics_are_one_value_a_row(plain):
    frame = plain.metrics
    assert list(frame.columns) == ["step", "phase", "metric", "group", "value"]
    assert frame.value.dtype == float
    whole = frame[(frame.metric == "accuracy") & (frame.group == "all")]
    assert whole.step.tolist() == [2, 3]  # evaluation.every = 2, and the last round is always judged
    assert whole.value.iloc[-1] == plain.summary["accuracy"]["last"]
    for metric, direction in (("bytes_up", "up"), ("bytes_down", "down")):
        assert frame[frame.metric == metric].value.sum() == plain.summary["bytes"][direction]
    few = frame.query("metric == 'accuracy' and group == 'few' and step == 3").value.item()
    assert few == plain.summary["groups"]["few"]
    assert frame[frame.metric == "loss"].group.unique().tolist() == ["method"]
    groups = {metric: set(frame[frame.metric == metric].group) for metric in ("miou", "client_miou")}
    for group, field in (("training", "seconds"), ("evaluation", "evaluation_seconds")):
        seconds = frame[(frame.metric == "seconds") & (frame.group == group)].value.tolist()
        assert seconds == [report[field] for report in plain.reports]
    assert groups == {"miou": {"all"}, "client_miou": {"mean", "worst_decile"}}
    assert not frame.duplicated(["step", "metric", "group"]).any()


def test_metrics_say_how_many_clients_took_part(plain):
    frame = plain.metrics
    assert frame[frame.metric == "participants"].value.tolist() == [4, 4, 4]
    assert frame[frame.metric == "lost"].value.tolist() == [0, 0, 0]


def test_clients_are_one_value_a_row(plain):
    frame = plain.clients
    assert list(frame.columns) == ["step", "phase", "metric", "client", "value"]
    assert frame.step.unique().tolist() == [3]
    assert set(frame.metric) == {"owned", "matched", "long_tailed", "global", "miou"}
    matched = frame[frame.metric == "matched"]
    assert matched.client.tolist() == [0, 1, 2, 3]
    assert matched.value.mean() == pytest.approx(plain.summary["clients"]["mean"])


def test_frames_of_a_run_without_steps_have_their_columns(plain, tmp_path):
    run = copied(plain, tmp_path / "run")
    (run.folder / "summary.json").unlink()
    (run.folder / "metrics.jsonl").unlink()
    assert run.metrics.empty
    assert list(run.clients.columns) == ["step", "phase", "metric", "client", "value"]


# resuming


def test_a_resumed_run_ends_as_an_undisturbed_one(plain, tmp_path):
    run = copied(plain, tmp_path / "run")
    (run.folder / "summary.json").unlink()
    shutil.rmtree(run.folder / "checkpoints/000003")
    steps = []

    class Steps(raylt.Callback):
        def on_step(self, report):
            steps.append(report.step)

    threads = torch.get_num_threads()
    assert raylt.resume(run.folder, fleet="local", quiet=True, callbacks=[Steps()]).state == "done"
    assert torch.get_num_threads() == threads
    assert steps == [3]
    assert run.summary["model_sha256"] == plain.summary["model_sha256"]


def test_a_resumed_run_keeps_its_settings(plain):
    with refused("run.changed", CheckpointError, keys=["method.mu", "local.lr"]) as caught:
        plain.resume(["local.lr=0.1", "method.mu=2"], fleet="local", quiet=True)
    assert "mu: 0.01 -> 2; local.lr: 0.05 -> 0.1" in str(caught.value)


def test_more_rounds_are_not_named_among_the_settings_that_a_resumed_run_keeps(plain):
    with refused("run.changed", CheckpointError) as caught:
        raylt.resume(plain.folder, ["local.lr=0.1", "federation.rounds=9"], fleet="local", quiet=True)
    assert "keeps its settings (local.lr: 0.05 -> 0.1)" in str(caught.value)
    assert "federation.rounds=N" in str(caught.value)


# models


def test_the_model_of_a_run_predicts_what_was_judged(plain):
    model = plain.model()
    assert not model.training
    assert model.class_names == plain.task.class_names
    assert accuracy(model, plain) == pytest.approx(plain.summary["global_accuracy"])
    network = load_file(plain.folder / "model.safetensors")
    assert all(torch.equal(value, network[name]) for name, value in model.network.state_dict().items())


def test_a_finished_run_gives_no_model_of_an_earlier_step(plain, tmp_path):
    run = copied(plain, tmp_path / "run")
    newest = max((run.folder / "checkpoints").iterdir())
    (newest / "manifest.json").write_text("{}")
    with refused("checkpoint.damaged", CheckpointError, step=3, newest=2):
        run.model()


def test_a_prediction_has_labels_names_and_probabilities(plain):
    images = load_images(plain.task.test.x)[:7]
    prediction = plain.model().predict(images)
    assert prediction.probabilities.shape == (7, 10)
    assert torch.allclose(prediction.probabilities.sum(1), torch.ones(7))
    assert prediction.names == [plain.task.class_names[label] for label in prediction.labels]
    assert plain.model().predict(images[:0]).names == []
    assert torch.equal(plain.model().predict(torch.from_numpy(images)).labels, prediction.labels)


def test_images_may_stand_in_a_list(plain):
    images = load_images(plain.task.test.x)[:3]
    labels = plain.model().predict(images).labels
    assert torch.equal(plain.model().predict(list(images)).labels, labels)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype("float32"),
        lambda x: x[..., 0],
        lambda x: x[0],
        lambda x: "photo.png",
        lambda x: None,
        lambda x: [x[0], x[1][:2]],
    ],
)
def test_images_of_another_type_or_shape_are_refused(plain, change):
    with pytest.raises(DataError, match=r"^images: .*Give uint8 \[n, H, W, 1\]"):
        plain.model().predict(change(load_images(plain.task.test.x)[:3]))


def test_a_clients_model_predicts_what_was_judged_of_it(personal):
    judged = personal.clients.query("metric == 'global' and step == 3").set_index("client").value
    assert accuracy(personal.client_model(2), personal) == pytest.approx(judged[2])
    assert accuracy(personal.client_model(1), personal) == pytest.approx(judged[1])
    assert judged[1] != judged[2]


def test_a_model_reads_the_private_state_of_no_other_client(personal, monkeypatch):
    read = SavedStates.read
    ids = []

    def read_and_note(self, id):
        ids.append(id)
        return read(self, id)

    monkeypatch.setattr(SavedStates, "read", read_and_note)
    global_entries = personal.model().network.state_dict()
    assert ids == []
    assert personal.client_model(2).network.state_dict().keys() == global_entries.keys()
    assert ids == [2]
    judged = personal.clients.query("metric == 'global' and step == 3").set_index("client").value
    models = dict(personal.client_models([1, 3]))
    assert ids == [2, 1, 3]
    assert [accuracy(model, personal) for model in models.values()] == pytest.approx([judged[1], judged[3]])


def test_a_client_of_a_method_without_personal_models_has_the_global_one(plain):
    global_entries, client_entries = plain.model().network.state_dict(), plain.client_model(0).network.state_dict()
    assert all(torch.equal(global_entries[name], client_entries[name]) for name in global_entries)


def test_clients_that_there_are_not_have_no_model(plain):
    with pytest.raises(ConfigError, match=r"^client: has no samples \(4\)\. Choose one of 0, 1, 2, 3"):
        plain.client_model(4)


def test_with_local_statistics_only_clients_have_models(tmp_path):
    run = make_run(tmp_path, "local", "method=fedavg", "federation.batchnorm=local")
    with pytest.raises(ConfigError, match=r"there is no global model .*Use client_model\(id\)"):
        run.model()
    judged = run.clients.query("metric == 'global' and client == 1").value.item()
    assert accuracy(run.client_model(1), run) == pytest.approx(judged)


def test_a_run_that_committed_nothing_has_no_model(plain, tmp_path):
    run = copied(plain, tmp_path / "run")
    shutil.rmtree(run.folder / "checkpoints")
    with refused("checkpoint.not-found", CheckpointError, path=str(run.folder)):
        run.model()


def test_summary_is_what_is_in_the_file(plain):
    assert plain.summary == json.loads((plain.folder / "summary.json").read_text())
