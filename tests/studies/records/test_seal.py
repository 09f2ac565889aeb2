"""Files of results: a changed number, name, setting or claim is refused by its name."""

import hashlib
import json
import shutil
import subprocess

import pytest
from made import write_run
from refusals import refused

from raylt.cli.main import app
from raylt.errors import CheckpointError
from raylt.methods import METHODS
from raylt.runs.signature import check_signature, sign, signature_of
from raylt.studies.definition import define
from raylt.studies.records.record import RunRecord
from raylt.studies.records.recorded_runs import read_results, seal_results, update
from raylt.studies.records.seal import contradiction, is_intact
from raylt.studies.study import Study, study
from raylt.studies.verify import verify_results, verify_study
from raylt.typed_json import hash_json

TINY = {
    "name": "tiny",
    "base": {"data": {"clients": 3}, "federation": {"rounds": 2}, "local": {"epochs": 1}},
    "arms": {"fedavg": "fedavg", "prox": {"method": "fedprox"}},
    "claims": ["prox > fedavg"],
    "seeds": 2,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Write a study of made runs and its results.json; return its folder."""
    study = Study.create(define(TINY), tmp_path_factory.mktemp("studies"))
    for number, plan in enumerate(study.planned):
        write_run(study.folder / plan.folder, plan, [0.4, 0.5 + number / 20], split=plan.seed)
    study.run(mix_versions=True)
    return study.folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "tiny")


def test_files_of_tensorboard_in_all_runs_are_one_finding(folder):
    for run in folder.glob("*/seed-*"):
        for number in (1, 2):
            (run / f"events.out.tfevents.{number}").write_text("")
    named = [finding for finding in verify_study(folder) if "tfevents" in f"{finding.what} {finding.detail}"]
    assert [(finding.what, finding.detail) for finding in named] == [
        ("seed-*/events.out.tfevents.*", "unsealed: no hash binds it")
    ]


@pytest.fixture
def results(folder):
    return folder / "results.json"


def test_runs_that_are_not_planned_any_more_are_checked_too(folder):
    study = Study.create(define(TINY | {"seeds": 1}), folder.parent)
    assert all(finding.whole for finding in verify_study(study.folder))
    (folder / "prox" / "seed-1" / "summary.json").write_text("{}")
    assert [finding.what for finding in verify_study(folder) if not finding.whole] == ["prox/seed-1/summary.json"]


def first(tree):
    return tree["records"][0]


def swap_arms(tree):
    """Exchange the names of the two arms in the records."""
    for record in tree["records"]:
        record["arm"] = {"fedavg": "prox", "prox": "fedavg"}[record["arm"]]


EDITS = {
    "accuracy": ("summary", lambda tree: first(tree)["summary"]["accuracy"].update(last=0.9)),
    "group": ("summary", lambda tree: first(tree)["summary"]["groups"].update(few=0.9)),
    "bytes": ("summary", lambda tree: first(tree)["summary"]["bytes"].update(up=1)),
    "split": ("summary", lambda tree: first(tree)["summary"].update(split_sha256="0" * 64)),
    "hash": ("summary", lambda tree: first(tree)["summary"].update(sha256="0" * 64)),
    "no hash": ("summary", lambda tree: first(tree)["summary"].pop("sha256")),
    "no summary": ("summary", lambda tree: first(tree).update(summary=None)),
    "curve": ("curve", lambda tree: first(tree)["curve"]["accuracy"].__setitem__(0, 0.9)),
    "clients' curve": ("curve", lambda tree: first(tree)["curve"]["matched"].__setitem__(-1, 0.9)),
    "seconds": ("curve", lambda tree: first(tree)["curve"]["seconds"].__setitem__(0, 0.1)),
    "arms": ("place", swap_arms),
    "arm": ("place", lambda tree: first(tree).update(arm="prox")),
    "cell": ("place", lambda tree: first(tree).update(cell="IF 10")),
    "seed": ("seed", lambda tree: first(tree).update(seed=7)),
    "state": ("place", lambda tree: first(tree).update(state="stopped")),
    "setting": ("config", lambda tree: first(tree)["config"]["local"].update(lr=0.5)),
    "rounds": ("config", lambda tree: first(tree)["config"]["federation"].update(rounds=9)),
    "code": ("made", lambda tree: first(tree)["made"].update(codes=["0" * 64])),
    "device": ("made", lambda tree: first(tree)["made"].update(torch="3")),
    "claim": ("definition", lambda tree: tree["definition"]["claims"].append("fedavg > prox")),
    "reference": ("definition", lambda tree: tree["definition"].update(reference="prox")),
    "holdings": ("holdings", lambda tree: tree["holdings"].update(x={"names": [], "groups": [], "counts": []})),
    "tuned": ("tuned", lambda tree: tree.update(tuned={"": {}})),
    "left out": ("records", lambda tree: tree["records"].pop()),
    "twice": ("records", lambda tree: tree["records"].append(first(tree))),
    "order": ("place", lambda tree: tree["records"].reverse()),
    "no seal": ("seal", lambda tree: tree.pop("seal")),
    "one seal": ("seal", lambda tree: tree["seal"]["records"].__setitem__(0, None)),
    "seal and number": ("summary", lambda tree: (first(tree)["summary"]["accuracy"].update(last=0.9), reseal(tree))),
    "infinite": ("curve", lambda tree: first(tree)["curve"]["seconds"].__setitem__(0, float("inf"))),
    "escape": ("arm", lambda tree: first(tree).update(arm="\x1b[2J")),
}


def reseal(tree):
    parts = {key: value for key, value in tree["seal"].items() if key != "sha256"}
    tree["seal"]["sha256"] = hash_json(parts)


def edit(file, change):
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_results_is_refused_by_name(results, name):
    part, change = EDITS[name]
    assert len(Study.open(results).records) == 4
    edit(results, change)
    with pytest.raises(CheckpointError, match=part) as caught:
        Study.open(results)
    assert caught.value.code in ("record.changed", "file.malformed")
    assert "\n" not in str(caught.value)
    assert not verify_results(results)[0].whole


@pytest.mark.parametrize("command", ["compare", "report", "verdicts", "page"])
def test_every_command_refuses_edited_results(results, tmp_path, command):
    edit(results, EDITS["accuracy"][1])
    arguments = [command, str(results)]
    if command == "page":
        page = tmp_path / "page.md"
        page.write_text(f"<!-- raylt compare {results} -->\n<!-- end of raylt compare -->\n")
        arguments = [command, str(page)]
    with refused("record.changed"):
        app(arguments, standalone_mode=False)


def test_a_study_does_not_take_up_an_edited_record(results):
    edit(results, EDITS["curve"][1])
    with refused("record.changed"):
        Study.preview(define(TINY), results.parent.parent / "again", results)


def test_a_number_with_every_hash_of_its_own_contradicts_the_rest(results):
    def change(tree):
        summary = first(tree)["summary"]
        summary["accuracy"]["last"] = summary["accuracy"]["best"] = 0.9
        summary["sha256"] = hash_json({key: value for key, value in summary.items() if key != "sha256"})
        tree["seal"]["records"][0]["summary"] = summary["sha256"]
        reseal(tree)

    edit(results, change)
    with refused("record.changed", part="fedavg/seed-0: curve"):
        read_results(results)


def last(name, value):
    """Return a change of the last value of a curve."""
    return lambda tree: tree["curve"][name].__setitem__(-1, value)


CONTRADICTIONS = {
    "stopped": ("state", lambda tree: tree.update(state="stopped")),
    "more steps": ("state", lambda tree: tree.update(steps=4)),
    "ended early": (
        "state",
        lambda tree: (tree.update(planned_steps=3), tree["config"]["federation"].update(rounds=3)),
    ),
    "method": ("config", lambda tree: tree["config"]["method"].update(name="fedprox")),
    "rounds": ("config", lambda tree: tree["config"]["federation"].update(rounds=3)),
    "seed": ("seed", lambda tree: tree["config"].update(seed=7)),
    "few": ("curve", last("few", 0.9)),
    "bytes": ("curve", last("up", 1)),
    "seconds": ("curve", last("seconds", 9.0)),
    "clients": ("curve", last("matched", 0.9)),
    "step": ("curve", lambda tree: tree["curve"]["step"].__setitem__(0, 2)),
    "hole": ("curve", lambda tree: tree["curve"]["down"].__setitem__(0, None)),
    "shorter": ("curve", lambda tree: tree["curve"]["many"].pop(0)),
    "missing": ("curve", lambda tree: tree["curve"].pop("many")),
    "best": ("curve", lambda tree: tree["summary"]["accuracy"].update(best=0.9)),
    "last10": ("curve", lambda tree: tree["summary"]["accuracy"].update(last10=0.9)),
    "by client": ("by_client", lambda tree: tree.update(by_client={"matched": [0.1, None, 0.2]})),
    "other clients": ("by_client", lambda tree: tree.update(by_client={"local": [0.5]})),
    "code": ("made", lambda tree: tree["summary"]["made"].update(code="0" * 64)),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_record_that_no_seal_protects_must_agree_with_the_summary_of_its_run(results, name):
    part, change = CONTRADICTIONS[name]
    tree = json.loads(json.dumps(read_results(results)[1][0].to_json()))
    assert contradiction(RunRecord.from_json(tree)) is None
    change(tree)
    assert contradiction(RunRecord.from_json(tree)) == part


def unsealed(file):
    edit(file, lambda tree: (tree.pop("seal"), tree.update(schema=1)))


def test_records_without_a_seal_are_named_in_every_table(results, capsys):
    unsealed(results)
    comparison = Study.open(results).compare()
    assert comparison.unsealed == ["fedavg: 2 runs", "prox: 2 runs"]
    app(["compare", str(results), "--format", "markdown"], standalone_mode=False)
    assert "Unsealed: no hash" in capsys.readouterr().out
    assert [finding.detail.partition(":")[0] for finding in verify_results(results)[1:]] == ["unsealed"] * 4


def test_a_file_is_sealed_as_far_as_its_summaries_have_their_hashes(results):
    edit(results, lambda tree: (unsealed_number(tree), tree.pop("seal"), tree.update(schema=1)))
    (line,) = seal_results(results)
    assert line.startswith("fedavg/seed-0: stays unsealed")
    assert Study.open(results).compare().unsealed == ["fedavg: 1 run"]
    assert seal_results(results) == [line]


def unsealed_number(tree):
    first(tree)["summary"]["figures"] = {"loss": 0.1}


def test_an_unsealed_record_stays_unsealed_among_new_runs(results, made):
    edit(results, lambda tree: (unsealed_number(tree), tree.pop("seal"), tree.update(schema=1)))
    study = Study.open(made)
    done = [record for record in study.records if record.arm == "prox"]
    update(results, study.definition, done, {}, {})
    assert Study.open(results).compare().unsealed == ["fedavg: 2 runs"]


def test_a_name_in_place_of_a_path_keeps_a_record_sealed(results):
    _, records, _, _ = read_results(results)
    assert all(record.summary is not None and is_intact(record.summary) for record in records)


@pytest.mark.parametrize(
    ("old", "new"),
    [("prox > fedavg", "fedavg > prox"), ("seeds: 2", "seeds: 1"), ("method: fedprox", "method: fedavg")],
)
def test_an_edit_of_the_definition_in_a_folder_is_refused(folder, old, new):
    file = folder / "study.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with refused("record.changed", path=str(file)):
        Study.open(folder)
    assert not verify_study(folder)[0].whole


def test_run_folders_that_change_places_are_refused(folder):
    (folder / "fedavg").rename(folder / "aside")
    (folder / "prox").rename(folder / "fedavg")
    (folder / "aside").rename(folder / "prox")
    with refused("study.changed"):
        Study.open(folder)
    assert [finding.what for finding in verify_study(folder) if not finding.whole] == ["settings"]


def test_a_changed_run_in_a_folder_is_refused_and_named(folder):
    assert all(finding.whole for finding in verify_study(folder))
    summary = folder / "prox/seed-1/summary.json"
    summary.write_text(summary.read_text().replace('"rounds": 2', '"rounds": 3', 1))
    with refused("study.damaged-run", path=str(folder / "prox/seed-1")):
        Study.open(folder)
    assert [finding.what for finding in verify_study(folder) if not finding.whole] == ["prox/seed-1/summary.json"]


def test_runs_of_a_study_are_checked_without_the_plugin_of_its_method(folder, monkeypatch):
    monkeypatch.delitem(METHODS, "fedprox")
    findings = verify_study(folder)
    assert all(finding.whole for finding in findings)
    assert [finding.what for finding in findings if not finding.checked] == ["settings"]
    summary = folder / "prox/seed-1/summary.json"
    summary.write_text(summary.read_text().replace('"rounds": 2', '"rounds": 3', 1))
    assert [finding.what for finding in verify_study(folder) if not finding.whole] == ["prox/seed-1/summary.json"]


@pytest.fixture
def key(tmp_path):
    file = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
    return file


def test_a_signature_holds_for_the_file_as_it_is_and_for_allowed_signers(results, key, tmp_path):
    sign(results, key)
    assert "SHA256:" in check_signature(results)
    signers = tmp_path / "signers"
    signers.write_text(f"ann@lab {key.with_suffix('.pub').read_text()}")
    assert check_signature(results, signers).startswith("signed by ann@lab")
    signers.write_text("")
    with refused("signature.wrong"):
        check_signature(results, signers)
    results.write_bytes(results.read_bytes() + b"\n")
    with refused("signature.wrong"):
        check_signature(results)


def test_the_command_signs_what_is_whole_and_requires_a_signature(results, key, tmp_path):
    signers = tmp_path / "signers"
    signers.write_text(f"ann@lab {key.with_suffix('.pub').read_text()}")
    before = hashlib.sha256(results.read_bytes()).hexdigest()
    assert app(["verify", str(results), "--signers", str(signers)], standalone_mode=False) == 2
    assert not app(["verify", str(results), "--sign", str(key), "--signers", str(signers)], standalone_mode=False)
    assert hashlib.sha256(results.read_bytes()).hexdigest() == before
    edit(results, EDITS["accuracy"][1])
    signature_of(results).unlink()
    with refused("signature.not-made"):
        app(["verify", str(results), "--sign", str(key)], standalone_mode=False)


def test_what_could_not_be_checked_is_not_signed(folder, key, monkeypatch):
    monkeypatch.delitem(METHODS, "fedprox")
    with refused("signature.not-made"):
        app(["verify", str(folder), "--sign", str(key)], standalone_mode=False)
    assert not signature_of(folder / "results.json").exists()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Run a tiny study with a search for each arm; return its folder."""
    definition = {**TINY, "seeds": 1, "tune": {"runs": 1, "ranges": {"local.lr": "loguniform(0.01,0.3)"}}}
    definition["base"] = {**TINY["base"], "data": {"clients": 3, "validation": 0.2}}
    return study(definition, tmp_path_factory.mktemp("tuned"), parallel=1).folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "fedavg/seed-0/config.yaml",
        "fedavg/seed-0/outline.json",
        "fedavg/seed-0/checkpoints/000002/server.safetensors",
        "fedavg/seed-0/confusions/000001.npz",
        "prox/seed-0/model.safetensors",
        "prox/search/trials.csv",
        "prox/search/trials.jsonl",
        "prox/search/trials/fedprox-000/model.safetensors",
    ],
)
def test_verify_checks_every_file_of_a_study(tuned, tmp_path, capsys, name):
    folder = shutil.copytree(tuned, tmp_path / "tiny")
    assert not app(["verify", str(folder)], standalone_mode=False)
    file = folder / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert app(["verify", str(folder), "--format", "json"], standalone_mode=False) == 2
    damaged = [each["what"] for each in json.loads(capsys.readouterr().out) if not each["whole"]]
    run = "/".join(name.split("/")[:2])
    assert damaged
    assert all(what.startswith(run) or what == "settings" for what in damaged)


@pytest.mark.parametrize("name", ["config.yaml", "model.safetensors"])
def test_verify_misses_a_file_that_was_removed_or_made_a_link(folder, name):
    file = folder / "prox/seed-1" / name
    if name == "config.yaml":
        file.unlink()
    else:
        file.symlink_to(file.name)
    assert [finding.what for finding in verify_study(folder) if not finding.whole] == [f"prox/seed-1/{name}"]


@pytest.mark.parametrize("key", ["missing", "text"])
def test_a_key_that_ssh_cannot_use_is_one_line(results, tmp_path, key):
    file = tmp_path / key
    if key == "text":
        file.write_text("no key")
        file.chmod(0o600)
    with refused("signature.not-made", key="--sign"):
        sign(results, file)
