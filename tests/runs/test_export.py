"""What `raylt export` writes does what the run's table shows, for every method, without the run, its data or Ray."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors import safe_open
from small_runs import make_tiny_run
from torch import nn

import raylt
from raylt import Run, metrics
from raylt.core.states import SavedStates
from raylt.data.cache import load
from raylt.data.samples import Samples
from raylt.errors import CheckpointError, ConfigError, DataError
from raylt.methods import METHODS
from raylt.runs import artefact, export
from raylt.runs.exporting import card_of
from raylt.runs.verify import verify

CASES = [(name, "classification") for name in METHODS] + [(name, "segmentation") for name in ("fedavg", "mupfl")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def plain(folder):
    return make_tiny_run(folder, "fedavg", "federation.rounds=1", name="plain")


@pytest.fixture(scope="module")
def personal(folder):
    return make_tiny_run(folder, "fedper", "data.partition=by_id", name="personal")


def counts(run, model) -> torch.Tensor:
    """What a model says of the run's test set, by the model's own `predict`."""
    samples = Samples(run.task.test, run.task.facts, torch.device("cpu"))
    labels = model.predict(load(run.task.test.x)).labels
    truth = samples.y.long()
    return metrics.confusion(labels, truth, run.task.classes, 255 if truth.ndim == 3 else None)


@pytest.mark.parametrize(("name", "kind"), CASES, ids=["-".join(case) for case in CASES])
def test_the_exported_file_gives_what_was_judged(folder, name, kind):
    run = make_tiny_run(folder, name, "federation.rounds=1", name=f"{name}-{kind}", maps=kind == "segmentation")
    file = raylt.export(run)
    judged = run.matrices()
    if not run.method.personal:
        assert torch.equal(counts(run, raylt.load_model(file)), judged.shared)
        return
    matrices = {id: counts(run, raylt.load_model(file, id)) for id in range(4)}
    assert all(torch.equal(matrices[id], judged.clients[id]) for id in range(4))
    seen = metrics.seen_by_each(matrices, torch.from_numpy(run.task.views), range(4))
    figures = metrics.by_client(seen, torch.from_numpy(run.task.client_counts))
    assert figures == {kind: run.reports[-1]["by_client"][kind] for kind in figures}


# what it says of itself

def test_a_file_says_what_it_is(plain):
    about = artefact.read(raylt.export(plain)).about
    assert (about["model"], about["method"]["name"], about["rounds"], about["clients"]) == ("small", "fedavg", 1, None)
    assert about["input"] == {"height": 8, "width": 8, "channels": 1, "mean": list(plain.task.mean),
                              "std": list(plain.task.std), "fit": "crop"}
    assert about["class_names"] == ["up left", "up right", "low left", "low right"]
    assert (about["run"], about["split_sha256"]) == (plain.sha256, plain.split.sha256)
    assert about["figures"]["accuracy"] == plain.summary["accuracy"]["last"]
    assert about["figures"]["clients_matched"] == plain.summary["clients"]["mean"]
    assert about["versions"]["torch"] == torch.__version__


def test_a_card_stands_beside_it(plain, personal):
    card = card_of(raylt.export(plain)).read_text()
    assert "raylt predict exported.safetensors IMAGE ...\n" in card
    assert f"| accuracy on the test set | {100 * plain.summary['accuracy']['last']:.2f} % |" in card
    card = card_of(raylt.export(personal)).read_text()
    assert '--client "wien"' in card
    assert "\n| bregenz |" in card


def test_entries_that_all_clients_share_stand_once(personal):
    with safe_open(raylt.export(personal), framework="pt") as file:
        names = set(file.keys())
    network = personal.model().network.state_dict()
    assert {name for name in network if name.startswith("encoder.")} < names
    assert {name for name in names if name.startswith("classifier.")} == {
        f"classifier.{part}@{id}" for part in ("weight", "bias") for id in range(4)}


def test_values_that_some_clients_share_stand_once():
    values, same = artefact.Values(), torch.tensor([float("nan"), 1.0])
    for id, value in enumerate([same, same.clone(), torch.tensor([2.0, 1.0])]):
        values.add(id, {"a": value, "b": torch.ones(())})
    assert values.tensors().keys() == {"a@0", "a@2", "b"}
    assert [values.own_of(id) for id in range(3)] == [{"a": 0}, {"a": 0}, {"a": 2}]


# whose

@pytest.mark.parametrize("client", ["linz", "2", 2])
def test_one_client_has_a_file_of_its_own(personal, tmp_path, client):
    file = raylt.export(personal, tmp_path / "one.safetensors", client=client)
    images, expected = load(personal.task.test.x), personal.client_model(2)
    assert torch.equal(raylt.load_model(file).predict(images).probabilities, expected.predict(images).probabilities)
    assert [entry["name"] for entry in artefact.read(file).clients] == ["linz"]


def test_clients_that_there_are_not_are_refused(plain, personal, tmp_path):
    with pytest.raises(ConfigError, match="has no model of a client paris; it has wien, graz, linz, bregenz"):
        raylt.export(personal, client="paris")
    file = raylt.export(personal)
    with pytest.raises(ConfigError, match="each client has a model of its own; give --client, one of wien, graz"):
        raylt.load_model(file)
    with pytest.raises(ConfigError, match="has the global model alone; leave out client wien"):
        raylt.load_model(raylt.export(plain), "wien")
    with pytest.raises(ConfigError, match="--format pt2: a file holds one model, and here: each client has a model"):
        raylt.export(personal, tmp_path / "all.pt2", format="pt2")


# without anything else

def test_it_is_read_without_data_and_without_ray(tmp_path):
    run = make_tiny_run(tmp_path, "fedper", "federation.rounds=1")
    file = shutil.copy(raylt.export(run), tmp_path / "alone.safetensors")
    np.save(tmp_path / "images.npy", load(run.task.test.x))
    expected = run.client_model(1).predict(load(run.task.test.x)).labels.tolist()
    shutil.rmtree(run.folder)
    (tmp_path / "pictures.npz").unlink()
    script = f"""
import json, sys
sys.modules["ray"] = None
import numpy, raylt
model = raylt.load_model({str(file)!r}, "1")
print(json.dumps(model.predict(numpy.load({str(tmp_path / "images.npy")!r})).labels.tolist()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


class Brightness(raylt.Method):
    """Its logits are not those of its network alone: a bright image is of the last class."""

    name: ClassVar[str] = "brightness"
    paper: ClassVar[str] = "for tests"

    bright: float = raylt.hp(0.0, raylt.hyper.Uniform(-1.0, 1.0), "for tests")

    def predict(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        bright = x.mean((1, 2, 3)) > self.bright
        return torch.where(bright[:, None] & (torch.arange(4) == 3), 9.0, model(x) - 5 * (torch.arange(4) == 3))


@pytest.mark.parametrize("format", ["safetensors", "pt2"])
def test_what_a_method_predicts_by_is_in_the_file(tmp_path, format):
    raylt.register(Brightness)
    run = make_tiny_run(tmp_path, "brightness", "federation.rounds=1", "method.bright=-0.1")
    model = raylt.load_model(raylt.export(run, format=format))
    matrix = counts(run, model)
    assert 0 < matrix[:, 3].sum() < matrix.sum()
    assert metrics.accuracy(matrix) == run.summary["global_accuracy"]
    assert not torch.equal(matrix, metrics.confusion(
        run.model().network(run.model().preprocess(load(run.task.test.x))).argmax(1),
        torch.from_numpy(run.task.test.y), 4))


# graphs

@pytest.mark.parametrize("format", ["pt2", "onnx"])
@pytest.mark.parametrize(("method", "client"), [("fedavg", None), ("bpfed", "3")])
def test_graphs_give_what_was_judged(folder, format, method, client):
    if format == "onnx":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    owned = ["method.argmax=owned"] if method == "bpfed" else []
    run = make_tiny_run(folder, method, "federation.rounds=1", *owned, name=f"{method}-{format}")
    model = raylt.load_model(raylt.export(run, format=format, client=client))
    expected = run.model() if client is None else run.client_model(int(client))
    assert torch.equal(counts(run, model), counts(run, expected))
    assert model.class_names == run.task.class_names
    assert model.predict(load(run.task.test.x)[:1]).labels.shape == (1,)        # not as many as were traced
    assert model.about["run"] == run.sha256


# what is no such file

def test_other_files_are_refused(plain, tmp_path):
    for name in ("a.safetensors", "a.pt2"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match=f"{name}: cannot be read .*; give a file that raylt export wrote"):
            raylt.load_model(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: does not say what it is"):
        raylt.load_model(plain.folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"a\.bin: must be a file of raylt export, which ends in \.safetensors, "):
        raylt.load_model(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"--out .*a\.bin: must end in \.safetensors"):
        raylt.export(plain, Path("a.bin"))


def test_a_model_that_its_entries_do_not_say_is_refused(tmp_path):
    class Doubled(raylt.Method):
        name: ClassVar[str] = "doubled"
        paper: ClassVar[str] = "for tests"

        def global_model(self, server):
            model = raylt.SplitModel(server.model.encoder, server.model.dim, server.model.classes)
            model.classifier = nn.Sequential(nn.ReLU(), server.model.classifier)
            return model

    raylt.register(Doubled)
    run = make_tiny_run(tmp_path, "doubled", "federation.rounds=1")
    with pytest.raises(ConfigError, match=r"method = doubled: its model cannot be built .*--format pt2"):
        raylt.export(run)
    matrix = counts(run, raylt.load_model(raylt.export(run, format="pt2")))
    assert metrics.accuracy(matrix) == run.summary["global_accuracy"]


# without the data

@pytest.mark.parametrize("method", ["fedavg", "sfd", "bpfed", "mupfl", "fedloge", "fedrod"])
def test_models_are_opened_where_the_data_are_gone(tmp_path, method):
    run = make_tiny_run(tmp_path, method, "data.partition=by_id")
    images = load(run.task.test.x)
    experiment = run.experiment()           # with all data
    ids = [0, 3] if run.method.personal else [0]
    expected = [export.client_model(experiment, run.setup, id, _private(run, id)).predict(images).probabilities
                for id in ids]
    shared = export.global_model(experiment, run._files.model()).predict(images).probabilities
    (tmp_path / "pictures.npz").unlink()
    again = Run.open(run.folder)
    assert torch.equal(again.model().predict(images).probabilities, shared)
    assert [torch.equal(model.predict(images).probabilities, known)
            for (_, model), known in zip(again.client_models(ids), expected, strict=True)] == [True] * len(ids)
    assert raylt.export(again, client=3).exists()
    with pytest.raises(DataError, match=r"pictures\.npz"):
        _ = again.task


def test_clients_with_label_maps_hold_as_many_pixels_of_each_class_as_they_did(tmp_path):
    run = make_tiny_run(tmp_path, "fedavg", "federation.rounds=1", maps=True)
    task, outline = run.task, run.outline
    cpu = torch.device("cpu")
    for id, shard in enumerate(outline.shards):
        assert len(shard) == len(task.shards[id])
        assert torch.equal(Samples(shard, outline.facts, cpu).counts(task.classes),
                           Samples(task.shards[id], task.facts, cpu).counts(task.classes))


def test_an_outline_that_was_changed_is_refused(tmp_path):
    run = make_tiny_run(tmp_path, "fedavg", "federation.rounds=1")
    file = run.folder / "outline.json"
    file.write_text(file.read_text().replace("up left", "left up"))
    with pytest.raises(CheckpointError, match=r"outline\.json: was changed after the run was made"):
        Run.open(run.folder).model()
    assert [finding.what for finding in verify(run.folder) if not finding.whole] == ["outline.json"]


def _private(run, id):
    saved = run.checkpoint()
    return SavedStates(saved).read(id)


def test_the_figures_are_those_of_the_model_in_the_file(tmp_path):
    class Stop(raylt.Callback):
        def on_step(self, report):
            if report.step == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raylt.run("fedavg", out=tmp_path, name="it", fleet="local", quiet=True, callbacks=[Stop()], rounds=5, clients=3,
                  epochs=1, output={"checkpoint_every": 3})
    run = Run.open(tmp_path / "it")
    about = artefact.read(raylt.export(run)).about
    assert (len(run.reports), about["rounds"]) == (4, 3)
    assert about["figures"]["accuracy"] == run.reports[2]["accuracy"]
