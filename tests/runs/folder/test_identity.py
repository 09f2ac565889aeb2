"""Changed files and files of another run in a run folder: every reader names the file and the difference."""

import json
import shutil

import pytest
import yaml
from refusals import refused
from small_runs import make_run

import raylt
from raylt import Callback, Run
from raylt.errors import CheckpointError
from raylt.runs.debug import replay
from raylt.runs.folder import identity
from raylt.runs.verify import verify
from raylt.store import Folder
from raylt.studies.study import of_runs

SETTINGS = "method=fedprox", "federation.rounds=3", "output.keep=3"
EDITS = [
    ("local.lr", 0.2),
    ("local.epochs", 2),
    ("local.batch", 16),
    ("local.momentum", 0.5),
    ("local.weight_decay", 0.1),
    ("local.lr_decay", 0.1),
    ("local.precision", "bfloat16"),
    ("local.stacked", "auto"),
    ("data.imbalance", 10.0),
    ("data.alpha", 0.1),
    ("data.partition", "iid"),
    ("data.seed", 3),
    ("data.clients", 4),
    ("data.normalise", False),
    ("data.root", "there"),
    ("data.validation", 0.2),
    ("data.groups", [1, 2]),
    ("data.source", "shapes"),
    ("federation.rounds", 2),
    ("federation.rounds", 4),
    ("federation.participation", 0.5),
    ("federation.over_select", 0.5),
    ("federation.quorum", 0.5),
    ("federation.batchnorm", "local"),
    ("evaluation.every", 2),
    ("evaluation.batch", 100),
    ("method.mu", 0.5),
    ("method.name", "fedavg"),
    ("model", "cnn"),
    ("seed", 1),
    ("augment", "crop_flip"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Do two runs that differ in their seeds."""
    out = tmp_path_factory.mktemp("runs")
    return make_run(out, "one", *SETTINGS), make_run(out, "two", *SETTINGS, "seed=1", "data.seed=1")


@pytest.fixture
def run(made, tmp_path):
    """Return a copy of the first run."""
    return Run.open(shutil.copytree(made[0].folder, tmp_path / "run"))


@pytest.fixture
def stopped(run):
    """Return a copy of the first run as if it had been killed before its end."""
    (run.folder / "summary.json").unlink()
    return run


def stopped_after(folder, step, every):
    """Do a run that stops after a step, with a checkpoint every few rounds."""

    class Stop(Callback):
        def on_step(self, report):
            if report.step == step:
                raise KeyboardInterrupt

    settings = ["federation.rounds=6", "local.epochs=1", "data.clients=3", f"output.checkpoint_every={every}"]
    with pytest.raises(KeyboardInterrupt):
        raylt.run("fedprox", out=folder, name="s", fleet="local", quiet=True, callbacks=[Stop()], overrides=settings)
    return Run.open(folder / "s")


def edit(file, change):
    """Change the content of a JSON file."""
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def lines_of(run):
    return (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)


def write_lines(run, *lines):
    (run.folder / "metrics.jsonl").write_text("".join(lines))


def without_hash(line):
    """Return a line as early versions wrote it, without a hash of its own."""
    return json.dumps({key: value for key, value in json.loads(line).items() if key != "sha256"}) + "\n"


def content(folder):
    """Return the content of every file except the lock that readers leave."""
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"}


def assert_resume_refused(run, code, **details):
    """Assert that `resume` refuses the run in one line and changes no file; return the message."""
    before = content(run.folder)
    with refused(code, **details) as caught:
        Run.open(run.folder).resume(fleet="local", quiet=True)
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)
    assert content(run.folder) == before
    return str(caught.value)


@pytest.mark.parametrize(("key", "value"), EDITS, ids=lambda value: str(value))
def test_a_setting_that_was_changed_is_named_with_what_it_was(stopped, key, value):
    file = stopped.folder / "config.yaml"
    tree = yaml.safe_load(file.read_text())
    *sections, last = key.split(".")
    section = tree
    for name in sections:
        section = section[name]
    old = section[last]
    section[last] = value
    file.write_text(yaml.safe_dump(tree))
    message = assert_resume_refused(stopped, "run.changed", path=str(file))
    assert f"{key} is {value!r}, the run was made with {old!r}" in message


def test_resources_and_output_may_be_changed(stopped):
    file = stopped.folder / "config.yaml"
    text = file.read_text().replace("keep: 3", "keep: 2").replace("cpus_per_client: 1.0", "cpus_per_client: 2")
    file.write_text(text)
    assert stopped.resume(fleet="local", quiet=True).state == "done"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("split.json", "split.json"),
        ("config.yaml", "config.yaml"),
        ("identity.json", "config.yaml"),
        ("metrics.jsonl", "metrics.jsonl"),
        ("checkpoints", "checkpoints/000003"),
    ],
)
def test_a_file_of_another_run_is_refused(stopped, made, name, named):
    source, target = made[1].folder / name, stopped.folder / name
    if source.is_dir():
        shutil.rmtree(target)
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    assert_resume_refused(stopped, "run.changed", path=str(stopped.folder / named))


def test_a_summary_of_another_run_is_refused(run, made):
    shutil.copyfile(made[1].folder / "summary.json", run.folder / "summary.json")
    message = assert_resume_refused(run, "run.changed", path=str(run.folder / "summary.json"))
    assert "another run" in message


def test_the_newest_checkpoint_of_another_run_is_refused(stopped, made):
    shutil.rmtree(stopped.folder / "checkpoints/000003")
    shutil.copytree(made[1].folder / "checkpoints/000003", stopped.folder / "checkpoints/000003")
    path = str(stopped.folder / "checkpoints/000003")
    assert_resume_refused(stopped, "run.changed", path=path)
    for read in (stopped.model, stopped.experiment, stopped.checkpoint):
        with refused("run.changed", CheckpointError, path=path):
            read()


def test_debug_refuses_the_checkpoint_of_another_run(stopped, made):
    shutil.rmtree(stopped.folder / "checkpoints/000001")
    shutil.copytree(made[1].folder / "checkpoints/000001", stopped.folder / "checkpoints/000001")
    with refused("run.changed", CheckpointError, path=str(stopped.folder / "checkpoints/000001")):
        replay(stopped, 2, 0, None)


def test_a_checkpoint_under_another_number_is_damaged(stopped):
    checkpoints = stopped.folder / "checkpoints"
    shutil.rmtree(checkpoints / "000003")
    (checkpoints / "000002").rename(checkpoints / "000003")
    with refused("checkpoint.damaged", CheckpointError, step=3) as caught:
        stopped.checkpoint_after(3)
    assert "step 2" in str(caught.value)


# metrics.jsonl


@pytest.mark.parametrize(
    ("change", "details"),
    [
        (lambda one, two, three: (one, three, two), {"line": 2, "step": 3}),
        (lambda one, two, three: (one, two, two, three), {"line": 3, "step": 2}),
        (lambda one, two, three: (two, three), {"line": 1, "step": 2}),
        (lambda one, two, three: (one, two.replace('"seconds": ', '"seconds": 1'), three), {"line": 2}),
        (lambda one, two, three: (one, two, three.replace('"macro": 0.', '"macro": 0.9')), {"line": 3}),
        (lambda one, two, three: (one, two, three.replace('"date": "', '"date": "1')), {"line": 3}),
        (lambda one, two, three: (one, two, three.replace('"figures": {', '"figures": {"more": 1, ')), {"line": 3}),
        (lambda one, two, three: (one, two, without_hash(three)), {"line": 3}),
        (lambda one, two, three: (one,), {}),
        (lambda one, two, three: (), {}),
        (lambda one, two, three: (one, two.replace('"seconds": ', '"seconds": 1')), {"line": 2}),
    ],
)
def test_lines_that_were_changed_are_named(stopped, change, details):
    write_lines(stopped, *change(*lines_of(stopped)))
    message = assert_resume_refused(stopped, "run.changed", **details)
    assert "metrics.jsonl" in message


@pytest.mark.parametrize(
    ("change", "line", "key"),
    [
        (lambda one, two, three: (one.replace('"step": 1', '"step": "1"'), two, three), 1, "step"),
        (lambda one, two, three: (one, two.replace('"phase"', '"phrase"'), three), 2, "phase"),
        (lambda one, two, three: (one, two.replace('"macro": 0', '"macro": 7'), three), 2, "macro"),
        (lambda one, two, three: (one, two.replace('"stages"', '"timings"'), three), 2, "timings"),
        (lambda one, two, three: (one, two[:50] + "\n", three), 2, ""),
        (lambda one, two, three: (one, "[]\n", three), 2, ""),
        (lambda one, two, three: (one, "\n", two, three), 2, ""),
    ],
)
def test_lines_with_other_content_are_named_with_the_field(stopped, change, line, key):
    write_lines(stopped, *change(*lines_of(stopped)))
    message = assert_resume_refused(stopped, "file.malformed", key=key)
    assert f"metrics.jsonl, line {line}: " in message


def test_a_line_of_another_run_is_named(stopped, made):
    write_lines(stopped, lines_of(made[1])[0], *lines_of(stopped)[1:])
    assert_resume_refused(stopped, "run.changed", line=1)


def test_a_line_of_an_early_version_is_read_and_compared_with_the_checkpoint(tmp_path):
    run = stopped_after(tmp_path, 1, every=1)
    (line,) = lines_of(run)
    write_lines(run, without_hash(line))
    (finding,) = [finding for finding in verify(run.folder) if finding.what == "metrics.jsonl"]
    assert (finding.whole, "line 1 unsealed" in finding.detail) == (True, True)
    write_lines(run, without_hash(line.replace('"macro": 0.', '"macro": 0.9')))
    assert_resume_refused(run, "run.changed", line=1, key="macro")


def test_a_line_after_the_last_checkpoint_is_refused_if_it_was_changed(tmp_path):
    run = stopped_after(tmp_path, 3, every=2)
    assert all(finding.whole for finding in verify(run.folder))
    one, two, three = lines_of(run)
    write_lines(run, one, two, three.replace('"macro": 0.', '"macro": 0.9'))
    with refused("run.changed", CheckpointError, line=3):
        _ = run.reports
    assert not all(finding.whole for finding in verify(run.folder))


@pytest.mark.parametrize("lost", [1, 2], ids=["cut off", "left out"])
def test_a_finished_run_does_not_pass_off_an_earlier_step_as_its_last(run, lost):
    one, two, three = lines_of(run)
    write_lines(run, one, two, *[three[:-1]][: 2 - lost])
    for read in (run.matrices, lambda: run.reports, lambda: run.metrics, lambda: run.clients):
        with refused("run.changed", CheckpointError):
            read()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_one_bad_byte_is_named_with_its_line(stopped, number):
    lines = lines_of(stopped)
    raw = [line.encode() for line in lines]
    raw[number - 1] = raw[number - 1][:100] + b"\xff" + raw[number - 1][101:]
    (stopped.folder / "metrics.jsonl").write_bytes(b"".join(raw))
    assert f"metrics.jsonl, line {number}: " in assert_resume_refused(stopped, "file.malformed")
    with refused("file.malformed", CheckpointError):
        _ = stopped.metrics


def test_a_line_that_a_kill_cut_off_is_taken_from_its_checkpoint(stopped):
    one, two, three = lines_of(stopped)
    write_lines(stopped, one, two, three[:70])
    assert stopped.resume(fleet="local", quiet=True).state == "done"
    assert [report["date"] is None for report in stopped.reports] == [False, False, True]


# summary.json and the files that it seals


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["accuracy"].update(last=0.99),
        lambda tree: tree.update(model_sha256="0" * 64),
        lambda tree: tree.update(rounds=30),
        lambda tree: tree["figures"].update(more=1),
    ],
)
def test_a_summary_that_was_changed_is_refused(run, change):
    edit(run.folder / "summary.json", change)
    path = str(run.folder / "summary.json")
    assert_resume_refused(run, "run.changed", path=path)
    with refused("run.changed", CheckpointError, path=path):
        run.finished()
    with pytest.raises(CheckpointError):
        of_runs([run.folder])


@pytest.mark.parametrize(
    ("change", "code", "details"),
    [
        (lambda tree: tree.update(more=1), "file.malformed", {"key": "more"}),
        (lambda tree: tree.pop("run"), "file.malformed", {"key": "run"}),
        (lambda tree: tree.update(rounds="3"), "file.malformed", {"key": "rounds"}),
        (lambda tree: tree.update(schema=1), "run.changed", {}),
    ],
)
def test_a_summary_with_other_fields_is_refused(run, change, code, details):
    edit(run.folder / "summary.json", change)
    assert "summary.json" in assert_resume_refused(run, code, **details)


def test_lines_after_the_end_are_refused(run):
    with (run.folder / "metrics.jsonl").open("a") as stream:
        stream.write("x")
    assert "metrics.jsonl" in assert_resume_refused(run, "run.changed", path=str(run.folder / "summary.json"))


def test_a_model_that_was_changed_is_not_handed_out(run, made):
    shutil.copyfile(made[1].folder / "model.safetensors", run.folder / "model.safetensors")
    path = str(run.folder / "model.safetensors")
    with refused("run.changed", CheckpointError, path=path):
        run.model()
    (run.folder / "model.safetensors").write_bytes(b"12345678{}")
    with refused("file.unreadable", CheckpointError, path=path):
        run.model()


# identity.json, the data, the version


@pytest.mark.parametrize(
    ("change", "code", "details"),
    [
        (lambda tree: tree["config"].update(seed=1), "run.changed", {}),
        (lambda tree: tree.pop("split"), "file.malformed", {"key": "split"}),
        (lambda tree: tree.update(format="1"), "file.malformed", {"key": "format"}),
    ],
)
def test_an_identity_that_was_changed_is_refused(stopped, change, code, details):
    edit(stopped.folder / "identity.json", change)
    assert "identity.json" in assert_resume_refused(stopped, code, **details)


def test_a_plugin_that_the_run_was_not_made_with_is_refused(stopped):
    file = stopped.folder / identity.ORIGINS
    file.write_text(json.dumps([{"kind": "method", "name": "m", "origin": "m.py", "sha256": "0" * 64}]))
    assert_resume_refused(stopped, "run.changed", path=str(file))


def test_a_folder_without_an_identity_is_refused(run):
    (run.folder / "identity.json").unlink()
    assert_resume_refused(run, "run.not-found", path=str(run.folder))


def test_other_data_under_the_same_name_are_refused(stopped, monkeypatch):
    recorded = dict(stopped._files.identity["data"])
    monkeypatch.setattr("raylt.data.fingerprint.hash_data", lambda task: recorded | {"test labels": "0" * 64})
    assert "data.root" in assert_resume_refused(stopped, "run.changed", names=["test labels"])


def test_another_version_does_not_go_on_with_a_run_and_reads_it(run, monkeypatch):
    monkeypatch.setattr(identity, "version", lambda: "9.9.9")
    assert run.finished().summary["rounds"] == 3
    made_with = run._files.identity["raylt"]
    (run.folder / "summary.json").unlink()
    assert "9.9.9" in assert_resume_refused(run, "run.other-version", version=made_with)


def test_the_hash_is_that_of_everything_a_result_follows_from(made):
    recorded, split, config = made[0]._files.identity, made[0].split, made[0].config
    same = identity.identify(config, split, recorded["data"], [])
    assert same == recorded
    record = {"kind": "method", "name": "m", "origin": "m.py", "sha256": "0" * 64}
    different = [
        identity.identify(config.model_copy(update={"seed": 9}), split, recorded["data"], []),
        identity.identify(config, made[1].split, recorded["data"], []),
        identity.identify(config, split, recorded["data"] | {"test labels": "0"}, []),
        identity.identify(config, split, recorded["data"], [record]),
    ]
    assert len({each["sha256"] for each in [same, *different]}) == 5
    kept = config.model_copy(update={"output": config.output.model_copy(update={"keep": 9})})
    assert identity.identify(kept, split, recorded["data"], []) == same


# checkpoints that are missing


def test_a_run_without_its_checkpoints_is_refused_and_keeps_its_record(stopped):
    shutil.rmtree(stopped.folder / "checkpoints")
    assert_resume_refused(stopped, "checkpoint.not-found", steps=3)
    assert len(stopped.reports) == 3


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    run = make_run(tmp_path, "late", *SETTINGS, "output.checkpoint_every=3")
    whole, lines = run.summary["model_sha256"], lines_of(run)
    (run.folder / "summary.json").unlink()
    shutil.rmtree(run.folder / "checkpoints")
    write_lines(run, *lines[:2])
    assert run.resume(fleet="local", quiet=True).summary["model_sha256"] == whole


def test_a_finished_run_without_its_checkpoints_is_not_run_again(run):
    shutil.rmtree(run.folder / "checkpoints")
    before = content(run.folder)
    assert run.resume(fleet="local", quiet=True).state == "done"
    assert content(run.folder) == before


def test_settings_that_an_older_raylt_did_not_have_are_at_their_defaults(run):
    folder = Folder.open(run.folder)
    with folder:
        older = identity.read_identity(folder)
        del older["config"]["local"]["schedule"], older["config"]["augment"]
        identity.check_config(older, run.config, folder)
        other = run.config.model_copy(update={"local": run.config.local.model_copy(update={"schedule": "cosine"})})
        with refused("run.changed", CheckpointError, keys=["local.schedule"]) as caught:
            identity.check_config(older, other, folder)
    assert "local.schedule is 'cosine', the run was made with 'step'" in str(caught.value)
