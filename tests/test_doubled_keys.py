"""JSON files in which an object has a key twice: of equal keys Python keeps the last, and other readers the first."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
from made import write_run
from refusals import refused
from small_runs import make_tiny_run

import raylt
from raylt.core.checkpoint import checkpoint
from raylt.errors import CheckpointError
from raylt.models.clip_checks import checked_description
from raylt.runs.export.load import load_model
from raylt.runs.verify import verify
from raylt.studies.definition import define
from raylt.studies.records.recorded_runs import read_results
from raylt.studies.study import Study
from raylt.typed_json import parse_json


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("runs"), "fedavg")


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made.folder, tmp_path / "run")


def doubled(text: str) -> str:
    """Return a JSON object with a second, earlier value of its first key, which Python's reader drops."""
    key = next(iter(json.loads(text)))
    text = re.sub(r"^\s*\{", f'{{{json.dumps(key)}: "other", ', text, count=1)
    assert json.loads(text)[key] != "other"
    return text


def double_in(file: Path) -> None:
    """Double a key in a file, in the last line of a file of lines."""
    *lines, last = [line for line in file.read_text().splitlines(keepends=True) if file.suffix == ".jsonl"] or [""]
    file.write_text("".join(lines) + doubled(last or file.read_text()))


def test_the_key_is_named_wherever_it_stands():
    with refused("file.malformed", CheckpointError, key="b") as caught:
        parse_json('{"a": [{"b": 1, "c": 2, "b": 1}]}', "x.json")
    assert "'b'" in str(caught.value)
    assert str(caught.value).isprintable()
    long = json.dumps("\x1b[2J" * 99)
    with refused("file.malformed") as caught:
        parse_json(f"{{{long}: 1, {long}: 1}}", "x.json")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 800
    assert parse_json('{"a": {"b": 1}, "b": {"a": 1}}', "x.json") == {"a": {"b": 1}, "b": {"a": 1}}


@pytest.mark.parametrize("name", ["identity.json", "split.json", "outline.json", "metrics.jsonl", "summary.json"])
def test_a_file_of_a_run_with_a_key_twice_is_refused_by_its_name(folder, name):
    if name == "metrics.jsonl":  # of a finished run, the summary has the hash of the last line's bytes
        (folder / "summary.json").unlink()
    assert all(finding.whole for finding in verify(folder, data=False))
    double_in(folder / name)
    assert name in [finding.what for finding in verify(folder, data=False) if not finding.whole]


def test_a_checkpoint_with_a_key_twice_is_damaged(folder):
    [*_, step] = checkpoint.steps(folder / "checkpoints")
    double_in(folder / f"checkpoints/{step:06d}/manifest.json")
    [damaged] = [finding for finding in verify(folder, data=False) if not finding.whole]
    assert damaged.what == f"checkpoints/{step:06d}"


def test_an_exported_model_with_a_key_twice_is_refused(made, tmp_path):
    file = raylt.export(made, tmp_path / "m.safetensors")
    load_model(file)
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["raylt"] = doubled(header["__metadata__"]["raylt"])
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    with refused("file.malformed", CheckpointError, key="format"):
        load_model(file)


def test_results_of_a_study_with_a_key_twice_are_refused(tmp_path):
    study = Study.create(define({"name": "tiny", "arms": {"fedavg": "fedavg"}, "seeds": 1}), tmp_path)
    for plan in study.planned:
        write_run(study.folder / plan.folder, plan, [0.4, 0.5])
    study.run(mix_versions=True)
    file = study.folder / "results.json"
    text = file.read_text()
    at = text.index('"last":')
    file.write_text(text[:at] + '"last": 0.9, ' + text[at:])
    with refused("file.malformed", CheckpointError, key="last"):
        read_results(file)


def test_the_description_of_an_image_text_model_with_a_key_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        checked_description(b'{"model_cfg": {"embed_dim": 8, "embed_dim": 16, "vision_cfg": {}, "text_cfg": {}}}')
