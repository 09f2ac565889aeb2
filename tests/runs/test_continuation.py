"""A run that is extended equals a run that had all rounds from the start."""

import shutil
from pathlib import Path
from typing import ClassVar

import pytest
from refusals import refused
from small_runs import make_tiny_run

import raylt
from raylt import Run
from raylt.core.checkpoint.checkpoint import hash_tensors, steps
from raylt.core.evaluation import evaluator
from raylt.errors import CheckpointError, ConfigError
from raylt.registry import load_plugin
from raylt.runs.verify import verify
from raylt.studies.records.record import failure_file
from raylt.studies.report.listing import listing

OF_TIME = {"seconds", "evaluation_seconds", "stages", "date", "previous"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def short(folder):
    return make_tiny_run(folder, "fedavg", name="short")


def without_times(run: Run) -> list[dict]:
    return [{key: value for key, value in report.items() if key not in OF_TIME} for report in run.reports]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["method=fedavg"],
        pytest.param(["method=fedavgm", "evaluation.every=3"], marks=pytest.mark.slow),
        pytest.param(["method=scaffold", "evaluation.every=4"], marks=pytest.mark.slow),
        ["method=fedper", "data.partition=by_id", "evaluation.personal=4"],
        pytest.param(["method=ditto", "evaluation.every=3"], marks=pytest.mark.slow),
        pytest.param(["method=fedper", "evaluation.personal=2", "evaluation.every=9"], marks=pytest.mark.slow),
        ["method=fedavg", "federation.batchnorm=local"],
    ],
    ids=lambda settings: "-".join(settings[:2]),
)
def test_an_extended_run_equals_a_run_of_that_length(tmp_path, settings):
    method = settings[0].removeprefix("method=")
    long = make_tiny_run(tmp_path, method, *settings[1:], "federation.rounds=4", name="long")
    before = make_tiny_run(tmp_path, method, *settings[1:], name="short")
    files = {file: file.read_bytes() for file in before.folder.rglob("*") if file.is_file()}
    after = raylt.resume(before.folder, ["federation.rounds=4"], fleet="local", quiet=True)
    assert after.folder == tmp_path / "short-4"
    assert after.summary["model_sha256"] == long.summary["model_sha256"] != before.summary["model_sha256"]
    assert without_times(after) == without_times(long)
    assert after.config == long.config
    assert all(finding.whole for finding in verify(after.folder))
    assert {file: file.read_bytes() for file in files} == files
    assert [after.matrices(report["step"]).sha256 for report in long.reports if report["confusion"]] == [
        report["confusion"] for report in long.reports if report["confusion"]
    ]


@pytest.mark.slow
def test_an_extended_run_of_many_own_models_lists_clients_in_its_last_line_only(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "MAX_LISTED_CLIENTS", 3)
    settings = ["data.partition=by_id", "evaluation.personal=1"]
    long = make_tiny_run(tmp_path, "fedper", *settings, "federation.rounds=3", name="long")
    before = make_tiny_run(tmp_path, "fedper", *settings, name="short")
    after = raylt.resume(before.folder, ["federation.rounds=3"], fleet="local", quiet=True)
    assert without_times(after) == without_times(long)
    assert [report["by_client"] is None for report in after.reports] == [True, True, False]
    assert None not in [report["clients"] for report in after.reports]  # the means over clients are in each line


@pytest.mark.slow
@pytest.mark.parametrize("best", [1, 2, 3])
def test_an_extended_run_keeps_its_best_round(tmp_path, monkeypatch, best):
    def judge(method, server, fleet, task):
        return {"accuracy": 0.9 if server.round == best else 0.1}

    monkeypatch.setattr(evaluator, "validate", judge)
    settings = ["data.validation=0.2", "output.keep=2"]
    before = make_tiny_run(tmp_path, "fedavg", *settings, "federation.rounds=3", name="short")
    after = raylt.resume(before.folder, ["federation.rounds=6"], fleet="local", quiet=True)
    assert after.best_step() == before.best_step() == best
    hashes = [hash_tensors(dict(run.model(step=best).network.state_dict())) for run in (before, after)]
    assert hashes[0] == hashes[1]
    branch = raylt.branch(after, ["method=fedncm"], tmp_path / "branch", fleet="local", quiet=True)
    assert branch.best_step() == best


@pytest.mark.slow
def test_a_last_round_that_the_longer_run_does_not_judge_is_not_its_best(tmp_path, monkeypatch):
    accuracy = {3: 0.9, 4: 0.5, 6: 0.3, 8: 0.2}

    def judge(method, server, fleet, task):
        return {"accuracy": accuracy.get(server.round, 0.1)}

    monkeypatch.setattr(evaluator, "validate", judge)
    settings = ["data.validation=0.2", "output.keep=2", "evaluation.every=2", "data.new_clients=1"]
    long = make_tiny_run(tmp_path, "fedavg", *settings, "federation.rounds=8", name="long")
    before = make_tiny_run(tmp_path, "fedavg", *settings, "federation.rounds=3", name="short")
    after = raylt.resume(before.folder, ["federation.rounds=8"], fleet="local", quiet=True)
    assert after.best_step() == long.best_step() == 4
    assert steps(after.folder / "checkpoints") == steps(long.folder / "checkpoints")
    assert without_times(after) == without_times(long)


def test_a_damaged_best_checkpoint_is_not_taken_over(tmp_path, monkeypatch):
    def judge(method, server, fleet, task):
        return {"accuracy": 0.9 if server.round == 1 else 0.1}

    monkeypatch.setattr(evaluator, "validate", judge)
    before = make_tiny_run(tmp_path, "fedavg", "data.validation=0.2", "federation.rounds=3", name="short")
    next((before.folder / "checkpoints/000001").glob("*.safetensors")).write_bytes(b"damaged")
    after = raylt.resume(before.folder, ["federation.rounds=4"], fleet="local", quiet=True)
    assert 1 not in steps(after.folder / "checkpoints")


def test_its_identity_names_the_shorter_one(short):
    after = raylt.resume(short.folder, ["federation.rounds=3", "output.keep=4"], fleet="local", quiet=True)
    assert after._files.identity["parent"] == {"name": "short", "run": short.sha256, "stage": "rounds", "step": 2}
    assert after.sha256 != short.sha256
    assert steps(after.folder / "checkpoints") == [2, 3]
    with pytest.raises(CheckpointError, match="short-3"):
        raylt.resume(short.folder, ["federation.rounds=3"], fleet="local", quiet=True)


@pytest.mark.slow
def test_a_run_that_was_stopped_early_can_be_longer_too(short, tmp_path):
    stopped = Run.open(shutil.copytree(short.folder, tmp_path / "stopped"))
    (stopped.folder / "summary.json").unlink()
    shutil.rmtree(stopped.folder / "checkpoints/000002")
    after = raylt.resume(stopped.folder, ["federation.rounds=3"], fleet="local", quiet=True)
    assert after._files.identity["parent"]["step"] == 1
    long = make_tiny_run(tmp_path, "fedavg", "federation.rounds=3", name="long")
    assert after.summary["model_sha256"] == long.summary["model_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(("inside", "named"), [(".", "."), ("checkpoints", "..")])
def test_a_run_named_by_a_relative_path_has_its_longer_run_next_to_it(short, tmp_path, monkeypatch, inside, named):
    run = Path(shutil.copytree(short.folder, tmp_path / "run"))
    (tmp_path / "run.failed").write_text("")
    monkeypatch.chdir(run / inside)
    after = raylt.resume(named, ["federation.rounds=3"], fleet="local", quiet=True)
    assert after.folder.resolve() == tmp_path / "run-3"
    branch = raylt.branch(named, ["method=posthoc"], fleet="local", quiet=True)
    assert branch.folder.resolve().parent == tmp_path
    assert [each.name for each in listing(Path(named))] == ["run"]
    assert failure_file(Path(named)).read_text() == ""


def share_of(server):
    return server.round / server.rounds


class Indirect(raylt.Method):
    name: ClassVar[str] = "indirect"
    paper: ClassVar[str] = "for tests"

    def message(self, server):
        return super().message(server) | {"share": share_of(server)}


class Warming(raylt.Method):
    name: ClassVar[str] = "warming"
    paper: ClassVar[str] = "for tests"

    def message(self, server):
        return super().message(server) | {"share": server.round / server.rounds}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["method=bpfed"], "after the last round"),
        (["method=fedsm", "method.teacher=none", "method.retrain_rounds=1"], "retraining"),
        (["method=fedavg", "local.schedule=cosine"], "local.schedule"),
        (["method=warming"], "depend on the number of rounds"),
        (["method=indirect"], "depend on the number of rounds"),
        (["method=fedrela"], "relabelling"),
        (["method=fedrela", "method.after=1.0"], "depend on the number of rounds"),
    ],
)
def test_a_run_whose_rounds_depend_on_their_number_stays_as_long_as_it_is(folder, settings, reason):
    raylt.register(Warming)
    raylt.register(Indirect)
    method = settings[0].removeprefix("method=")
    name = "-".join(settings).replace("=", "-")
    run = make_tiny_run(folder, method, *settings[1:], "federation.rounds=1", name=name)
    with refused("run.not-extensible", ConfigError, key="federation.rounds", value=5) as caught:
        raylt.resume(run.folder, ["federation.rounds=5"], fleet="local", quiet=True)
    assert reason in str(caught.value)
    assert not (folder / f"{name}-5").exists()


RENAMED = """
import raylt

class Renamed(raylt.Method):
    name = "renamed"
    paper = "for tests"

    def message(self, s):
        return super().message(s) | {"share": s.round / s.rounds}
"""
MIXED = """
import raylt
from share_of_rounds import Share

class Mixed(Share, raylt.Method):
    name = "mixed"
    paper = "for tests"
"""
SHARE = """
class Share:
    def message(self, s):
        return super().message(s) | {"share": s.round / s.rounds}
"""
CAREFUL = """
import raylt

class Careful(raylt.Method):
    name = "careful"
    paper = "for tests"

    def message(self, server):
        # server.rounds would depend on the length of the run
        return super().message(server) | {"tenth": server.round / 10}
"""


@pytest.mark.usefixtures("no_guests")
@pytest.mark.parametrize(
    ("name", "text", "extended"), [("renamed", RENAMED, False), ("mixed", MIXED, False), ("careful", CAREFUL, True)]
)
def test_a_method_that_reads_the_number_of_rounds_under_any_name_stays_as_long_as_it_is(tmp_path, name, text, extended):
    if text == MIXED:
        (tmp_path / "share_of_rounds.py").write_text(SHARE)
    (tmp_path / "own.py").write_text(text)
    load_plugin(tmp_path / "own.py")
    run = make_tiny_run(tmp_path, name, "federation.rounds=1")
    if extended:
        assert len(raylt.resume(run.folder, ["federation.rounds=2"], fleet="local", quiet=True).reports) == 2
        return
    with refused("run.not-extensible", ConfigError):
        raylt.resume(run.folder, ["federation.rounds=2"], fleet="local", quiet=True)


def test_only_more_rounds_and_nothing_else(short):
    with refused("config.out-of-range", ConfigError, key="federation.rounds", value=1, least=2):
        raylt.resume(short.folder, ["federation.rounds=1"], fleet="local", quiet=True)
    with pytest.raises(CheckpointError, match=r"local\.lr"):
        raylt.resume(short.folder, ["federation.rounds=5", "local.lr=0.1"], fleet="local", quiet=True)


def test_a_longer_run_that_a_setting_excludes_leaves_no_folder(tmp_path):
    sampling = ["federation.sampling=poisson", "federation.participation=0.9"]
    run = make_tiny_run(tmp_path, "fedavg", *sampling, name="poisson")
    with refused("config.conflict", ConfigError, key="federation.sampling"):
        raylt.resume(run.folder, ["federation.rounds=4000"], fleet="local", quiet=True)
    assert not (tmp_path / "poisson-4000").exists()


def test_counts_that_were_changed_are_not_taken_over(short, tmp_path):
    folder = shutil.copytree(short.folder, tmp_path / "short")
    file = folder / "confusions/000001.npz"
    shutil.copyfile(folder / "confusions/000002.npz", file)
    with refused("run.changed", path=str(file)):
        raylt.resume(folder, ["federation.rounds=5"], fleet="local", quiet=True)
    assert not (tmp_path / "short-5/config.yaml").exists()
