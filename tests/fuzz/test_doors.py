"""Malformed files of other kinds: exported models, teachers, weights, records, plugins, studies, lists of files.

As in test_fuzz.py, a malformed input is refused in one line with exit code 2, or gives the result of an undisturbed
one.
"""

import io
import itertools
import json
import os
import shutil
import socket
import zipfile
from pathlib import Path
from typing import Any

import making
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import strategies as st
from made import write_run
from outcomes import outcome
from test_fuzz import cases, shown

from raylt.cli.studies.page import page
from raylt.data.sources.sources import _read_list
from raylt.disk import check_name
from raylt.errors import RayltError
from raylt.models import pretrained
from raylt.models.teacher import FeatureFile
from raylt.own_code.plugin_file import run_plugin
from raylt.runs.export.artefact import FORMAT, KEY
from raylt.runs.export.load import load_images, load_model
from raylt.runs.signature import check_signature
from raylt.studies.definition import define, read_definition
from raylt.studies.study import Study

__all__ = ["shown"]  # the fixture that prints the table of outcomes
PLACES = ("pipe", "socket", "folder", "loop", "device", "missing", "long")


def put(file: Path, content: bytes | str) -> Path:
    """Put a content, or something that is not a plain file, at a path; return the path."""
    if os.path.lexists(file):
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "pipe":
        os.mkfifo(file)
    elif content == "socket":
        before = os.getcwd()
        os.chdir(file.parent)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
        os.chdir(before)
    elif content == "folder":
        file.mkdir()
    elif content == "loop":
        file.symlink_to(file.name)
    elif content == "device":
        file.symlink_to("/dev/zero")
    elif content == "long":
        return file.with_name("x" * 5000 + file.suffix)
    return file


def bomb(content: bytes, size: int = 2**31) -> bytes:
    """Return a zip file with its first entry replaced by many times as many zeros."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        first, *rest = old.namelist()
        with new.open(first, "w", force_zip64=True) as entry:
            entry.write(old.read(first)[:128])
            for _ in range(min(size, 2**25) // 2**20):
                entry.write(bytes(2**20))
        for name in rest:
            new.writestr(name, old.read(name))
    return out.getvalue()


# exported models

CLASSES = ("a", "b", "c")
IMAGES = torch.arange(2 * 64, dtype=torch.uint8).view(2, 8, 8, 1)


def description() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "task": "classification",
        "class_names": list(CLASSES),
        "input": {"height": 8, "width": 8, "channels": 1, "mean": [0.5], "std": [0.2], "fit": "crop", "depth": None},
        "model": "small",
        "method": {"name": "fedavg"},
        "batch": 32,
        "source": "digits",
        "rounds": 3,
        "run": "0" * 64,
        "split_sha256": "1" * 64,
        "figures": {"accuracy": 0.5, "miou": None},
        "versions": {"raylt": "0.1.0"},
        "guests": [],
        "clients": None,
    }


def exported(tree: Any, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    from raylt.models import build_model

    entries = build_model("small", 3, (8, 8, 1)).state_dict()
    return safetensors.torch.save(entries | (tensors or {}), {KEY: json.dumps(tree)})


def _sound_prediction(prediction: Any) -> bool:
    names = prediction.class_names
    sums = prediction.probabilities.sum(1)
    return (
        bool(prediction.probabilities.isfinite().all())
        and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
        and prediction.probabilities.shape[1] == len(names) == len(set(names))
        and all(name and name.isprintable() for name in names)
    )


def images_for(model: Any) -> torch.Tensor:
    height, width, channels = model.shape
    return torch.zeros(1, min(height, 64), min(width, 64), channels, dtype=torch.uint8)


BOUNDS = [
    ("height", 2**63),
    ("height", 2**40),
    ("height", 0),
    ("width", 2**16),
    ("channels", 2**31),
    ("channels", 3),
    ("mean", []),
    ("mean", [0.5] * 10**6),
    ("mean", [float("nan")]),
    ("std", [0.0]),
    ("std", [float("inf")]),
]
FIELDS = [
    ("clients", []),
    ("class_names", []),
    ("class_names", ["a", "a", "b"]),
    ("class_names", ["a", "b", "\x1b]0;x\x07"]),
    ("class_names", ["a", "b\n", "c"]),
    ("class_names", ["a", "b"]),
    ("batch", 2**62),
    ("figures", {"accuracy": float("nan")}),
    ("model", "\x1b[2J"),
    ("versions", {"raylt": "\x1b[31m"}),
    ("source", "a\nb"),
    ("rounds", -1),
]


def bounded(field: tuple[str, Any]) -> dict[str, Any]:
    tree = description()
    name, value = field
    if name in tree["input"]:
        tree["input"][name] = value
    else:
        tree[name] = value
    return tree


@pytest.mark.slow
@cases("exported models")
def test_exported_models(fixture, folder):
    clean = description()
    nan = {"classifier.weight": torch.full((3, 1), torch.nan)}
    trees = st.one_of(making.json_changed(clean), st.sampled_from([*map(bounded, BOUNDS), *map(bounded, FIELDS)])).map(
        exported
    )
    contents = st.one_of(
        trees,
        trees,
        making.bytes_changed(exported(clean)),
        st.sampled_from([exported(clean), exported(clean, nan), b"", b"\xff" * 8 + b"{}", *PLACES]),
    )

    def act(content):
        file = put(folder / "m.safetensors", content)

        def predict():
            model = load_model(file)
            return model.predict(images_for(model))

        return predict, _sound_prediction

    return contents, act, exported(clean)


@cases("graphs")
def test_graphs(fixture, folder):
    import torch._dynamo  # noqa: F401 - loading it takes longer than a case may

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("m/archive_format", b"pt2")
        archive.writestr("m/data/weights/x", bytes(100))
    content = out.getvalue()
    contents = st.one_of(making.bytes_changed(content), st.sampled_from([content, bomb(content), b"", *PLACES]))

    def act(content):
        file = put(folder / "m.pt2", content)
        return lambda: load_model(file), lambda model: False

    return contents, act


# weights


def state(values: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    torch.save(values, out)
    return out.getvalue()


class Code:
    """An object whose pickle runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/raylt-weights-ran",)


@pytest.mark.slow
@cases("weights")
def test_weights(fixture, folder):
    clean = {"a.weight": torch.ones(2, 3), "a.bias": torch.zeros(2)}
    contents = st.one_of(
        making.bytes_changed(state(clean)),
        making.bytes_changed(safetensors.torch.save(clean)),
        st.sampled_from(
            [
                state(clean),
                state({"a": torch.tensor([torch.nan])}),
                state({1: torch.ones(1)}),
                state([1]),
                state({"a": Code()}),
                bomb(state(clean)),
                b"",
                *PLACES,
            ]
        ),
    )

    def act(case):
        content, ending = case
        file = put(folder / f"w{ending}", content)

        def right(values):
            return (
                all(
                    isinstance(name, str) and (not isinstance(value, torch.Tensor) or bool(value.isfinite().all()))
                    for name, value in values.items()
                )
                and not Path("/tmp/raylt-weights-ran").exists()
            )

        return lambda: pretrained.read(file, "small"), right

    return st.tuples(contents, st.sampled_from([".pt", ".safetensors", ".bin"])), act, (state(clean), ".pt")


# teachers

FEATURES = {
    "image": np.linspace(0, 1, 40 * 4, dtype=np.float32).reshape(40, 4),
    "y": np.arange(40) % 2,
    "text": np.ones((2, 4), np.float32),
    "class_names": np.array(["a", "b"]),
}


def features(**changed: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **{key: value for key, value in (FEATURES | changed).items() if value is not None})
    return out.getvalue()


class _Labels:
    """A task with the labels that a teacher is checked against."""

    name, class_names, classes = "made", ("a", "b"), 2

    def __init__(self):
        from raylt.data.splits.split import hash_labels

        self.split = type("Split", (), {"labels_sha256": hash_labels(FEATURES["y"])})()


@pytest.mark.slow
@cases("teachers")
def test_teachers(fixture, folder):
    keys = st.sampled_from([*FEATURES, "about", "text_label"])
    arrays = st.one_of(
        making.arrays_of_any_kind,
        st.sampled_from(
            [
                None,
                np.full((40, 4), np.nan, np.float32),
                np.full((40, 4), np.inf, np.float16),
                np.array("\x1b[2J"),
                np.ones((2, 5), np.float32),
                np.ones((39, 4), np.float32),
            ]
        ),
    )
    contents = st.one_of(
        st.tuples(keys, arrays).map(lambda pair: features(**{pair[0]: pair[1]})),
        making.bytes_changed(features()),
        st.sampled_from([features(), features(image=np.zeros((2**21, 64), np.float32)), b"", *PLACES]),
    )

    def act(content):
        teacher = FeatureFile(put(folder / "t.npz", content))

        def check():
            task: Any = _Labels()
            teacher.check(task, {"phrase"}, 4)
            return teacher.about, teacher.text(("a", "b"), "phrase", torch.device("cpu")), teacher.dim

        def right(seen):
            about, text, dim = seen
            return about.isprintable() and text.shape == (2, 4) and bool(text.isfinite().all()) and dim == 4

        return check, right

    return contents, act, features()


# records


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> bytes:
    tree = {
        "name": "tiny",
        "base": {"data": {"clients": 3}, "federation": {"rounds": 2}, "local": {"epochs": 1}},
        "arms": {"fedavg": "fedavg", "prox": {"method": "fedprox"}},
        "claims": ["prox > fedavg"],
        "seeds": 2,
    }
    study = Study.create(define(tree), tmp_path_factory.mktemp("studies"))
    for number, plan in enumerate(study.planned):
        write_run(study.folder / plan.folder, plan, [0.4, 0.5 + number / 20], split=plan.seed)
    study.run(mix_versions=True)
    return (study.folder / "results.json").read_bytes()


@pytest.mark.slow
@cases("records")
def test_records(fixture, folder):
    content = fixture("results")
    sealed = json.loads(content)
    unsealed = {key: value for key, value in sealed.items() if key != "seal"} | {"schema": 1}
    contents = st.one_of(
        making.json_changed(sealed).map(lambda tree: json.dumps(tree).encode()),
        making.json_changed(unsealed).map(lambda tree: json.dumps(tree).encode()),
        making.bytes_changed(content),
        st.sampled_from([content, b"", b"[" * 10_000, *PLACES]),
    )
    put(folder / "clean.json", content)
    clean = Study.open(folder / "clean.json").compare(mix_versions=True)

    def act(content):
        file = put(folder / "results.json", content)

        def read():
            study = Study.open(file)
            from raylt.studies.report.html import render

            render(study, mix_versions=True)
            return study.compare(mix_versions=True)

        return read, lambda seen: seen == clean or len(seen.unsealed) > 0

    return contents, act, content


@cases("studies")
def test_studies(fixture, folder):
    text = b"name: tiny\narms: {fedavg: fedavg, prox: {method: fedprox}}\nclaims: [prox > fedavg]\nseeds: 2\n"
    lines = st.tuples(
        st.sampled_from(
            ["name", "arms", "claims", "seeds", "cells", "only", "tune", "measure", "recipe", "base", "at"]
        ),
        making.values,
    ).map(lambda pair: text + f"{pair[0]}: {pair[1]}\n".encode(errors="ignore"))
    alone = st.tuples(
        st.sampled_from(["name", "claims", "seeds", "cells", "only", "tune", "measure", "recipe", "base", "at"]),
        making.values,
    ).map(lambda pair: b"arms: {fedavg: fedavg}\n" + f"{pair[0]}: {pair[1]}\n".encode(errors="ignore"))
    contents = st.one_of(making.bytes_changed(text), lines, alone, st.sampled_from([text, b"", b"[]", *PLACES]))

    def act(content):
        file = put(folder / "study.yaml", content)
        return lambda: read_definition(file), lambda read: read.name.isprintable() and len(read.arms) >= 1

    return contents, act, text


@pytest.mark.slow
def test_every_place_of_a_record_takes_any_value(results, tmp_path):
    """Replace each value of an unsealed record by each odd value."""
    tree = {key: value for key, value in json.loads(results).items() if key != "seal"} | {"schema": 1}
    file, faults = tmp_path / "results.json", []

    def read():
        from raylt.studies.report.html import render

        study = Study.open(file)
        render(study, mix_versions=True)
        return study.compare(mix_versions=True)

    for path in making.places(tree):
        for value in making.ODD:
            file.write_text(json.dumps(making.replaced(tree, path, value)))
            word, seen = outcome("record places", read, lambda seen: len(seen.unsealed) > 0)
            if word not in ("refused", "the same"):
                faults.append(f"{path}, {value!r:.40}: {word}, {seen}")
    assert not faults, "\n".join(faults[:20])


@pytest.mark.slow
def test_every_place_of_a_study_takes_any_value(tmp_path):
    tree = {
        "name": "tiny",
        "base": {"data.clients": 3, "federation": {"rounds": 2}},
        "arms": {"fedavg": "fedavg", "prox": {"method": "fedprox", "local.lr": 0.1}},
        "claims": [{"prox > fedavg": 1.5}, "prox > fedavg"],
        "seeds": [1, 2],
        "cells": {"data.alpha": [0.5, 1.0], "data.imbalance": [10, 20]},
        "measure": "few",
    }
    folders, faults = (tmp_path / str(number) for number in itertools.count()), []
    for path in making.places(tree):
        for value in making.ODD:
            changed = making.replaced(tree, path, value)
            word, seen = outcome(
                "study places",
                lambda changed=changed: Study.create(define(changed), next(folders)).planned,
                lambda planned: all(plan.folder.isprintable() for plan in planned),
            )
            if word not in ("refused", "the same"):
                faults.append(f"{path}, {value!r:.40}: {word}, {seen}")
    assert not faults, "\n".join(faults[:20])


# plugins

FAULTS = [
    b"import sys\nsys.exit()\n",
    b"import sys\nsys.exit(0)\n",
    b"raise SystemExit('bye')\n",
    b"exit()\n",
    b"raise GeneratorExit\n",
    b"class Stop(BaseException): pass\nraise Stop\n",
    b"1/0\n",
    b"x = (\n",
    b"\x00",
    b"# coding: klingon\n",
    b"\xff\xfe",
    b"(" * 5000 + b")" * 5000,
    b"def f(): f()\nf()\n",
    b"import raylt_no_such_module\n",
    b"raise ValueError('\\x1b[2J\\n' * 1000)\n",
]


@cases("plugins")
def test_plugins(fixture, folder):
    text = b"import raylt\n\nVALUE = 3\n"
    contents = st.one_of(making.bytes_changed(text), st.sampled_from([text, *FAULTS, *PLACES]))

    def act(content):
        file = put(folder / "own.py", content)
        return lambda: run_plugin(file), lambda module: module.__file__ == str(file.resolve())

    return contents, act, text


# pages and pictures


@cases("pages")
def test_pages(fixture, folder):
    """Change a page with comments of commands: no other file is written and no other command is run."""
    put(folder / "results.json", fixture("results"))
    text = f"# Page\n<!-- raylt compare {folder}/results.json --mix-versions -->\nold\n<!-- end of raylt compare -->\n"
    words = st.sampled_from(
        ["--help", "--format json", "; touch x", "$(touch x)", "'", "--measure few", "--measure \x1b[2J", "--no", "\0"]
    )
    contents = st.one_of(
        making.bytes_changed(text.encode()),
        words.map(lambda word: text.replace("--mix-versions", word).encode()),
        st.sampled_from([text.encode(), b"", b"\xff", *PLACES]),
    )

    def act(content):
        file = put(folder / "page.md", content)
        before = sorted(each.name for each in folder.iterdir())

        def fill():
            page([file])
            return file.read_text()

        def right(filled):
            return filled.count("<!-- raylt compare") >= 1 and before == sorted(each.name for each in folder.iterdir())

        return fill, right

    return contents, act, text.encode()


@cases("pictures")
def test_pictures(fixture, folder):
    """Change an image that a model classifies."""
    model = load_model(put(folder / "m.safetensors", exported(description())))
    png = making.picture(size=(8, 8))
    contents = st.one_of(
        making.bytes_changed(png),
        making.bytes_changed(making.picture("JPEG", (8, 8))),
        making.bytes_changed(making.picture("GIF", (8, 8))),
        making.bytes_changed(making.picture("TIFF", (8, 8))),
        st.sampled_from(
            [making.claims(2**31 - 1, 2**31 - 1), making.claims(60_000, 60_000), b"", b"<svg/>", b"%!PS-Adobe", *PLACES]
        ),
    )

    def act(content):
        file = put(folder / "image.png", content)
        return lambda: model.predict(load_images([file], model.shape, model.fit, model.depth)), _sound_prediction

    return contents, act, png


# names, lists and signatures


@cases("names")
def test_names(fixture, folder):
    odd = st.sampled_from(["a\nb", "\x1b[2J", "\udcff", "", ".", "..", "a/b", "\0", "x" * 300, "é" * 200])

    def act(name):
        return lambda: check_name(name, "name") or name, lambda kept: (folder / kept).mkdir(exist_ok=True) is None

    return st.one_of(st.text(max_size=8), odd), act


@cases("lists")
def test_lists_of_files(fixture, folder):
    text = b"train/a/1.JPEG 0\ntrain/b/2.JPEG 1\n"
    contents = st.one_of(making.bytes_changed(text), st.sampled_from([text, b"", b"\xff", *PLACES]))

    def act(content):
        file = put(folder / "list.txt", content)
        return lambda: _read_list(file), lambda read: len(read[0]) == len(read[1]) >= 1

    return contents, act


@cases("signatures")
def test_signatures(fixture, folder):
    file = put(folder / "results.json", b"{}")
    contents = st.sampled_from([b"", b"-----BEGIN SSH SIGNATURE-----\n", b"x" * 2**17, *PLACES[:-1]])

    def act(content):
        put(folder / "results.json.sig", content)
        return lambda: check_signature(file), lambda _: False

    return contents, act


@pytest.mark.slow
def test_a_small_file_that_unpacks_to_gigabytes_takes_no_memory(tmp_path):
    """A teacher of 2 MB holds 2 GiB of zeros as features, and is refused before an array is made."""
    import resource

    file = tmp_path / "t.npz"
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("image.npy", "w", force_zip64=True) as entry,
    ):
        np.lib.format.write_array_header_1_0(entry, {"descr": "<f4", "fortran_order": False, "shape": (2**21, 256)})
        for _ in range(2**31 // 2**24):
            entry.write(bytes(2**24))
    assert file.stat().st_size < 4 * 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RayltError) as caught:
        _ = FeatureFile(file).dim
    assert caught.value.code == "model.teacher-mismatch"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10


def test_weights_that_unpack_to_more_than_their_file_are_refused(tmp_path):
    file = tmp_path / "w.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(2**24))
    assert file.stat().st_size < 2**20
    with pytest.raises(RayltError) as caught:
        pretrained.read(file, "resnet8")
    assert "declares an uncompressed size larger than the file" in str(caught.value)
