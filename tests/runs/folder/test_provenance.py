"""The lines of provenance.jsonl are bound to each other, to their run and to its summary."""

import importlib.metadata
import json
import shutil

import pytest
from refusals import refused
from small_runs import make_run

from raylt import Run
from raylt.runs.folder import provenance
from raylt.runs.folder.reader import Files
from raylt.runs.verify import verify
from raylt.studies.records.record import read_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"), "one", "method=fedprox", "federation.rounds=1")


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made.folder, tmp_path / "run")


def changed(line, **fields):
    return {**line, **fields}


EDITS = {
    "device": lambda lines: [changed(lines[0], device="cuda")],
    "code": lambda lines: [changed(lines[0], code="0" * 64)],
    "date": lambda lines: [changed(lines[0], date="2000-01-01T00:00:00+00:00")],
    "removed": lambda lines: [],
    "twice": lambda lines: [*lines, *lines],
    "no hash": lambda lines: [{key: value for key, value in lines[0].items() if key not in provenance.LINKS}],
    "more": lambda lines: [*lines, {"code": "0" * 64}],
}


@pytest.mark.parametrize("name", EDITS)
def test_a_changed_line_of_provenance_is_refused(folder, name):
    assert read_run(folder).state == "done"
    file = folder / provenance.FILE
    lines = EDITS[name]([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with refused("run.changed", path=str(file)):
        Files(folder).summary()
    assert read_run(folder).state == "damaged"
    assert not all(finding.whole for finding in verify(folder))


@pytest.mark.parametrize("name", ["removed", "cut off"])
def test_an_unfinished_run_does_not_lose_the_line_of_its_start(folder, name):
    (folder / "summary.json").unlink()
    file = folder / provenance.FILE
    file.write_text("" if name == "removed" else file.read_text()[:-9])
    with refused("run.changed", path=str(file)):
        Run.open(folder).resume(fleet="local", quiet=True)
    assert provenance.FILE in [finding.what for finding in verify(folder) if not finding.whole]


def test_a_continued_run_chains_its_lines(made):
    (line,) = provenance.read(made.folder)
    assert line["previous"] == Run.open(made.folder).sha256
    assert made.summary["provenance"] == line["sha256"]


def test_a_run_in_one_process_needs_no_ray(tmp_path, monkeypatch):
    version = importlib.metadata.version

    def without_ray(name):
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_ray)
    run = make_run(tmp_path, "one", "method=fedavg")
    assert provenance.read(run.folder)[0]["ray"] is None
