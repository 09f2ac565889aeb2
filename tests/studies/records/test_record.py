import fcntl
import json
import os

import made
import pytest
from made import write_run

from raylt.errors import CheckpointError
from raylt.runs.folder import provenance
from raylt.runs.folder.reader import Files
from raylt.studies.definition import define, read_definition
from raylt.studies.records.record import RunRecord, failure_file, read_run
from raylt.studies.report.listing import listing

PLAN = define({"name": "s", "arms": {"fedavg": "fedavg"}, "base": {"federation": {"rounds": 3}}, "seeds": 1}).runs()[0]


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", PLAN, [0.1, 0.3, 0.2])
    return tmp_path / "run"


def test_a_finished_run(run):
    record = read_run(run, "c", "a", 0)
    assert (record.state, record.problem, record.steps, record.planned_steps) == ("done", None, 3, 3)
    assert record.curve["accuracy"] == [0.1, 0.3, 0.2]
    assert record.curve["up"] == [10, 20, 30]
    assert record.seconds == 6.0
    assert record == RunRecord.from_json(json.loads(json.dumps(record.to_json())))


def test_the_curve_that_is_shown_is_that_of_the_runs_main_figure(tmp_path, monkeypatch):
    def report_of_own_models(step, accuracy):
        clients = {"matched": {"mean": accuracy / 2, "worst_decile": 0.0}}
        return plain_report(step, accuracy).model_copy(update={"shown": "matched", "clients": clients})

    plain_report = made.report
    monkeypatch.setattr(made, "report", report_of_own_models)
    write_run(tmp_path / "personal", PLAN, [0.1, 0.3, 0.2], done=False)
    curve = read_run(tmp_path / "personal").curve
    assert curve["shown"] == curve["matched"] == [0.05, 0.15, 0.1]
    assert curve["accuracy"] == [0.1, 0.3, 0.2]


def test_figures_over_clients_are_recorded_under_their_measures(tmp_path, monkeypatch):
    kinds = ("local", "matched", "owned", "global", "long_tailed")

    def report_of_clients(step, accuracy):
        clients = {kind: {"mean": 0.1 * n + accuracy, "worst_decile": 0.1 * n} for n, kind in enumerate(kinds)}
        by_client = {kind: [0.1 * n] for n, kind in enumerate(kinds)}
        return plain_report(step, accuracy).model_copy(update={"clients": clients, "by_client": by_client})

    plain_report = made.report
    monkeypatch.setattr(made, "report", report_of_clients)
    write_run(tmp_path / "run", PLAN, [0.1, 0.3])
    record = read_run(tmp_path / "run")
    lasts = {name: record.curve[name][-1] for name in ("local", "matched", "owned", "clients", "worst_decile")}
    assert lasts == pytest.approx({"local": 0.3, "matched": 0.4, "owned": 0.5, "clients": 0.6, "worst_decile": 0.1})
    assert record.by_client == {"local": [0.0], "matched": [0.1], "owned": [0.2]}


def test_the_code_of_every_process_of_a_run_is_recorded(run, monkeypatch):
    lines = [{"code": "old", "torch": "1"}, {"code": "new", "torch": "2"}]
    monkeypatch.setattr(provenance, "read", lambda folder: lines)
    assert read_run(run).made == {"torch": "2", "code": "new", "codes": ["new", "old"]}


def test_no_folder_and_a_folder_that_was_never_begun_are_missing(tmp_path):
    assert read_run(tmp_path / "none").state == "missing"
    (tmp_path / "begun").mkdir()
    assert read_run(tmp_path / "begun").state == "missing"


def test_a_run_without_a_summary_is_stopped_and_its_half_line_is_nothing(run):
    (run / "summary.json").unlink()
    file = run / "metrics.jsonl"
    file.write_text(file.read_text()[:-20])
    record = read_run(run)
    assert (record.state, record.steps) == ("stopped", 2)


def test_a_run_that_a_process_holds_is_running(run):
    (run / "summary.json").unlink()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run).state == "running"
    assert read_run(run).state == "stopped"


def test_a_failure_is_shown_until_the_run_is_done(run):
    failure_file(run).write_text("out of memory\n")
    assert read_run(run).state == "done"
    (run / "summary.json").unlink()
    assert (read_run(run).state, read_run(run).problem) == ("failed", "out of memory")


def test_the_code_of_a_failure_says_whether_training_diverged(run):
    (run / "summary.json").unlink()
    failure_file(run).write_text("local.lr: training diverged\ntraining.diverged\n")
    record = read_run(run)
    assert (record.problem, record.error, record.diverged) == (
        "local.lr: training diverged",
        "training.diverged",
        True,
    )
    assert record == RunRecord.from_json(json.loads(json.dumps(record.to_json())))
    failure_file(run).write_text("out of memory\nclient.failed\n")
    assert not read_run(run).diverged


def damage(run, how):
    file, metrics = run / "summary.json", run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    summary = json.loads(file.read_text())
    match how:
        case "summary cut off":
            file.write_text(file.read_text()[:40])
        case "another accuracy":
            file.write_text(json.dumps(summary | {"accuracy": {"last": 0.9, "last10": 0.9, "best": 0.9}}))
        case "a round missing":
            metrics.write_text("".join(lines[:2]))
        case "a round left out":
            metrics.write_text(lines[0] + lines[2])
        case "a round twice":
            metrics.write_text(lines[0] + lines[0] + lines[1] + lines[2])
        case "a round changed":
            metrics.write_text(lines[0] + lines[1].replace('"accuracy": 0.3', '"accuracy": 0.4') + lines[2])
        case "last round changed":
            metrics.write_text(lines[0] + lines[1] + lines[2].replace('"accuracy": 0.2', '"accuracy": 0.4'))
        case "a line cut off":
            metrics.write_text(lines[0] + lines[1][:30] + "\n" + lines[2])
        case "a byte flipped":
            metrics.write_bytes(metrics.read_bytes().replace(b'"step": 2', b'"step"\xff 2'))
        case "more at the end":
            metrics.write_text("".join(lines) + "{")
        case "no split":
            (run / "split.json").unlink()
        case "no figures":
            file.write_text("{}")
        case "another setting":
            config = run / "config.yaml"
            config.write_text(config.read_text().replace("momentum: 0.9", "momentum: 0.8"))
        case "config is a list":
            (run / "config.yaml").write_text("[]")
        case "config is not yaml":
            (run / "config.yaml").write_text("a: [")
        case "of an older raylt":
            (run / "identity.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("summary cut off", "summary.json: is not JSON"),
        ("another accuracy", "summary.json: the file was changed after"),
        ("a round missing", "summary.json: metrics.jsonl does not end with"),
        ("a round left out", "metrics.jsonl, line 2: the line belongs to step 3"),
        ("a round twice", "line 2: the line belongs to step 1"),
        ("a round changed", "metrics.jsonl, line 2: the line was changed"),
        ("last round changed", "metrics.jsonl, line 3: the line was changed"),
        ("a line cut off", "line 2: is not JSON"),
        ("a byte flipped", "line 2: is not JSON"),
        ("more at the end", "metrics.jsonl does not end with"),
        ("no split", "split.json: cannot be used (No such file"),
        ("no figures", "summary.json: schema: field required"),
        ("another setting", "config.yaml: local.momentum is 0.8, the run was made with 0.9"),
        ("config is a list", "is not a mapping"),
        ("config is not yaml", "not YAML"),
        ("of an older raylt", "the folder has no identity.json"),
    ],
)
def test_a_damaged_run_says_what_is_wrong_and_has_no_figures(run, how, message):
    damage(run, how)
    record = read_run(run)
    assert record.state == "damaged"
    assert message in record.problem
    assert "\n" not in record.problem
    assert record.summary is None


def test_a_finish_is_a_step_and_no_round(tmp_path):
    write_run(tmp_path / "finished", PLAN, [0.1, 0.3, 0.2], finish=0.2)
    record = read_run(tmp_path / "finished")
    assert (record.state, record.steps, record.planned_steps) == ("done", 4, 3)


def test_listing_has_runs_and_counts_those_of_a_study(tmp_path, run):
    write_run(tmp_path / "study" / "fedavg" / "seed-0", PLAN, [0.1, 0.3, 0.2])
    write_run(tmp_path / "study" / "fedavg" / "seed-1", PLAN, [0.1], done=False)
    (tmp_path / "study" / "study.yaml").write_text("arms: {fedavg: fedavg}\nseeds: 3")
    write_run(tmp_path / "study" / "fedavg" / "seed-3", PLAN, [0.1, 0.3, 0.2])  # not planned any more
    trial = tmp_path / "study" / "fedavg" / "search" / "trials" / "fedavg-000"
    write_run(trial, PLAN, [0.1, 0.3, 0.2])
    (trial.parents[1] / "search.json").write_text("{}")
    # this folder is inside a run and is no run
    write_run(tmp_path / "study" / "fedavg" / "seed-0" / "checkpoints" / "copy", PLAN, [0.1])
    (tmp_path / "else").mkdir()
    entries = {entry.name: entry for entry in listing(tmp_path)}
    assert set(entries) == {"run", "study"}
    assert (entries["run"].state, entries["run"].accuracy, entries["run"].progress) == ("done", 0.2, "3/3")
    assert (entries["study"].state, entries["study"].progress) == ("stopped", "1/3 runs")
    assert {entry.name for entry in listing(tmp_path / "study")} == {f"fedavg/seed-{seed}" for seed in (0, 1, 3)}
    assert [entry.name for entry in listing(tmp_path / "study/fedavg/seed-0")] == ["seed-0"]


def test_listing_has_the_newest_first(tmp_path):
    for name, age in (("old", 300), ("new", 100), ("older", 500)):
        write_run(tmp_path / name, PLAN, [0.1, 0.3, 0.2])
        for file in (tmp_path / name).rglob("*"):
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - age))
    assert [entry.name for entry in listing(tmp_path)] == ["new", "old", "older"]


def test_listing_counts_the_rounds_of_a_run_with_a_last_phase(tmp_path):
    write_run(tmp_path / "run", PLAN, [0.1, 0.3, 0.2], finish=0.4)
    assert [(entry.progress, entry.accuracy) for entry in listing(tmp_path)] == [("3/3", 0.4)]


@pytest.mark.parametrize(
    ("figure", "own", "images"), [("local", [3, 0, 4], 7), ("matched", [3, 0, 4], 50), ("local", None, 50)]
)
def test_listing_has_the_test_images_of_the_figure_that_it_shows(tmp_path, run, monkeypatch, figure, own, images):
    record = read_run(run)
    record.summary.update(shown={"figure": figure}, tests={"images": 50, "own": own})
    monkeypatch.setattr("raylt.studies.report.listing.read_run", lambda folder: record)
    assert [entry.images for entry in listing(tmp_path)] == [images]


def test_listing_has_searches_and_their_trials(tmp_path, run):
    search, trials = tmp_path / "search", ("fedavg-000", "sfd-001", "sfd-001-split-1")
    for trial in trials:
        write_run(search / "trials" / trial, PLAN, [0.1, 0.3, 0.2])
    (search / "search.json").write_text('{"spaces": {"sfd": {}, "fedavg": {}}}')
    (entry,) = (entry for entry in listing(tmp_path) if entry.name != "run")
    assert (entry.kind, entry.method, entry.state, entry.progress) == ("search", "fedavg, sfd", "stopped", "2 trials")
    assert {trial.name for trial in listing(search)} == {f"trials/{name}" for name in trials}
    (search / "seal.json").write_text("{}")
    (search / "search.json").write_text("[")
    for state in ("failed", "done"):
        assert [(each.method, each.state) for each in listing(tmp_path) if each.kind == "search"] == [("", state)]
        (search / "best.yaml").write_text("")  # of a search in which a trial has finished
    with (search / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [entry.state for entry in listing(tmp_path) if entry.kind == "search"] == ["running"]


def test_listing_has_searches_with_rays_schedulers(tmp_path):
    search = tmp_path / "search"
    for trial in ("FederatedRun_a_0", "FederatedRun_a_1", "FederatedRun_a_2"):
        (search / trial).mkdir(parents=True)
    (search / "FederatedRun_a_0" / "result.json").write_text("{}\n")
    (search / "FederatedRun_a_1" / "result.json").write_text("{}\n")
    (search / "ray_search.json").write_text('{"config": {"method": {"name": "fedprox", "mu": 0.1}}, "samples": 3}')

    def rows(folder):
        return [(each.name, each.kind, each.method, each.state, each.progress) for each in listing(folder)]

    assert rows(search) == rows(tmp_path) == [("search", "search", "fedprox", "stopped", "2 trials")]
    (search / "best.yaml").write_text("")
    (search / "ray_search.json").write_text('{"config": []}')
    assert rows(tmp_path) == [("search", "search", "", "done", "2 trials")]
    with (search / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert rows(tmp_path) == [("search", "search", "", "running", "2 trials")]


def test_a_study_of_somebody_else_is_listed_and_nothing_waits_or_is_followed(tmp_path, run):
    theirs, secret = tmp_path / "theirs", tmp_path / "secret"
    write_run(theirs / "fedavg" / "seed-0", PLAN, [0.1, 0.3, 0.2])
    os.mkfifo(theirs / "study.yaml")
    secret.write_text("precious")
    (theirs / "fedavg" / "seed-0.failed").symlink_to(secret)
    os.mkfifo(theirs / "fedavg" / "seed-1.failed")
    assert [entry.name for entry in listing(tmp_path)] == ["run"]
    assert read_run(theirs / "fedavg" / "seed-0").state == "done"
    assert read_run(theirs / "fedavg" / "seed-1").state == "damaged"
    (theirs / "fedavg" / "seed-0" / "summary.json").unlink()
    assert "precious" not in str(read_run(theirs / "fedavg" / "seed-0").problem)


@pytest.mark.parametrize(
    ("settings", "runs"),
    [
        ("cells: {small: {data.imbalance: 5, data.alpha: 1.0}, large: {data.imbalance: 50, data.alpha: 0.1}}", 12),
        ("cells: {data.imbalance: [5, 50], data.alpha: [0.1]}", 12),
        ("cells: [{data.imbalance: 5}]", 6),
        ("cells: {data.imbalance: [5, 50]}\nonly: {IF 5: [fedavg]}", 9),
    ],
)
def test_listing_counts_the_runs_that_a_study_plans(tmp_path, settings, runs):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.yaml").write_text(
        f"name: study\narms: {{fedavg: fedavg, prox: fedprox}}\nseeds: 3\n{settings}"
    )
    assert len(read_definition(tmp_path / "study" / "study.yaml").runs()) == runs
    assert [entry.progress for entry in listing(tmp_path)] == [f"0/{runs} runs"]


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("damaged", "failed", "running"), "running"),
        (("damaged", "failed", "done"), "failed"),
        (("damaged", "done", "stopped"), "damaged"),
        (("done", "stopped", "done"), "stopped"),
        (("done", "done", "done"), "done"),
    ],
)
def test_the_state_of_a_study_is_the_most_urgent_of_its_runs(tmp_path, monkeypatch, states, state):
    for seed in range(3):
        write_run(tmp_path / "study" / "fedavg" / f"seed-{seed}", PLAN, [0.1, 0.3, 0.2])
    (tmp_path / "study" / "study.yaml").write_text("arms: {fedavg: fedavg}\nseeds: 3")
    monkeypatch.setattr(
        "raylt.studies.report.listing.read_run",
        lambda folder: RunRecord("", "fedavg", 0, str(folder), states[int(folder.name[-1])]),
    )
    assert [entry.state for entry in listing(tmp_path)] == [state]


def test_listing_leaves_out_the_runs_of_arms_and_cells_that_a_study_no_longer_has(tmp_path):
    study = tmp_path / "study"
    for run in ("if10/fedavg/seed-0", "if10/former/seed-0", "if50/fedavg/seed-0", "fedavg/seed-0"):
        write_run(study / run, PLAN, [0.1, 0.3, 0.2])
    (study / "study.yaml").write_text("arms: {fedavg: fedavg, prox: fedprox}\nseeds: 1\ncells: {data.imbalance: [10]}")
    assert [entry.progress for entry in listing(tmp_path)] == ["1/2 runs"]


def test_listing_counts_what_is_on_record(tmp_path):
    write_run(tmp_path / "study" / "fedavg" / "seed-0", PLAN, [0.1, 0.3, 0.2])
    (tmp_path / "study" / "study.yaml").write_text("arms: {fedavg: fedavg}\nseeds: 2")
    places = [{"folder": f"fedavg/seed-{seed}"} for seed in (0, 1)]
    (tmp_path / "study" / "recorded.json").write_text(json.dumps({"records": places}))
    assert [(entry.state, entry.progress) for entry in listing(tmp_path)] == [("done", "2/2 runs")]
    (tmp_path / "study" / "recorded.json").write_text("[")
    assert [entry.progress for entry in listing(tmp_path)] == ["1/2 runs"]


def test_a_divergence_whose_run_was_removed_is_no_result(tmp_path):
    failure_file(tmp_path / "removed").write_text("training diverged\ntraining.diverged\n")
    record = read_run(tmp_path / "removed")
    assert (record.state, record.diverged) == ("failed", False)


def test_a_folder_that_cannot_be_opened_has_a_record_with_the_reason(tmp_path, monkeypatch):
    def unreadable(self):
        raise CheckpointError(f"{tmp_path}: cannot be read.", code="file.not-readable")

    monkeypatch.setattr(Files, "state", property(unreadable))
    record = read_run(tmp_path)
    assert record.state == "damaged"
    assert "cannot be read" in record.problem
