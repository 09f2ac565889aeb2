"""`resume` refuses a search whose files were changed."""

import json
import shutil

import pytest
from test_search import small_search

from raylt import Run
from raylt.config import Config
from raylt.errors import RayltError
from raylt.registry import load_plugin
from raylt.store import Folder
from tune import resume
from tune.records import TrialRecord, append_trial
from tune.verify import verify_search


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a search with two trials of two rounds, both done."""
    return small_search(tmp_path_factory.mktemp("made"), "federation.rounds=2", samples=2, scheduler="none").folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "s")


def change_line(file, change):
    first, *rest = file.read_text().splitlines(keepends=True)
    tree = json.loads(first)
    change(tree)
    file.write_text(json.dumps(tree) + "\n" + "".join(rest))


def check_refused(folder, message):
    with pytest.raises(RayltError, match=message) as caught:
        resume(folder, fleet="local")
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)


def test_a_search_that_is_at_its_end_runs_nothing_again(folder):
    before = {file: file.stat().st_mtime_ns for file in folder.glob("trials/*/*")}
    assert len(resume(folder, fleet="local").trials) == 2
    assert {file: file.stat().st_mtime_ns for file in folder.glob("trials/*/*")} == before


def test_a_line_that_a_kill_cut_off_is_removed(folder):
    file = folder / "trials.jsonl"
    before = file.read_text()
    file.write_text(before + '{"trial": "fedprox-00')
    resume(folder, fleet="local")
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("search.json", lambda tree: tree.update(seed=3), r"search\.json: the file was changed"),
        ("trials.jsonl", None, r"trials\.jsonl, line 1: it has a key twice \('trial'\)"),
        ("trials.jsonl", lambda tree: tree.pop("values"), r"trials\.jsonl, line 1: values: field required"),
        (
            "trials.jsonl",
            lambda tree: tree["points"][-1].update(score="1"),
            r"line 1: points\.\d\.score: input should be",
        ),
        (
            "trials.jsonl",
            lambda tree: tree["points"][-1]["validation"].update(accuracy=1.0),
            "line 1: was changed",
        ),
        (
            "trials.jsonl",
            lambda tree: tree["values"].update({"local.lr": 1.0}),
            "line 1: was changed",
        ),
    ],
)
def test_a_file_of_the_search_that_was_changed_is_refused(folder, name, change, message):
    file = folder / name
    if change is None:
        file.write_text(file.read_text().replace("{", '{"trial": "fedprox-007", ', 1))
    elif name == "search.json":
        tree = json.loads(file.read_text())
        change(tree)
        file.write_text(json.dumps(tree))
    else:
        change_line(file, change)
    check_refused(folder, message)


def test_ended_trials_that_change_places_are_refused(folder):
    file = folder / "trials.jsonl"
    first, second = file.read_text().splitlines(keepends=True)
    file.write_text(second + first)
    check_refused(folder, "line 1: was changed, or does not follow")


def test_verify_names_the_line_and_the_trial_that_were_changed(folder):
    assert all(finding.whole for finding in verify_search(folder))
    summary = folder / "trials/fedprox-001/summary.json"
    summary.write_text(summary.read_text().replace('"rounds": 2', '"rounds": 3', 1))
    assert [finding.what for finding in verify_search(folder) if not finding.whole] == ["trials/fedprox-001"]
    change_line(folder / "trials.jsonl", lambda tree: tree["points"][-1].update(score=0.9))
    assert [finding.what for finding in verify_search(folder) if not finding.whole] == ["trials.jsonl"]


def test_verify_names_a_line_that_a_kill_cut_off_and_asks_for_no_run_of_a_failed_trial(folder):
    with Folder.open(folder) as search_folder:
        append_trial(
            search_folder,
            TrialRecord("fedprox-002", "fedprox", {}, Config(method="fedprox"), 1, failed="out of memory"),
        )
    assert damaged(folder) == []
    with (folder / "trials.jsonl").open("a") as stream:
        stream.write('{"trial": "fedprox-00')
    assert damaged(folder) == ["trials.jsonl"]


@pytest.mark.parametrize("name", ["trials.json", "trials.csv", "best.yaml", "importance.json", "search.png"])
@pytest.mark.parametrize("change", [lambda content: content + b" ", lambda content: content[:-1], None])
def test_verify_names_results_that_were_changed(folder, name, change):
    file = folder / name
    content = file.read_bytes()
    file.unlink()
    if change is not None:
        file.write_bytes(change(content))
    [damaged] = [finding for finding in verify_search(folder) if not finding.whole]
    assert name in damaged.detail


@pytest.mark.parametrize(
    "seal", ["", "[]", '{"best.yaml": "0", "best.yaml": "0"}', '{"trials.json": 1}', '{"../../etc/passwd": "0"}']
)
def test_verify_refuses_a_seal_that_cannot_be_read(folder, seal):
    (folder / "seal.json").write_text(seal)
    assert [finding.what for finding in verify_search(folder) if not finding.whole] == ["seal.json"]


def test_verify_says_that_results_without_a_seal_have_none(folder):
    (folder / "seal.json").unlink()
    [unsealed] = [finding for finding in verify_search(folder) if finding.what == "trials.json"]
    assert unsealed.whole
    assert "unsealed" in unsealed.detail


def test_a_loop_of_links_is_no_search(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    check_refused(loop, "loop of links")
    with pytest.raises(RayltError, match="loop of links"):
        small_search(loop, "federation.rounds=2", samples=2, scheduler="none")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("config.yaml", "momentum: 0.9", "momentum: 0.8", "local.momentum is 0.8, the run was made with 0.9"),
        ("metrics.jsonl", '"replies": 4', '"replies": 5', "was changed"),
        ("summary.json", '"rounds": 2', '"rounds": 3', r"summary\.json: the file was changed after the run ended"),
    ],
)
def test_a_trial_that_was_changed_is_refused(folder, name, old, new, message):
    file = folder / "trials/fedprox-001" / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    check_refused(folder, message)


def test_another_byte_in_the_middle_is_named(folder):
    file = folder / "trials.jsonl"
    file.write_bytes(b"\xff" + file.read_bytes())
    check_refused(folder, r"trials\.jsonl: is not UTF-8")


def test_a_finished_trial_is_not_run_again(folder):
    run = Run.open(folder / "trials/fedprox-000")
    assert not (run.folder / "checkpoints").exists()
    before = {file: file.read_bytes() for file in run.folder.iterdir() if file.is_file()}
    assert run.resume(fleet="local", quiet=True).state == "done"
    assert {file: file.read_bytes() for file in run.folder.iterdir() if file.is_file()} == before


def test_a_trial_that_was_stopped_is_not_begun_again_by_hand(folder):
    run = Run.open(folder / "trials/fedprox-000")
    (run.folder / "summary.json").unlink()
    with pytest.raises(RayltError, match=r"all checkpoints are missing \(2 steps were committed\)"):
        run.resume(fleet="local", quiet=True)
    assert len(run.reports) == 2


def damaged(folder):
    return [finding.what for finding in verify_search(folder) if not finding.whole]


@pytest.mark.parametrize(
    "name", ["config.yaml", "split.json", "outline.json", "model.safetensors", "confusions/000001.npz"]
)
def test_verify_checks_every_file_of_a_trial(folder, name):
    assert damaged(folder) == []
    trial = next((folder / "trials").iterdir())
    file = trial / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert f"trials/{trial.name}/{name}" in damaged(folder) or f"trials/{trial.name}" in damaged(folder)


def test_verify_names_the_files_of_a_trial_that_no_hash_binds(folder):
    details = [finding.detail for finding in verify_search(folder) if finding.what.startswith("trials/")]
    assert all("scores.jsonl: unsealed" in detail for detail in details)


def test_a_result_whose_hash_was_taken_out_is_refused(folder):
    seal = folder / "seal.json"
    hashes = json.loads(seal.read_text())
    del hashes["best.yaml"]
    seal.write_text(json.dumps(hashes))
    assert damaged(folder) == ["seal.json"]
    seal.write_text(json.dumps({**hashes, "../other": "0" * 64}))
    assert damaged(folder) == ["seal.json"]


@pytest.fixture
def interrupted(made, tmp_path):
    """Return a copy of the search as if it had been killed before a trial's line was written."""
    folder = shutil.copytree(made, tmp_path / "s")
    (folder / "trials.jsonl").write_text("")
    return folder


@pytest.mark.slow
def test_an_interrupted_search_takes_the_scores_of_its_trials(interrupted, made):
    continued = resume(interrupted, fleet="local")
    assert [(trial.id, trial.scores, trial.outcome) for trial in continued.trials] == [
        (trial.id, trial.scores, trial.outcome) for trial in resume(made, fleet="local").trials
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(score=1.0),
        lambda tree: tree.update(steps=0),
        lambda tree: tree.update(kind="final"),
        lambda tree: tree.update(step=9),
        lambda tree: tree["validation"].update(few=1.0),
        lambda tree: (tree["validation"].update(accuracy=1.0), tree.update(score=1.0)),
        lambda tree: tree["test"].update(accuracy=1.0),
        lambda tree: tree["test"].clear(),
    ],
)
def test_a_changed_score_of_an_interrupted_trial_is_refused(interrupted, change):
    change_line(interrupted / "trials/fedprox-000/scores.jsonl", change)
    check_refused(interrupted, r"fedprox-000/scores\.jsonl: the score of a step .*\(1\)")


@pytest.mark.parametrize("left", [0, 1])
def test_a_missing_score_of_an_interrupted_trial_is_refused(interrupted, left):
    file = interrupted / "trials/fedprox-000/scores.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:left]))
    check_refused(interrupted, rf"fedprox-000/scores\.jsonl: the score of a step is missing \({left + 1}\)")


@pytest.mark.slow
def test_the_order_of_scores_does_not_matter(interrupted, made):
    file = interrupted / "trials/fedprox-000/scores.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    trial, original = (resume(folder, fleet="local").trials[0] for folder in (interrupted, made))
    assert list(trial.scores.items()) == list(original.scores.items())


def test_verify_checks_trials_that_have_not_ended(interrupted):
    assert damaged(interrupted) == []
    (interrupted / "trials/fedprox-000/model.safetensors").write_bytes(b"")
    assert damaged(interrupted) == ["trials/fedprox-000/model.safetensors"]


@pytest.mark.slow
def test_a_search_does_not_continue_with_another_version_of_a_plugin(tmp_path, no_guests):
    file = tmp_path / "own.py"
    text = (
        "from torch import nn\nimport raylt\ndef own(classes, shape):\n    encoder = nn.Sequential(nn.Flatten(), "
        "nn.Linear(64, 8))\n    return raylt.SplitModel(encoder, 8, classes)\nraylt.register(own, kind='model')\n"
    )
    file.write_text(text)
    load_plugin(file)
    folder = small_search(tmp_path, "federation.rounds=1", "model=own", samples=1, scheduler="none").folder
    assert len(resume(folder, fleet="local").trials) == 1
    file.write_text(text + "# another\n")
    load_plugin(file)
    check_refused(folder, "the run's model 'own' was another version")
    (folder / "trials.jsonl").write_text("")  # as after a kill
    check_refused(folder, "the run's model 'own' was another version")
