"""The lines of provenance.jsonl are bound to each other, to their run and to its summary."""

import importlib.metadata
import json
import re
import shutil

import pytest
from made import report
from refusals import refused
from small_runs import make_run
from test_layers import edges

import raylt
from raylt import Callback, Run
from raylt.config import load
from raylt.core.checkpoint import checkpoint
from raylt.runs.folder import provenance
from raylt.runs.folder.metrics_log import hash_line
from raylt.runs.folder.reader import Files
from raylt.runs.folder.writer import Journal
from raylt.runs.verify import verify
from raylt.studies.records.record import read_run
from raylt.typed_json import hash_json

# Modules and packages that decisive ones import, and that decide no result: errors, files, processes, the user's code.
INDECISIVE = {"disk", "errors", "machine", "notebook", "own_code", "store", "typed_json"}


def test_the_hash_of_the_code_covers_what_decisive_modules_import():
    inner = [[name.split(".")[1] for name in (module, reached) if name.count(".")] for module, reached, _ in edges()]
    decisive = set(provenance._DECISIVE)
    reached = {names[1] for names in inner if len(names) == 2 and names[0] in decisive}
    assert reached - decisive == INDECISIVE


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


class StopAfter(Callback):
    """Ends the process that does a run, after one of its steps."""

    def __init__(self, step):
        self.step = step

    def on_step(self, report):
        if report.step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Do a run that three processes worked on: they took steps 1 and 2, step 3, and steps 4 and 5 of 6."""
    out = tmp_path_factory.mktemp("runs")
    settings = ["method=fedavg", "federation.rounds=6", "local.epochs=1", "data.clients=3", "output.keep=6"]
    with pytest.raises(KeyboardInterrupt):
        raylt.run(load(None, settings), out=out, name="r", fleet="local", quiet=True, callbacks=[StopAfter(2)])
    for step in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            Run.open(out / "r").resume(fleet="local", quiet=True, callbacks=[StopAfter(step)])
    assert [line["after_step"] for line in provenance.read(out / "r")] == [0, 2, 3]
    return out / "r"


@pytest.fixture
def stopped(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "r")


SEVERAL_EDITS = {
    "last dropped": lambda lines: lines[:-1],
    "last two dropped": lambda lines: lines[:-2],
    "middle dropped": lambda lines: [lines[0], lines[2]],
    "first dropped": lambda lines: lines[1:],
    "swapped": lambda lines: [lines[0], lines[2], lines[1]],
    "last edited": lambda lines: [*lines[:-1], lines[-1].replace('"local"', '"processes"')],
    "last without its hash": lambda lines: [*lines[:-1], re.sub(', "previous.*', "}", lines[-1])],
    "last cut off": lambda lines: [*lines[:-1], lines[-1][:-20]],
    "last twice": lambda lines: [*lines, lines[-1]],
    "key twice": lambda lines: [*lines[:-1], lines[-1].replace("{", '{"code": "0", ', 1)],
    "one more": lambda lines: [*lines, '{"code": "0"}'],
    "one more that is no JSON": lambda lines: [lines[0], "cut of", *lines[1:]],
    "an empty one": lambda lines: [lines[0], "", *lines[1:]],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SEVERAL_EDITS)
def test_each_line_of_an_unfinished_run_is_bound(stopped, name):
    assert all(finding.whole for finding in verify(stopped))
    file = stopped / provenance.FILE
    changed = SEVERAL_EDITS[name](file.read_text().splitlines())
    file.write_text("".join(line + "\n" for line in changed))
    assert provenance.FILE in [finding.what for finding in verify(stopped) if not finding.whole]
    with refused("run.changed", path=str(file)):
        Run.open(stopped).resume(fleet="local", quiet=True)


def test_a_checkpoint_binds_the_line_of_its_process(stopped):
    for step in (4, 5):  # as if killed between the checkpoint of step 3 and its line
        shutil.rmtree(stopped / f"checkpoints/{step:06d}")
    metrics, file = stopped / "metrics.jsonl", stopped / provenance.FILE
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    shutil.copytree(stopped, stopped.with_name("whole"))
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    damaged = {finding.what: finding.detail for finding in verify(stopped) if not finding.whole}
    assert str(file) in damaged["checkpoints/000003"]
    with refused("run.changed", path=str(file)):
        Run.open(stopped).resume(fleet="local", quiet=True)
    resumed = Run.open(stopped.with_name("whole")).resume(fleet="local", quiet=True)
    assert all(finding.whole for finding in verify(resumed.folder))


def test_a_summary_names_what_changed_between_its_processes(stopped, monkeypatch):
    before = provenance.read(stopped)[0]
    changes = {"code": "f" * 64, "torch": "9.9", "driver": "1", "cpu": "another"}
    describe = provenance.describe_process
    monkeypatch.setattr(provenance, "describe_process", lambda *process: describe(*process) | changes)
    summary = Run.open(stopped).resume(fleet="local", quiet=True).summary
    assert summary["made"]["mixed"] == {name: sorted([str(before[name]), new]) for name, new in changes.items()}
    assert summary["made"]["sessions"] == 4


def test_a_server_that_was_started_again_names_its_own_line(stopped):
    with Journal(stopped) as journal:
        for _ in range(2):  # the first server dies after its step, of which no checkpoint is left
            journal.rewind()
            provenance.note(stopped, "local", 5, Run.open(stopped).config, {"device": "cpu"})
            journal.append(report(6, 0.5))
    named = json.loads((stopped / "metrics.jsonl").read_text().splitlines()[-1])["provenance"]
    assert named == provenance.read(stopped)[-1]["sha256"]


def test_what_a_kill_cut_off_is_removed_by_the_next_process(stopped):
    file = stopped / provenance.FILE
    before = file.read_text()
    file.write_text(before + '{"date": "20')
    Run.open(stopped).resume(fleet="local", quiet=True)
    assert file.read_text().startswith(before + '{"date": "')
    assert len(file.read_text().splitlines()) == len(provenance.read(stopped)) == 4
    assert all(finding.whole for finding in verify(stopped))


@pytest.fixture
def early(stopped):
    """Return a copy of the run as early versions wrote it, which named no line of provenance."""
    metrics = stopped / "metrics.jsonl"
    previous = Run.open(stopped).sha256
    heads, texts = [previous], []
    for line in map(json.loads, metrics.read_text().splitlines()):
        line = {**line, "previous": previous}
        plain = {key: value for key, value in line.items() if key not in ("provenance", "sha256")}
        texts.append(json.dumps({**plain, "sha256": hash_json(plain)}))
        previous = hash_line(texts[-1])
        heads.append(previous)
    metrics.write_text("".join(text + "\n" for text in texts))
    for step in checkpoint.steps(stopped / "checkpoints"):
        manifest = stopped / f"checkpoints/{step:06d}/manifest.json"
        tree = json.loads(manifest.read_text())
        del tree["facts"]["seal"]["provenance"]
        tree["facts"]["seal"]["line"] = heads[step - 1]
        tree["sha256"] = hash_json({key: value for key, value in tree.items() if key != "sha256"})
        manifest.write_text(json.dumps(tree))
    return stopped


def test_a_folder_of_an_early_version_opens_and_continues(early):
    file = early / provenance.FILE
    one, *rest = file.read_text().splitlines(keepends=True)
    # a line that a kill had cut off stayed
    file.write_text("".join([one, '{"date": "20\n', *rest]))
    assert all(finding.whole for finding in verify(early))
    assert len(provenance.read(early)) == 3
    Run.open(early).resume(fleet="local", quiet=True)
    assert len(file.read_text().splitlines()) == 4
    assert all(finding.whole for finding in verify(early))


def test_a_folder_of_an_early_version_does_not_lose_its_start(early):
    file = early / provenance.FILE
    file.write_text("")
    assert provenance.FILE in [finding.what for finding in verify(early) if not finding.whole]


def test_a_run_in_one_process_needs_no_ray(tmp_path, monkeypatch):
    version = importlib.metadata.version

    def without_ray(name):
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_ray)
    run = make_run(tmp_path, "one", "method=fedavg")
    assert provenance.read(run.folder)[0]["ray"] is None
