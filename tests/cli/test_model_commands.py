"""The commands `raylt export` and `raylt predict`."""

import json
import shutil
import unicodedata
from pathlib import Path

import pytest
import torch
from commands import refused
from PIL import Image
from small_runs import make_tiny_run
from tiny import tiny_pretrained

import raylt as raylt_package
from raylt import Run, load_model
from raylt.data.images.cache import load
from raylt.errors import ConfigError
from raylt.metrics import confusion
from raylt.runs.export.evaluate import evaluate
from raylt.runs.export.trained_model import Prediction


@pytest.fixture(scope="module")
def personal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return make_tiny_run(folder, "fedper", "data.partition=by_id", "federation.rounds=1").folder


@pytest.fixture
def images(personal) -> list[str]:
    pixels = load(Run.open(personal).task.test.x)[:3, ..., 0]
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(f"image {number}.png")
    return [f"image {number}.png" for number in range(3)]


def test_what_is_exported_predicts_image_files_as_the_run_does(raylt, personal, images):
    code, out, _ = raylt("export", personal, "--client", "wien", "--out", "wien.safetensors")
    assert (code, out) == (0, "wien.safetensors  wien.safetensors.md\n")
    code, out, err = raylt("predict", "wien.safetensors", *images, "--format", "json")
    assert (code, err) == (0, "")
    answers = json.loads(out)
    expected = Run.open(personal).client_model(0).predict(load(Run.open(personal).task.test.x)[:3])
    assert [answer["image"] for answer in answers] == images
    assert [answer["class"] for answer in answers] == expected.names
    assert [list(answer["shares"].values()) for answer in answers] == expected.probabilities.tolist()
    assert json.loads(raylt("predict", personal, *images, "--client", 0, "--format", "json").out) == answers
    table = raylt("predict", "wien.safetensors", *images).out
    assert images[2] in table
    assert f"{100 * max(answers[2]['shares'].values()):.1f} %" in table


def test_an_adapted_encoder_predicts_image_files_as_it_was_judged(raylt, tmp_path):
    raylt_package.register(tiny_pretrained, "tiny_pretrained", kind="model")
    settings = ("model=tiny_pretrained", "trainable=lora:2", "local.lr=0.5")
    run = make_tiny_run(tmp_path, "fedavg", *settings)
    assert raylt("export", run.folder, "--out", "adapted.safetensors").code == 0
    pixels = load(run.task.test.x)[..., 0]
    files = [f"{number}.png" for number in range(len(pixels))]
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image).save(file)
    answers = json.loads(raylt("predict", "adapted.safetensors", *files, "--format", "json").out)
    labels = torch.tensor([run.task.class_names.index(answer["class"]) for answer in answers])
    counts = confusion(labels, torch.as_tensor(run.task.test.y), run.task.classes, None)
    assert torch.equal(counts, run.matrices().shared)


def test_all_clients_stand_in_one_file(raylt, personal, images):
    assert raylt("export", personal).code == 0
    file = personal / "exported.safetensors"
    assert raylt("predict", file, images[0], "--client", "bregenz").code == 0
    refused(raylt("predict", file, images[0]), "--client", "wien, graz")
    refused(raylt("predict", personal, images[0]), "--client, one of wien")
    refused(raylt("export", personal, "--client", "rom"), "(rom)", "wien")
    refused(raylt("export", personal, "--out", "model.bin"), "--out", "model.bin", ".safetensors")
    assert load_model(file, "linz").class_names[0] == "up left"
    file.unlink()


def test_commands_on_an_unfinished_run_say_so(raylt, tmp_path, images):
    run = make_tiny_run(tmp_path, "fedavg").folder
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0])
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints/000002")
    line = f"{run}: the run is not finished; its model is from round 1 of 2\n"
    assert raylt("export", run).err == raylt("predict", run, images[0]).err == line
    assert raylt("export", run, "--round", 1).err == ""


def test_files_that_are_no_images_are_all_named(raylt, personal, images):
    Path("text.png").write_text("no image")
    refused(
        raylt("predict", personal, "text.png", images[0], "gone.png", "--client", "wien"),
        "2 images cannot be decoded: text.png (not an image, or of an unsupported format); gone.png (No such file "
        "or directory). Replace or remove them.\n",
    )
    shutil.copy(images[0], "other.txt")
    refused(raylt("predict", "other.txt", images[0]), "other.txt", ".safetensors")


def test_a_folder_instead_of_its_images_is_refused(raylt, personal, images):
    Path("photos").mkdir()
    refused(raylt("predict", personal, images[0], "photos", "--client", 0), "(photos)", "Name the image files in it.")


def test_an_image_of_another_size_and_in_colours_is_fitted(raylt, personal):
    Image.new("RGB", (60, 20), (200, 200, 200)).save("wide.png")
    answer = json.loads(raylt("predict", personal, "wide.png", "--client", "wien", "--format", "json").out)
    assert sum(answer[0]["shares"].values()) == pytest.approx(1)


# prediction of new images


@pytest.fixture
def new(personal) -> Path:
    """Save the test images of each client as <client>/<class>/<image>; return the folder."""
    task = Run.open(personal).task
    for name, rows in zip(task.client_names, task.own_tests, strict=True):
        for row in rows:
            folder = Path("new", name, task.class_names[load(task.test.y)[row]])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(load(task.test.x)[row, ..., 0]).save(folder / f"{row}.png")
    return Path("new")


def test_new_images_are_judged_by_each_clients_own_model(raylt, personal, new):
    code, out, err = raylt("evaluate", personal, "--data", f"folder:{new}", "--format", "json")
    assert (code, err) == (0, "")
    found, kept = json.loads(out), Run.open(personal).matrices()
    assert {name: figures["accuracy"] for name, figures in found["clients"].items()} == dict(
        zip(("wien", "graz", "linz", "bregenz"), Run.open(personal).reports[-1]["by_client"]["local"], strict=True)
    )
    assert found["confusion"] == sum(kept.own.values()).tolist()
    assert found["images"] == 42
    table = raylt("evaluate", personal, "--data", f"folder:{new}").out
    assert "bregenz  2" in table
    raylt("export", personal, "--out", "all.safetensors")
    assert json.loads(raylt("evaluate", "all.safetensors", "--data", f"folder:{new}", "--format", "json").out) == found


def test_images_are_judged_in_parts_and_may_lie_in_a_folder_test(raylt, personal, new, monkeypatch):
    whole = raylt("evaluate", personal, "--data", f"folder:{new}", "--format", "json").out
    monkeypatch.setattr("raylt.runs.export.evaluate.CHUNK_SIZE", 5)
    Path("data/train").mkdir(parents=True)
    shutil.copytree(new, "data/test")
    assert raylt("evaluate", personal, "--data", "folder:data", "--format", "json").out == whole


def test_all_damaged_images_are_named_in_one_go(raylt, personal, new):
    damaged = [new / "linz/up left/none.png", new / "linz/up left/empty.png", new / "wien/low right/cut off.png"]
    for file in damaged:
        file.write_bytes(b"")
    damaged[2].write_bytes(next(new.rglob("[0-9]*.png")).read_bytes()[:50])
    for more in ([], ["--client", "linz"]):
        refused(
            raylt("evaluate", personal, "--data", f"folder:{new}", *more),
            "3 images cannot be decoded: ",
            *map(str, damaged),
            ". Replace or remove them. --bad skip leaves them out.\n",
        )


@pytest.mark.slow
def test_damaged_images_are_left_out_where_that_is_asked_for(raylt, personal, new):
    evaluate = ("evaluate", personal, "--data", f"folder:{new}", "--bad", "skip", "--format", "json")
    whole = json.loads(raylt(*evaluate).out)
    first = next((new / "linz/up left").glob("*.png"))
    right = json.loads(raylt("predict", personal, first, "--client", "linz", "--format", "json").out)[0]["class"]
    damaged = [first.with_name("0.png"), first.with_name("none.png"), *new.glob("wien/*/*.png")]
    first.rename(damaged[0])  # sorts before the others, so that a shift of labels would show
    for file in damaged:
        file.write_bytes(b"")
    code, out, err = raylt(*evaluate)
    found = json.loads(out)
    assert code == 0
    notice = " ".join(err.split())
    assert notice.startswith(f"left out: {len(damaged)} images cannot be decoded: ")
    assert len(found["left_out"]) == len(damaged)
    assert found["clients"]["wien"] == {"images": 0, "accuracy": None, "macro": None}
    assert found["clients"]["graz"] == whole["clients"]["graz"]
    assert found["clients"]["linz"]["images"] == whole["clients"]["linz"]["images"] - 1
    before, after = (
        figures["clients"]["linz"]["accuracy"] * figures["clients"]["linz"]["images"] for figures in (whole, found)
    )
    assert before - after == pytest.approx(int(right == "up left"))
    assert "wien 0 - -" in " ".join(raylt(*evaluate[:-2]).out.split())
    for file in new.rglob("*.png"):
        file.write_bytes(b"")
    refused(raylt(*evaluate), "images cannot be decoded: ", ". Replace or remove them.\n")


def test_other_files_in_the_folder_are_reported(raylt, personal, new):
    (new / "wien/low right/photo.heic").write_bytes(b"\0" * 20)
    code, out, err = raylt("evaluate", personal, "--data", f"folder:{new}", "--format", "json")
    assert (code, " ".join(err.split())) == (0, "1 file is not an image and was left out: 1 .heic")
    assert len(json.loads(out)["notes"]) == 1


def test_names_are_the_same_in_whatever_form_a_system_wrote_them(tmp_path):
    class Everything:
        class_names, shape, fit, depth = ("Schuhgröße",), (8, 8, 1), "crop", None

        def predict(self, images):
            return Prediction(torch.zeros(len(images), dtype=torch.int64), torch.ones(len(images), 1), self.class_names)

    file = tmp_path / unicodedata.normalize("NFD", "Köln/Schuhgröße/0.png")
    file.parent.mkdir(parents=True)
    Image.new("L", (8, 8)).save(file)
    asked = []
    found = evaluate(lambda name: asked.append(name) or Everything(), f"folder:{tmp_path}", by_client=True)
    assert asked == list(found.clients) == ["Köln"]
    assert found.matrix.tolist() == [[1]]


def test_new_images_of_one_client(raylt, personal, new):
    out = raylt("evaluate", personal, "--data", f"folder:{new}/linz", "--client", "linz", "--format", "json").out
    kept = Run.open(personal).matrices()
    assert json.loads(out)["confusion"] == kept.own[2].tolist()
    refused(raylt("evaluate", personal, "--data", f"folder:{new}/linz"), "linz", "--client")
    refused(raylt("evaluate", personal, "--data", "cifar10"), "--data", "cifar10", "folder:PATH")
    refused(raylt("evaluate", personal, "--data", "folder:gone"), "gone: ")
    first = min((new / "linz/up left").iterdir()).name
    refused(
        raylt("evaluate", personal, "--data", f"folder:{new}/linz/up left", "--client", "linz"),
        f"up left: images lie at another depth, such as {first}.",
    )
    shutil.copy(new / "linz/up left" / first, new / "linz/stray.png")
    refused(
        raylt("evaluate", personal, "--data", f"folder:{new}"),
        "new: images lie at different depths, such as linz/stray.png and ",
    )
    (new / "linz/stray.png").unlink()
    (new / "rom").mkdir()
    shutil.copytree(new / "linz/up left", new / "rom/up left")
    refused(raylt("evaluate", personal, "--data", f"folder:{new}"), "(rom)", "wien")
    (new / "rom/up left").rename(new / "rom/upwards")
    refused(
        raylt("evaluate", personal, "--data", f"folder:{new}", "--client", "linz"),
        "upwards",
        "up left",
    )


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """A run in which one of four clients joins after training, and its name."""
    folder = tmp_path_factory.mktemp("joined")
    run = make_tiny_run(folder, "fedper", "data.partition=by_id", "data.new_clients=1", "federation.rounds=1")
    [late] = run.outline.new_clients
    return run, run.outline.client_names[late]


def test_a_client_that_joins_after_training_is_named_and_offered_nowhere(raylt, joined, tmp_path):
    run, late = joined
    trained = [name for name in run.outline.client_names if name != late]
    Image.fromarray(load(run.task.test.x)[0, ..., 0]).save(tmp_path / "x.png")
    ended = raylt("predict", run.folder, tmp_path / "x.png", "--client", late)
    refused(ended, f"joins after training, so its model is not kept ({late})", ", ".join(trained))
    ended = raylt("predict", run.folder, tmp_path / "x.png")
    refused(ended, f"one of {', '.join(trained)}.")
    with pytest.raises(ConfigError, match=rf"not kept \({late}\)"):
        run.client_model(run.outline.new_clients[0])


def test_the_folder_of_a_client_that_joins_after_training_is_left_out(raylt, joined, tmp_path):
    run, late = joined
    pixels = load(run.task.test.x)[..., 0]
    for client in run.outline.client_names:
        place = tmp_path / "new" / client / "up left"
        place.mkdir(parents=True)
        Image.fromarray(pixels[0]).save(place / "0.png")
    code, out, err = raylt("evaluate", run.folder, "--data", f"folder:{tmp_path}/new", "--format", "json")
    assert code == 0, err
    assert f"left out: 1 image of client {late}, which joins after training" in " ".join(err.split())
    assert json.loads(out)["clients"].keys() == set(run.outline.client_names) - {late}
    assert json.loads(out)["images"] == 3
    for client in set(run.outline.client_names) - {late}:
        shutil.rmtree(tmp_path / "new" / client)
    refused(raylt("evaluate", run.folder, "--data", f"folder:{tmp_path}/new"), f"({late})", "--client")


def test_an_export_has_every_option(raylt, monkeypatch):
    given = []

    def export(folder, to, **options):
        given.append((folder, to, options))
        raise ConfigError("export: ends here. Repeat it.", code="config.conflict")

    monkeypatch.setattr("raylt.runs.export.export.export", export)
    assert raylt("export", "one", "--client", "a", "--format", "pt2", "--round", 3, "--out", "m.pt2").code == 2
    assert raylt("export", "one", "--round", "best").code == 2
    assert given == [
        (Path("one"), Path("m.pt2"), {"client": "a", "format": "pt2", "round": 3}),
        (Path("one"), None, {"client": None, "format": "safetensors", "round": "best"}),
    ]
