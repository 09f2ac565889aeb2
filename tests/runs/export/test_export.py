"""Exported models reproduce the run's figures for every method, without the run, its data or Ray."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from safetensors import safe_open
from safetensors.torch import save_file
from small_runs import make_run, make_tiny_run
from torch import nn

import raylt
from raylt import Run, metrics
from raylt.data.images.cache import load
from raylt.data.samples import Samples
from raylt.errors import CheckpointError, ConfigError, DataError
from raylt.methods import METHODS
from raylt.runs.export import artefact, graph_formats, trained_model
from raylt.runs.export.evaluate import Evaluation
from raylt.runs.export.export import card_of, unfinished
from raylt.runs.export.load import load_image, load_images
from raylt.runs.export.model_card import FIGURES, model_card
from raylt.runs.verify import verify

CASES = [(name, "classification") for name in METHODS] + [(name, "segmentation") for name in ("fedavg", "mupfl")]
# one global model, one model a client, parts that only clients keep, and label maps; the others run with the slow tests
PLUGIN = {"kind": "model", "name": "mine", "origin": "own.py", "sha256": None}
QUICKLY = {
    ("fedavg", "classification"),
    ("ditto", "classification"),
    ("fedper", "classification"),
    ("mupfl", "segmentation"),
}


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
    """Return the counts of a model's predictions on the run's test set."""
    samples = Samples(run.task.test, run.task.spec, torch.device("cpu"))
    labels = model.predict(load(run.task.test.x)).labels
    truth = samples.y.long()
    return metrics.confusion(labels, truth, run.task.classes, 255 if truth.ndim == 3 else None)


@pytest.mark.parametrize("place", [-1, -400, "class_names"])
def test_an_exported_file_that_was_changed_is_refused(plain, tmp_path, place):
    file = raylt.export(plain, tmp_path / "model.safetensors")
    raylt.load_model(file)
    content = bytearray(file.read_bytes())
    content[content.index(place.encode()) + len(place) + 6 if isinstance(place, str) else place] ^= 1
    file.write_bytes(content)
    with refused("export.changed", CheckpointError, path=str(file)):
        raylt.load_model(file)


def test_an_exported_file_of_an_early_version_has_no_hash_and_is_read(plain, tmp_path):
    file = raylt.export(plain, tmp_path / "model.safetensors")
    made = artefact.read(file)
    description = {key: value for key, value in made.description.items() if key != "sha256"}
    save_file(made.tensors, file, {artefact.KEY: artefact.to_json(description)})
    assert raylt.load_model(file).class_names == plain.model().class_names


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*case, marks=[] if case in QUICKLY else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_the_exported_file_gives_what_was_judged(folder, name, kind):
    run = make_tiny_run(folder, name, "federation.rounds=1", name=f"{name}-{kind}", maps=kind == "segmentation")
    file = raylt.export(run)
    judged = run.matrices()
    if not run.method.personal:
        assert torch.equal(counts(run, raylt.load_model(file)), judged.shared)
        return
    matrices = {id: counts(run, raylt.load_model(file, id)) for id in range(4)}
    assert all(torch.equal(matrices[id], judged.clients[id]) for id in range(4))
    seen = metrics.seen_by_each(matrices, run.task.views, range(4))
    figures = metrics.by_client(seen, torch.from_numpy(run.task.client_counts))
    assert figures == {kind: run.reports[-1]["by_client"][kind] for kind in figures}


# the description inside the file


def test_a_file_says_what_it_is(plain):
    about = artefact.read(raylt.export(plain)).description
    assert (about["model"], about["method"]["name"], about["rounds"], about["clients"]) == ("small", "fedavg", 1, None)
    assert about["input"] == {
        "height": 8,
        "width": 8,
        "channels": 1,
        "mean": list(plain.task.mean),
        "std": list(plain.task.std),
        "fit": "crop",
        "depth": None,
    }
    assert about["class_names"] == ["up left", "up right", "low left", "low right"]
    assert (about["run"], about["split_sha256"]) == (plain.sha256, plain.split.sha256)
    assert about["figures"]["accuracy"] == plain.summary["accuracy"]["last"]
    assert about["figures"]["clients_matched"] == plain.summary["clients"]["mean"]
    assert about["versions"]["torch"] == torch.__version__


def test_a_file_has_the_rounds_and_the_clients_figures_after_the_last_phase(folder):
    run = make_tiny_run(folder, "bpfed", "data.partition=by_id", name="last phase")
    about = artefact.read(raylt.export(run)).description
    assert (len(run.reports), about["rounds"]) == (3, 2)
    assert about["tests"] == run.summary["tests"]
    first, last = (run.reports[place]["by_client"] for place in (0, -1))
    assert first != last
    for entry in about["clients"]:
        assert entry["figures"] == {kind: values[entry["id"]] for kind, values in last.items()}


@pytest.mark.slow
@pytest.mark.parametrize("depth", [None, 12])
def test_an_exported_model_prepares_images_and_scales_deep_ones_as_its_training_did(tmp_path, depth):
    for name, level in (("dark", 400), ("light", 3000)):
        for i in range(6):
            for part in ("train", "test"):
                file = tmp_path / "scans" / part / name / f"{i}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8), level + i, np.uint16)).save(file)
    run = raylt.run(
        "fedavg",
        source=f"folder:{tmp_path / 'scans'}",
        root=str(tmp_path / "root"),
        size=8,
        fit="pad",
        depth=depth,
        clients=2,
        partition="iid",
        model="small",
        rounds=1,
        fleet="local",
        out=tmp_path,
    )
    file = tmp_path / "scans/train/light/3.png"
    level = 3003 * 255 / (65535 if depth is None else 4095)
    for path in (raylt.export(run), raylt.export(run, tmp_path / "it.pt2", format="pt2")):
        model = raylt.load_model(path)
        assert (model.depth, model.fit) == (depth, "pad")
        images = load_images([file], model.shape, model.fit, model.depth)
        assert np.abs(images - level).max() < 1
    assert (load_images([file], (8, 16, 1), "crop", depth) == images[0, 0, 0, 0]).all()


@pytest.mark.slow
def test_the_model_of_an_earlier_round_is_that_of_a_shorter_run(folder):
    settings = ["output.keep=9", "federation.rounds=3"]
    run = make_tiny_run(folder, "fedavg", *settings, name="three")
    short = make_tiny_run(folder, "fedavg", "federation.rounds=2", name="two")
    file = raylt.export(run, folder / "second.safetensors", round=2)
    assert torch.equal(counts(run, raylt.load_model(file)), short.matrices().shared)
    about = artefact.read(file).description
    assert (about["rounds"], about["figures"]["accuracy"]) == (2, run.reports[1]["accuracy"])
    own = make_tiny_run(folder, "fedper", *settings, "data.partition=by_id", name="own three")
    own_short = make_tiny_run(folder, "fedper", "federation.rounds=2", "data.partition=by_id", name="own two")
    assert torch.equal(counts(own, own.client_model(1, 2)), counts(own, own_short.client_model(1)))


@pytest.mark.slow
@pytest.mark.parametrize("best", [1, 3])
def test_the_best_round_by_validation_is_kept_and_exported(folder, monkeypatch, best):
    def judge(method, server, fleet, task):
        return {"accuracy": 0.9 if server.round == best else 0.1}

    monkeypatch.setattr("raylt.core.evaluation.evaluator.validate", judge)
    settings = ["federation.rounds=5", "data.validation=0.2", "output.keep=2"]
    run = make_tiny_run(folder, "fedavg", *settings, name=f"best-{best}")
    assert run.best_step() == best
    short = make_tiny_run(folder, "fedavg", f"federation.rounds={best}", "data.validation=0.2", name=f"short-{best}")
    file = raylt.export(run, folder / f"best-{best}.safetensors", round="best")
    assert torch.equal(counts(run, raylt.load_model(file)), short.matrices().shared)
    with refused("checkpoint.not-kept", step=2):
        raylt.export(run, round=2)


def test_an_export_of_one_client_or_round_has_a_name_of_its_own(folder):
    run = make_tiny_run(folder, "fedper", "data.partition=by_id", "output.keep=9", name="named")
    names = [raylt.export(run, **which).name for which in ({}, {"client": "graz"}, {"client": 1, "round": 1})]
    assert names == ["exported.safetensors", "exported-client-1.safetensors", "exported-client-1-round-1.safetensors"]


def test_a_file_says_which_part_of_an_unfinished_run_it_is_from(folder):
    run = make_tiny_run(folder, "bpfed", "data.partition=by_id", "output.keep=9", name="cut")
    assert "stage" not in artefact.read(raylt.export(run)).description
    assert unfinished(run) is None
    file = raylt.export(run, round=1)
    assert artefact.read(file).description["stage"] == "round 1 of 2, without the last phase"
    assert "Not the run's last model: it is from round 1 of 2, without the last phase.\n" in card_of(file).read_text()
    (run.folder / "summary.json").unlink()
    shutil.rmtree(run.folder / "checkpoints/000003")
    assert unfinished(raylt.Run.open(run.folder)) == "round 2 of 2, without the last phase"


def test_without_validation_images_no_round_is_the_best(plain):
    with refused("run.not-judged", ConfigError, key="data.validation") as caught:
        raylt.export(plain, round="best")
    assert "(0)" not in str(caught.value)


def test_a_file_in_a_folder_that_does_not_exist_is_refused(plain, tmp_path):
    for to in (tmp_path / "absent/it.safetensors", Path(5 * "x/", "it.pt2")):
        with refused("file.unwritable", ConfigError, key="to", path=str(to)):
            raylt.export(plain, to, format=to.suffix[1:])
    with refused("config.wrong-type", ConfigError, key="to"):
        raylt.export(plain, 5)


def test_a_model_card_is_written_next_to_the_file(plain, personal):
    card = card_of(raylt.export(plain)).read_text()
    assert "raylt predict exported.safetensors IMAGE ...\n" in card
    assert f"| accuracy on the test set | {100 * plain.summary['accuracy']['last']:.2f} % |" in card
    card = card_of(raylt.export(personal)).read_text()
    assert "--client wien\n" in card
    assert "\n| bregenz |" in card


def test_a_model_card_has_fifty_clients_and_what_their_figures_are_based_on(personal):
    about = artefact.read(raylt.export(personal)).description
    figures = {"matched": 0.25, "local": 0.5}
    clients = [{"id": id, "name": f"c{id}", "own": {}, "figures": figures, "tested": 7} for id in range(51)]
    about |= {"clients": clients, "model": "a``b", "tests": about["tests"] | {"thresholds": [3, 9]}}
    card = model_card(about, "it.safetensors")
    assert "| client | local, n | matched |\n" in card
    assert "\n| c49 | 50.00 %" in card
    assert "| c50 |" not in card
    assert "\n\nand 1 more\n" in card
    assert "more than 9 training samples (many), 3 to 9 (medium) and fewer than 3 (few)" in card
    assert "Network ``` a``b ```, trained" in card


@pytest.mark.parametrize("prepares", [{}, {"side": 112}, {"tower": {"dim": 4}}])
def test_a_model_card_says_whether_the_network_resizes_images_itself(plain, prepares):
    card = model_card(artefact.read(raylt.export(plain)).description | prepares, "it.safetensors")
    assert ("The network then resizes and normalises them" in card) == bool(prepares)


def test_a_model_card_explains_each_figure_over_clients():
    assert {f"clients_{kind}" for kind in (*metrics.KINDS, metrics.LOCAL)} <= FIGURES.keys()


@pytest.mark.parametrize(
    ("method", "settings", "clip", "covers"),
    [
        ("fedncm", ("privacy.epsilon=100", "privacy.clip=3"), 3.0, "classes"),
        ("fedavg", ("privacy.update_epsilon=1000", "privacy.update_clip=2.5", "federation.participation=1"), 2.5, "1 "),
    ],
)
def test_a_file_and_its_card_have_the_guarantee_of_the_noise_and_what_it_does_not_cover(
    folder, method, settings, clip, covers
):
    run = make_tiny_run(folder, method, *settings, "federation.rounds=1", name=f"noise-{method}")
    file = raylt.export(run)
    guarantee = artefact.read(file).description["privacy"]
    assert guarantee == {**run.summary["privacy"], "clip": clip}
    card = card_of(file).read_text()
    assert f"| epsilon, delta | {guarantee['epsilon']:g}, 1e-05 for one " in card
    assert f", lengths up to {clip:g} |" in card
    assert f"| not covered | {guarantee['not_covered'][:15]}" in card
    assert covers in guarantee["covers"]
    assert "in 1 round on " in card


def test_a_card_without_noise_has_no_guarantee(plain):
    file = raylt.export(plain)
    assert "privacy" not in artefact.read(file).description
    assert "## Privacy" not in card_of(file).read_text()


def test_the_shares_of_a_label_map_are_those_of_its_pixels():
    labels, probabilities = torch.tensor([[[0, 0], [0, 1]]]), torch.full((1, 2, 2, 2), 0.5)
    assert trained_model.Prediction(labels, probabilities, ("a", "b")).shares == [{"a": 0.75, "b": 0.25}]


def test_entries_that_all_clients_share_stand_once(personal):
    with safe_open(raylt.export(personal), framework="pt") as file:
        names = set(file.keys())
    network = personal.model().network.state_dict()
    assert {name for name in network if name.startswith("encoder.")} < names
    assert {name for name in names if name.startswith("classifier.")} == {
        f"classifier.{part}@{id}" for part in ("weight", "bias") for id in range(4)
    }


def test_values_that_some_clients_share_stand_once():
    values, same = artefact.DistinctEntries(), torch.tensor([float("nan"), 1.0])
    for id, value in enumerate([same, same.clone(), torch.tensor([2.0, 1.0])]):
        values.add(id, {"a": value, "b": torch.ones(())})
    assert values.tensors().keys() == {"a@0", "a@2", "b"}
    assert [values.own_of(id) for id in range(3)] == [{"a": 0}, {"a": 0}, {"a": 2}]
    values.add(3, {"a": same})
    assert values.tensors().keys() == {"a@0", "a@2", "b@0"}
    assert [values.own_of(id) for id in (2, 3)] == [{"a": 2, "b": 0}, {"a": 0}]


def test_a_name_comes_before_an_id_and_of_two_clients_of_a_name_the_first():
    choices = [(0, "2"), (1, "a"), (2, "a")]
    assert [artefact.choose_client(client, choices, "it") for client in ("2", "a", 2, "1")] == [0, 1, 0, 1]


def test_an_exported_file_of_a_model_that_diverged_is_refused(plain, tmp_path):
    made = artefact.read(raylt.export(plain, tmp_path / "model.safetensors"))
    made.tensors["classifier.bias"][0] = torch.nan
    artefact.write(made.path, made.tensors, made.description)
    with refused("model.not-finite", CheckpointError, entry="classifier.bias"):
        raylt.load_model(made.path)


# models of clients


@pytest.mark.parametrize("client", ["linz", "2", 2])
def test_one_client_has_a_file_of_its_own(personal, tmp_path, client):
    file = raylt.export(personal, tmp_path / "one.safetensors", client=client)
    images, expected = load(personal.task.test.x), personal.client_model(2)
    assert torch.equal(raylt.load_model(file).predict(images).probabilities, expected.predict(images).probabilities)
    assert [entry["name"] for entry in artefact.read(file).clients] == ["linz"]


def test_clients_that_there_are_not_are_refused(plain, personal, tmp_path):
    with refused("client.unknown", ConfigError, client="paris"):
        raylt.export(personal, client="paris")
    file = raylt.export(personal)
    with refused("client.not-named", ConfigError) as caught:
        raylt.load_model(file)
    assert "wien, graz" in str(caught.value)
    with refused("client.unknown", ConfigError, client="wien"):
        raylt.load_model(raylt.export(plain), "wien")
    with refused("client.not-named", ConfigError):
        raylt.export(personal, tmp_path / "all.pt2", format="pt2")
    graph = raylt.export(personal, tmp_path / "linz.pt2", client="linz", format="pt2")
    assert raylt.load_model(graph, "linz").class_names == personal.task.class_names
    with refused("client.unknown", ConfigError, client="wien"):
        raylt.load_model(graph, "wien")


def test_clients_with_models_are_written_where_others_join_later(tmp_path):
    run = make_run(tmp_path, "r", "method=fedper", "data.clients=5", "data.new_clients=1")
    (new,) = run.outline.new_clients
    others = sorted({0, 1, 2, 3, 4} - {new})
    assert others[-1] >= len(others)  # ids are no positions in a list of these clients
    path = raylt.export(run)
    for client in others:
        assert len(raylt.load_model(path, client=client).class_names) == 10
    with refused("client.unknown"):
        raylt.load_model(path, client=new)


@pytest.mark.parametrize("client", ["Linz", "LINZ", "lins", "linz "])
def test_a_client_named_in_another_way_is_answered_with_the_name_that_is_like_it(personal, client):
    with refused("client.unknown", ConfigError, client=client) as caught:
        raylt.export(personal, client=client)
    assert "Did you mean linz?" in str(caught.value)
    with refused("client.unknown", ConfigError, client=client) as caught:
        personal.client_model(client)
    assert "Did you mean linz?" in str(caught.value)
    with refused("client.unknown", ConfigError, client=client) as caught:
        raylt.load_model(raylt.export(personal), client)
    assert "Did you mean linz?" in str(caught.value)


def test_an_evaluation_says_how_many_images_of_each_class_were_tested():
    figures = Evaluation(("a", "b"), torch.tensor([[4, 3], [1, 2]]), {}).to_json()
    assert [(entry["class"], entry["tested"]) for entry in figures["classes"]] == [("a", 7), ("b", 3)]
    assert (figures["accuracy"], figures["macro"]) == pytest.approx((6 / 10, (4 / 7 + 2 / 3) / 2))


# the file in another process, without the run


@pytest.mark.slow
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
    """A method whose prediction also depends on the image: a bright image is of the last class."""

    name: ClassVar[str] = "brightness"
    paper: ClassVar[str] = "for tests"

    bright: float = raylt.hp(0.0, raylt.hyper.Uniform(-1.0, 1.0), "for tests")

    def predict(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        bright = x.mean((1, 2, 3)) > self.bright
        return torch.where(bright[:, None] & (torch.arange(4) == 3), 9.0, model(x) - 5 * (torch.arange(4) == 3))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "pt2"])
def test_what_a_method_predicts_by_is_in_the_file(tmp_path, format):
    raylt.register(Brightness)
    run = make_tiny_run(tmp_path, "brightness", "federation.rounds=1", "method.bright=-0.1")
    model = raylt.load_model(raylt.export(run, format=format))
    matrix = counts(run, model)
    assert 0 < matrix[:, 3].sum() < matrix.sum()
    assert metrics.accuracy(matrix) == run.summary["global_accuracy"]
    assert not torch.equal(
        matrix,
        metrics.confusion(
            run.model().network(run.model().preprocess(load(run.task.test.x))).argmax(1),
            torch.from_numpy(run.task.test.y),
            4,
        ),
    )


# other images


@pytest.mark.parametrize("format", ["safetensors", "pt2"])
def test_no_images_give_no_predictions(plain, format):
    prediction = raylt.load_model(raylt.export(plain, format=format)).predict(np.zeros((0, 8, 8, 1), np.uint8))
    assert prediction.labels.shape == (0,)
    assert prediction.probabilities.shape == (0, 4)
    assert prediction.shares == []


def test_images_of_a_size_that_a_model_does_not_take_are_refused(plain):
    traced = raylt.load_model(raylt.export(plain, format="pt2"))
    loaded = raylt.load_model(raylt.export(plain))
    loaded.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    for model in (traced, loaded):
        assert len(model.predict(np.zeros((2, 8, 8, 1), np.uint8)).labels) == 2
        with refused("data.wrong-shape", DataError, value=[2, 9, 9, 1]) as caught:
            model.predict(np.zeros((2, 9, 9, 1), np.uint8))
        assert "Give images of 8x8" in str(caught.value)


# graph formats


@pytest.mark.slow
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
    assert model.predict(load(run.task.test.x)[:1]).labels.shape == (1,)  # another batch size than the traced one
    assert model.description["run"] == run.sha256


@pytest.mark.slow
def test_a_graph_that_was_changed_is_refused(folder, tmp_path):
    run = make_tiny_run(folder, "fedavg", "federation.rounds=1", name="graph")
    file = raylt.export(run, tmp_path / "m.pt2", format="pt2")
    content = file.read_bytes()
    name, wrong = b'"up left"', b'"up lefT"'
    assert content.count(name) == 1
    edits = [
        content.replace(name, wrong),
        content[:-1],
        content + b" ",
        content.replace(b"raylt_sha256", b"raylt_sha257"),
    ]
    weights = content.index(b"data/weights/") + 200
    for at in (weights, len(content) - 1, len(content) - 77, len(content) - 90):
        edits.append(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    for edit in edits:
        file.write_bytes(edit)
        with pytest.raises(CheckpointError) as caught:
            raylt.load_model(file)
        assert caught.value.code in ("export.changed", "export.malformed")
    file.write_bytes(content)
    assert raylt.load_model(file).class_names == run.task.class_names


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_file_of_another_program_is_no_graph_with_a_hash(tmp_path, suffix):
    file = tmp_path / f"m{suffix}"
    for content in (b"", b"0", b"0" * 1000):
        file.write_bytes(content)
        assert not graph_formats._check_hash(file)
        digest = hashlib.sha256(content).hexdigest()
        file.write_bytes(content + graph_formats._ending(suffix, digest))
        assert graph_formats._check_hash(file)
        file.write_bytes(content + b"1" + graph_formats._ending(suffix, digest))
        with refused("export.changed", CheckpointError, path=str(file)):
            graph_formats._check_hash(file)


# files that are no exported models


@pytest.mark.parametrize(
    ("change", "code", "problem"),
    [
        (lambda about: about.update(format=1), "export.other-format", "only format 2 (1)"),
        (lambda about: about["class_names"].append("up left"), "export.malformed", "duplicate class name"),
        (lambda about: about["clients"].append(about["clients"][0]), "export.malformed", "duplicate client id"),
        (lambda about: about["input"]["mean"].append(0.5), "export.malformed", "mean and std have 2 and 1 values"),
        (lambda about: about["input"].update(height=2**16, width=2**16), "export.malformed", "65536x65536 pixels"),
        (lambda about: about["guests"].append(PLUGIN | {"origin": "a\nb"}), "export.malformed", "not printable"),
    ],
)
def test_descriptions_that_contradict_themselves_are_refused(personal, tmp_path, change, code, problem):
    file = raylt.export(personal, tmp_path / "it.safetensors")
    about = json.loads(artefact.to_json(artefact.read(file).description))
    artefact.parse(json.dumps(about), file)
    change(about)
    with refused(code, CheckpointError, path=str(file)) as caught:
        artefact.parse(json.dumps(about), file)
    assert problem in str(caught.value)


def test_other_files_are_refused(plain, tmp_path):
    for name in ("a.safetensors", "a.pt2"):
        (tmp_path / name).write_bytes(b"nothing")
        with refused("export.malformed", CheckpointError, path=str(tmp_path / name)):
            raylt.load_model(tmp_path / name)
    with refused("export.malformed", CheckpointError, path=str(plain.folder / "model.safetensors")):
        raylt.load_model(plain.folder / "model.safetensors")
    (tmp_path / "a.bin").write_bytes(b"nothing")
    with refused("export.unknown-format", ConfigError, path=str(tmp_path / "a.bin")):
        raylt.load_model(tmp_path / "a.bin")
    with refused("file.not-found", ConfigError, path=str(tmp_path / "none")):
        raylt.load_model(tmp_path / "none")
    with refused("config.conflict", ConfigError, key="--out", path="a.bin"):
        raylt.export(plain, Path("a.bin"))


def test_a_run_folder_is_loaded_like_its_exported_file(plain, personal):
    x = load(plain.task.test.x)[:5]
    assert torch.equal(raylt.load_model(plain.folder).predict(x).probabilities, plain.model().predict(x).probabilities)
    own = raylt.load_model(str(personal.folder), client="graz").predict(x).probabilities
    assert torch.equal(own, personal.client_model(1).predict(x).probabilities)
    with refused("client.not-named", ConfigError):
        raylt.load_model(personal.folder)
    with refused("run.not-found", CheckpointError, path=str(plain.folder.parent)):
        raylt.load_model(plain.folder.parent)


def test_the_model_of_a_run_fits_image_files_as_its_training_did(plain):
    run = Run.open(plain.folder)
    data = run.config.data.model_copy(update={"fit": "pad", "depth": 12})
    run.__dict__["config"] = run.config.model_copy(update={"data": data})
    assert (run.model().fit, run.model().depth) == ("pad", 12)


def test_true_is_no_client(personal):
    with refused("client.unknown", ConfigError, client=True):
        personal.client_model(True)


@pytest.mark.slow
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
    with refused("export.not-rebuildable", ConfigError, value="doubled"):
        raylt.export(run)
    matrix = counts(run, raylt.load_model(raylt.export(run, format="pt2")))
    assert metrics.accuracy(matrix) == run.summary["global_accuracy"]


# export without the data


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["fedavg", "sfd", "bpfed", "mupfl", "fedloge", "fedrod"])
def test_models_are_opened_where_the_data_are_gone(tmp_path, method):
    run = make_tiny_run(tmp_path, method, "data.partition=by_id")
    images = load(run.task.test.x)
    experiment = run.experiment()  # the experiment builds all data
    ids = [0, 3] if run.method.personal else [0]
    models = trained_model.client_models(experiment, run.setup, run.checkpoint(), ids)
    expected = [model.predict(images).probabilities for _, model in models]
    shared = trained_model.global_model(experiment, run._files.model()).predict(images).probabilities
    (tmp_path / "pictures.npz").unlink()
    again = Run.open(run.folder)
    assert torch.equal(again.model().predict(images).probabilities, shared)
    assert [
        torch.equal(model.predict(images).probabilities, known)
        for (_, model), known in zip(again.client_models(ids), expected, strict=True)
    ] == [True] * len(ids)
    assert raylt.export(again, client=3).exists()
    with pytest.raises(DataError, match=r"pictures\.npz"):
        _ = again.task


def test_clients_with_label_maps_hold_as_many_pixels_of_each_class_as_they_did(tmp_path):
    run = make_tiny_run(tmp_path, "fedavg", "federation.rounds=1", maps=True)
    task, outline = run.task, run.outline
    cpu = torch.device("cpu")
    for id, shard in enumerate(outline.shards):
        assert len(shard) == len(task.shards[id])
        assert torch.equal(
            Samples(shard, outline.spec, cpu).counts(task.classes),
            Samples(task.shards[id], task.spec, cpu).counts(task.classes),
        )


def test_an_outline_that_was_changed_is_refused(tmp_path):
    run = make_tiny_run(tmp_path, "fedavg", "federation.rounds=1")
    file = run.folder / "outline.json"
    file.write_text(file.read_text().replace("up left", "left up"))
    with pytest.raises(CheckpointError, match=r"outline\.json: the file was changed after the run was made"):
        Run.open(run.folder).model()
    assert [finding.what for finding in verify(run.folder) if not finding.whole] == ["outline.json"]


def test_the_figures_are_those_of_the_model_in_the_file(tmp_path):
    class Stop(raylt.Callback):
        def on_step(self, report):
            if report.step == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raylt.run(
            "fedavg",
            out=tmp_path,
            name="it",
            fleet="local",
            quiet=True,
            callbacks=[Stop()],
            rounds=5,
            clients=3,
            epochs=1,
            output={"checkpoint_every": 3},
        )
    run = Run.open(tmp_path / "it")
    about = artefact.read(raylt.export(run)).description
    assert (len(run.reports), about["rounds"]) == (4, 3)
    assert about["figures"]["accuracy"] == run.reports[2]["accuracy"]


def test_an_image_for_a_model_of_another_shape_is_resized_without_a_cut(tmp_path):
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, :8] = 255  # a white stripe at the left edge, which a crop to the centre would lose
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    image = load_image(tmp_path / "wide.png", (40, 20, 3), "crop", None)
    assert image.shape == (40, 20, 3)
    assert (image[:, :3] > 200).all()
    assert (image[:, 6:] < 50).all()


def test_image_files_are_refused_for_a_model_of_two_channels_before_they_are_opened(tmp_path):
    with refused("data.wrong-shape", DataError, channels=2) as caught:
        load_images([tmp_path / "none.png"], (8, 8, 2), "crop")
    assert str(caught.value).count("Pass arrays") == 1


@pytest.mark.slow
def test_models_of_clients_that_never_took_part_compute_their_running_statistics(tmp_path):
    settings = ["model=resnet8", "federation.participation=0.25", "federation.rounds=1"]
    run = make_tiny_run(tmp_path, "fedbn", *settings)
    asked = set(run.reports[0]["participants"])
    idle = next(id for id in range(4) if id not in asked)
    task = run.task
    for id in (*asked, idle):
        answers = run.client_model(id).predict(load(task.test.x)).labels.numpy()
        counts = np.bincount(task.test.y[answers == task.test.y], minlength=4) / np.bincount(task.test.y, minlength=4)
        weights = task.client_counts[id] / task.client_counts[id].sum()
        assert (counts * weights).sum() == pytest.approx(run.reports[-1]["by_client"]["matched"][id])
    raylt.export(run, tmp_path / "models.safetensors")
    assert raylt.load_model(tmp_path / "models.safetensors", client=task.client_names[idle]).class_names
