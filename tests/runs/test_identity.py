"""Files of a run folder that were changed, or are another run's: whoever reads them says which and how."""

import json
import shutil

import pytest
import yaml
from small_runs import make_run

from raylt import Run
from raylt.errors import CheckpointError, RayltError
from raylt.runs import identity
from raylt.runs.replay import replay
from raylt.store import Folder
from raylt.studies.single import of_runs

SETTINGS = "method=fedprox", "federation.rounds=3", "output.keep=3"
EDITS = [
    ("local.lr", 0.2), ("local.epochs", 2), ("local.batch", 16), ("local.momentum", 0.5), ("local.weight_decay", 0.1),
    ("local.lr_decay", 0.1), ("local.precision", "bfloat16"), ("data.imbalance", 10.0), ("data.alpha", 0.1),
    ("data.partition", "iid"), ("data.seed", 3), ("data.clients", 4), ("data.normalise", False), ("data.root", "there"),
    ("data.validation", 0.2), ("data.groups", [1, 2]), ("data.source", "shapes"), ("federation.rounds", 2),
    ("federation.rounds", 4), ("federation.participation", 0.5), ("federation.over_select", 0.5),
    ("federation.quorum", 0.5), ("federation.batchnorm", "local"), ("evaluation.every", 2), ("evaluation.batch", 100),
    ("method.mu", 0.5), ("method.name", "fedavg"), ("model", "cnn"), ("seed", 1), ("augment", "crop_flip")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs that differ in their seeds."""
    out = tmp_path_factory.mktemp("runs")
    return make_run(out, "one", *SETTINGS), make_run(out, "two", *SETTINGS, "seed=1", "data.seed=1")


@pytest.fixture
def run(made, tmp_path):
    """A copy of the first."""
    return Run.open(shutil.copytree(made[0].folder, tmp_path / "run"))


@pytest.fixture
def stopped(run):
    """The same as if it had been killed before its end."""
    (run.folder / "summary.json").unlink()
    return run


def edit(file, change):
    """Changes the content of a JSON file."""
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def lines_of(run):
    return (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)


def write_lines(run, *lines):
    (run.folder / "metrics.jsonl").write_text("".join(lines))


def content(folder):
    """Every file, but what a process leaves that only looks."""
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"}


def refused(run, message):
    """By all that go on with a run, or read what it came to; and nothing is changed."""
    before = content(run.folder)
    with pytest.raises(RayltError, match=message) as caught:
        Run.open(run.folder).resume(fleet="local", quiet=True)
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)
    assert content(run.folder) == before


@pytest.mark.parametrize(("key", "value"), EDITS, ids=lambda value: str(value))
def test_a_setting_that_was_changed_is_named_with_what_it_was(stopped, key, value):
    file = stopped.folder / "config.yaml"
    tree = here = yaml.safe_load(file.read_text())
    *sections, last = key.split(".")
    for section in sections:
        here = here[section]
    old, here[last] = here[last], value
    file.write_text(yaml.safe_dump(tree))
    refused(stopped, rf"config\.yaml: .*{key} is {value!r}, the run was made with {old!r}".replace("[", r"\["))


def test_resources_and_output_may_be_changed(stopped):
    file = stopped.folder / "config.yaml"
    text = file.read_text().replace("keep: 3", "keep: 2").replace("cpus_per_client: 1.0", "cpus_per_client: 2")
    file.write_text(text)
    assert stopped.resume(fleet="local", quiet=True).state == "done"


@pytest.mark.parametrize(("name", "message"), [
    ("split.json", r"split\.json: is another split"), ("config.yaml", r"config\.yaml: .*seed is 1, .* made with 0"),
    ("identity.json", r"config\.yaml: .*seed is 0, .*"),
    ("metrics.jsonl", r"metrics\.jsonl, line 1: is of another run"),
    ("checkpoints", r"000003: is a checkpoint of another run")])
def test_a_file_of_another_run_is_refused(stopped, made, name, message):
    theirs, ours = made[1].folder / name, stopped.folder / name
    if theirs.is_dir():
        shutil.rmtree(ours)
        shutil.copytree(theirs, ours)
    else:
        shutil.copyfile(theirs, ours)
    refused(stopped, message)


def test_a_summary_of_another_run_is_refused(run, made):
    shutil.copyfile(made[1].folder / "summary.json", run.folder / "summary.json")
    refused(run, r"summary\.json: is of another run")


def test_the_newest_checkpoint_of_another_run_is_refused(stopped, made):
    shutil.rmtree(stopped.folder / "checkpoints/000003")
    shutil.copytree(made[1].folder / "checkpoints/000003", stopped.folder / "checkpoints/000003")
    refused(stopped, r"000003: is a checkpoint of another run")
    for read in (stopped.model, stopped.experiment, stopped.checkpoint):
        with pytest.raises(CheckpointError, match="of another run"):
            read()


def test_debug_refuses_the_checkpoint_of_another_run(stopped, made):
    shutil.rmtree(stopped.folder / "checkpoints/000001")
    shutil.copytree(made[1].folder / "checkpoints/000001", stopped.folder / "checkpoints/000001")
    with pytest.raises(CheckpointError, match=r"000001: is a checkpoint of another run"):
        replay(stopped, 2, 0, None)


def test_a_checkpoint_under_another_number_is_damaged(stopped):
    checkpoints = stopped.folder / "checkpoints"
    shutil.rmtree(checkpoints / "000003")
    (checkpoints / "000002").rename(checkpoints / "000003")
    with pytest.raises(CheckpointError, match=r"damaged \(it is that of step 2\)"):
        stopped.checkpoint_after(3)


# metrics.jsonl

@pytest.mark.parametrize(("change", "message"), [
    (lambda one, two, three: (one, three, two), "line 2: is of step 3"),
    (lambda one, two, three: (one, two, two, three), "line 3: is of step 2"),
    (lambda one, two, three: (two, three), "line 1: is of step 2"),
    (lambda one, two, three: (one.replace('"step": 1', '"step": "1"'), two, three), r"line 1: step: input should be a"),
    (lambda one, two, three: (one, two.replace('"phase"', '"phrase"'), three), r"line 2: phase: field required"),
    (lambda one, two, three: (one, two.replace('"macro": 0', '"macro": 7'), three), r"line 2: macro: .* less than or"),
    (lambda one, two, three: (one, two.replace('"seconds": ', '"seconds": 1'), three), "line 3: line 2 was changed"),
    (lambda one, two, three: (one, two, three.replace('"macro": 0.', '"macro": 0.9')), "3 was changed: macro is not"),
    (lambda one, two, three: (one, two[:50] + "\n", three), "line 2: is not JSON"),
    (lambda one, two, three: (one, "[]\n", three), "line 2: input should be a valid dictionary"),
    (lambda one, two, three: (one, "\n", two, three), "line 2: is not JSON"),
    (lambda one, two, three: (one,), "has 1 lines, and the checkpoint after step 3 follows 2"),
    (lambda one, two, three: (), "has 0 lines, and the checkpoint after step 3 follows 2"),
    (lambda one, two, three: (one, two.replace('"seconds": ', '"seconds": 1')),
     "line 2 was changed after the checkpoint after step 3 was written"),
])
def test_lines_that_were_changed_are_named(stopped, change, message):
    write_lines(stopped, *change(*lines_of(stopped)))
    refused(stopped, message)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_one_bad_byte_is_named_with_its_line(stopped, number):
    lines = lines_of(stopped)
    raw = [line.encode() for line in lines]
    raw[number - 1] = raw[number - 1][:100] + b"\xff" + raw[number - 1][101:]
    (stopped.folder / "metrics.jsonl").write_bytes(b"".join(raw))
    refused(stopped, rf"metrics\.jsonl, line {number}: ")
    with pytest.raises(CheckpointError, match=f"line {number}: "):
        _ = stopped.metrics


def test_a_line_that_a_kill_cut_off_is_taken_from_its_checkpoint(stopped):
    one, two, three = lines_of(stopped)
    write_lines(stopped, one, two, three[:70])
    assert stopped.resume(fleet="local", quiet=True).state == "done"
    assert [report["date"] is None for report in stopped.reports] == [False, False, True]


# summary.json and what it seals

@pytest.mark.parametrize("change", [
    lambda tree: tree["accuracy"].update(last=0.99), lambda tree: tree.update(model_sha256="0" * 64),
    lambda tree: tree.update(rounds=30), lambda tree: tree["figures"].update(more=1)])
def test_a_summary_that_was_changed_is_refused(run, change):
    edit(run.folder / "summary.json", change)
    refused(run, r"summary\.json: was changed after the run ended")
    for read in (run.finished, lambda: of_runs([run.folder])):
        with pytest.raises(CheckpointError, match=r"summary\.json: was changed"):
            read()


@pytest.mark.parametrize(("change", "message"), [
    (lambda tree: tree.update(more=1), "more: extra inputs"), (lambda tree: tree.pop("run"), "run: field required"),
    (lambda tree: tree.update(rounds="3"), "rounds: input should be a valid integer"),
    (lambda tree: tree.update(schema=1), "has schema 1, this raylt reads 2")])
def test_a_summary_of_another_kind_is_refused(run, change, message):
    edit(run.folder / "summary.json", change)
    refused(run, message)


def test_lines_after_the_end_are_refused(run):
    with (run.folder / "metrics.jsonl").open("a") as stream:
        stream.write("x")
    refused(run, "metrics.jsonl does not end with the line that the run ended with")


def test_a_model_that_was_changed_is_not_handed_out(run, made):
    shutil.copyfile(made[1].folder / "model.safetensors", run.folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is another model than summary.json tells of"):
        run.model()
    (run.folder / "model.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        run.model()


# identity.json, the data, the version

@pytest.mark.parametrize(("change", "message"), [
    (lambda tree: tree["config"].update(seed=1), "identity.json: was changed after the run was made"),
    (lambda tree: tree.pop("split"), "identity.json: split: field required"),
    (lambda tree: tree.update(format="1"), "identity.json: format: input should be a valid integer")])
def test_an_identity_that_was_changed_is_refused(stopped, change, message):
    edit(stopped.folder / "identity.json", change)
    refused(stopped, message)


def test_a_folder_of_an_older_raylt_is_refused_in_a_word(run):
    (run.folder / "identity.json").unlink()
    refused(run, r"has no identity\.json: an older raylt made it, or it is not whole; run it again")


def test_other_data_under_the_same_name_are_refused(stopped, monkeypatch):
    known = dict(stopped._files.identity["data"])
    monkeypatch.setattr("raylt.runs.files.hash_data", lambda task: known | {"test labels": "0" * 64})
    refused(stopped, r"was made with other data \(test labels differ\); bring those to data\.root")


def test_another_version_does_not_go_on_with_a_run_and_reads_it(run, monkeypatch):
    monkeypatch.setattr(identity, "version", lambda: "9.9.9")
    assert run.finished().summary["rounds"] == 3
    (run.folder / "summary.json").unlink()
    refused(run, r"was made by raylt .*, this is 9\.9\.9; go on with that one")


def test_the_hash_is_that_of_everything_a_result_follows_from(made):
    known, split, config = made[0]._files.identity, made[0].split, made[0].config
    same = identity.identify(config, split, known["data"], [])
    assert same == known
    record = {"kind": "method", "name": "m", "origin": "m.py", "sha256": "0" * 64}
    others = [identity.identify(config.model_copy(update={"seed": 9}), split, known["data"], []),
              identity.identify(config, made[1].split, known["data"], []),
              identity.identify(config, split, known["data"] | {"test labels": "0"}, []),
              identity.identify(config, split, known["data"], [record])]
    assert len({each["sha256"] for each in [same, *others]}) == 5
    kept = config.model_copy(update={"output": config.output.model_copy(update={"keep": 9})})
    assert identity.identify(kept, split, known["data"], []) == same


# checkpoints that are gone

def test_a_run_without_its_checkpoints_is_refused_and_keeps_its_record(stopped):
    shutil.rmtree(stopped.folder / "checkpoints")
    refused(stopped, r"its checkpoints are gone; 3 steps were committed, and without one of them none can follow")
    assert len(stopped.reports) == 3


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
        with pytest.raises(CheckpointError, match=r"local\.schedule is .cosine., the run was made with .step."):
            identity.check_config(older, other, folder)
