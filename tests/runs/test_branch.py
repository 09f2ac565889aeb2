"""A branch equals the whole run with its fields; fields that act before the branch are refused."""

import json
import shutil
from typing import ClassVar

import pytest
from refusals import refused
from small_runs import make_run

import raylt
from raylt.config import load
from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.branch_points import Fork, fork
from raylt.errors import CheckpointError, ConfigError
from raylt.methods import METHODS
from raylt.methods.fedavg import FedAvg
from raylt.registry import resolve
from raylt.runs import continuation
from raylt.runs.folder import provenance
from raylt.runs.folder.writer import Journal

SFD = (
    "method=sfd",
    "method.rf_dim=64",
    "method.m_min=160",
    "method.m_max=200",
    "method.synthesis_steps=2",
    "method.retrain_epochs=2",
)
BPFED = ("method=bpfed", "method.retrain_epochs=1", "federation.rounds=2")
FEDSM = (
    "method=fedsm",
    "method.teacher=none",
    "method.kd=0",
    "method.retrain_rounds=3",
    "method.size=4",
    "method.retrain_epochs=1",
    "federation.rounds=5",
)
MUPFL = ("method=mupfl", "method.m=4", "method.tau=1", "method.matching_steps=1", "federation.rounds=2")


ALSO = pytest.mark.slow


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("settings", "overrides", "stage", "step"),
    [
        (SFD, ["method.aligner=false"], "finish", 1),
        pytest.param(SFD, ["method.safs=false"], "finish", 1, marks=ALSO),
        pytest.param(SFD, ["method.retrain_lr=0.1", "method.rf_dim=32"], "finish", 1, marks=ALSO),
        pytest.param(BPFED, ["method.loss=ce", "method.fa=false"], "finish", 2, marks=ALSO),
        (BPFED, ["method.crt=false", "method.lws=false"], "finish", 2),
        (FEDSM, ["method.size=6", "method.partner=random"], "retraining", 2),
        pytest.param(FEDSM, ["method.retrain_rounds=1"], "retraining", 2, marks=ALSO),
        pytest.param(FEDSM, ["method.retrain_rounds=0"], "retraining", 2, marks=ALSO),
        (("method=fedrela", "method.after=0.5", "federation.rounds=3"), ["method.share=0.5"], "relabelling", 1),
        ((*MUPFL, "data.validation=0.2", "data.new_clients=1"), ["method.judged=global"], "judging", 2),
        ((*BPFED, "data.new_clients=1"), ["method.argmax=owned"], "judging", 3),
        pytest.param(MUPFL, ["method.last_update=true"], "finish", 2, marks=ALSO),
        (("method=fedavg",), ["method=ccvr", "method.retrain_epochs=2"], "finish", 1),
        pytest.param(("method=fedavg",), ["method=fed3r"], "finish", 1, marks=ALSO),
        (("method=fedavg",), ["method=posthoc"], "finish", 1),
        pytest.param(("method=fedavg",), ["method=noisymeans", "method.retrain_epochs=2"], "finish", 1, marks=ALSO),
        pytest.param(
            ("method=fedavg",),
            ["method=oracle", "method.retrain_epochs=2", "method.retrain_batch=99"],
            "finish",
            1,
            marks=ALSO,
        ),
        pytest.param(("method=fedavg",), ["method=fednpc"], "finish", 1, marks=ALSO),
        pytest.param(SFD, ["method.classifier=oracle"], "finish", 1, marks=ALSO),
        pytest.param(SFD, ["method.classifier=ridge"], "finish", 1, marks=ALSO),
        pytest.param(("method=ccvr", "method.retrain_epochs=2"), ["method=fedncm"], "finish", 1, marks=ALSO),
        pytest.param(("method=ccvr", "method.retrain_epochs=2"), ["method=fedavg"], "finish", 1, marks=ALSO),
    ],
    ids=str,
)
def test_branch_is_what_the_whole_run_gives(tmp_path, settings, overrides, stage, step):
    parent = make_run(tmp_path, "parent", *settings)
    before = sorted((p.name, p.read_bytes()) for p in parent.folder.iterdir() if p.is_file())
    branched = raylt.branch(parent, overrides, tmp_path / "branch", fleet="local", quiet=True)
    fields = () if overrides[0].startswith("method=") else settings
    whole = make_run(tmp_path, "whole", *fields, *overrides)
    assert branched.config.method == whole.config.method
    assert branched.summary["model_sha256"] == whole.summary["model_sha256"]
    branch_reports, whole_reports = branched.reports, whole.reports
    assert len(branch_reports) == len(whole_reports)
    for name in (
        "step",
        "phase",
        "accuracy",
        "global_accuracy",
        "groups",
        "clients",
        "traffic",
        "figures",
        "participants",
    ):
        assert [line[name] for line in branch_reports] == [line[name] for line in whole_reports], name
    assert branch_reports[-1]["others"] == whole_reports[-1]["others"]
    assert branch_reports[-1]["by_client"] == whole_reports[-1]["by_client"]
    parts = json.loads((branched.folder / "identity.json").read_text())["parent"]
    assert parts == {"name": "parent", "run": parent.sha256, "stage": stage, "step": step}
    assert branched.sha256 != whole.sha256 != parent.sha256
    made = [line["after_step"] for line in provenance.read(branched.folder)]
    assert made == [0, step]  # who took the shared steps, and who took the others
    assert before == sorted((p.name, p.read_bytes()) for p in parent.folder.iterdir() if p.is_file())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "override"), [(MUPFL, "method.judged=global"), (BPFED, "method.argmax=owned")], ids=["mupfl", "bpfed"]
)
def test_a_field_of_evaluations_that_were_made_cannot_be_changed(tmp_path, settings, override):
    """Earlier lines of the parent may have figures of other models than those of a run that has the field."""
    parent = make_run(tmp_path, "parent", *settings, "evaluation.personal=1")
    key, _, value = override.partition("=")
    with refused("run.not-branchable", ConfigError, key=key, value=value):
        raylt.branch(parent, [override], tmp_path / "branch", fleet="local", quiet=True)


@pytest.mark.slow
def test_branch_can_be_resumed_and_branched_again(tmp_path):
    parent = make_run(tmp_path, "parent", *SFD)
    first = raylt.branch(parent, ["method.mmd=false"], tmp_path / "first", fleet="local", quiet=True)
    (first.folder / "summary.json").unlink()
    (first.folder / "metrics.jsonl").write_text(
        "".join(line + "\n" for line in (first.folder / "metrics.jsonl").read_text().splitlines()[:1])
    )
    for folder in sorted((first.folder / "checkpoints").iterdir())[1:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    again = raylt.Run(first.folder).resume(fleet="local", quiet=True)
    second = raylt.branch(again, ["method.mmd=true"], tmp_path / "second", fleet="local", quiet=True)
    assert second.summary["model_sha256"] == parent.summary["model_sha256"] != again.summary["model_sha256"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("method.tau=0.2", r"method\.tau.*0\.07.*0\.2"),
        ("local.lr=0.2", r"local\.lr.*0\.05.*0\.2"),
        ("data.seed=3", r"data\.seed.*0.*3"),
        ("method.retrain_lr=0.01", "later stage"),
        ("method=fedprox", "fedprox.*sfd|sfd.*fedprox"),
        ("method.retrain_epochs=-1", r"method\.retrain_epochs.*-1"),
    ],
)
def test_what_acts_before_the_stage_is_refused_and_leaves_nothing(tmp_path, override, match):
    run = make_run(tmp_path, "run", *SFD)
    with pytest.raises(ConfigError, match=match):
        raylt.branch(run, [override], tmp_path / "branch", fleet="local", quiet=True)
    assert not (tmp_path / "branch").exists()


@pytest.mark.slow
def test_checkpoint_before_a_stage_stays_and_without_it_there_is_no_branch(tmp_path):
    run = make_run(tmp_path, "run", *FEDSM, "output.keep=2")
    assert checkpoint.steps(run.folder / "checkpoints") == [2, 4, 5]
    with refused("checkpoint.not-kept", CheckpointError, step=1):
        raylt.branch(run, ["method.retrain_rounds=4"], fleet="local", quiet=True)
    shutil.rmtree(run.folder / "checkpoints/000002")
    with refused("checkpoint.not-found", CheckpointError, step=2):
        raylt.branch(run, ["method.size=6"], fleet="local", quiet=True)


def test_a_run_that_has_not_reached_the_stage_must_be_resumed_first(tmp_path):
    run = make_run(tmp_path, "run", "method=fedavg", "federation.rounds=2")
    (run.folder / "summary.json").unlink()
    shutil.rmtree(run.folder / "checkpoints/000002")
    file = run.folder / "metrics.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with refused("run.not-finished", CheckpointError, step=2, committed=1):
        raylt.branch(run, ["method=ccvr"], fleet="local", quiet=True)


@pytest.mark.slow
def test_stage_that_begins_with_the_first_round_is_no_branch(tmp_path):
    run = make_run(tmp_path, "run", *FEDSM)
    other = run.config.model_copy(update={"method": run.config.method | {"retrain_rounds": 5}})
    with pytest.raises(ConfigError, match="first round"):
        fork(run.config, run.method, other, resolve(other).method)


class Pushed(FedAvg):
    """FedAvg with a last phase, whose field acts from the first round on."""

    name: ClassVar[str] = "pushed"
    trains_as: ClassVar[str | None] = "fedavg"
    push: float = 0.0

    def finish(self, server, fleet):
        server.log(note="finished")


def test_a_method_with_a_field_of_its_own_that_acts_at_once_is_no_branch():
    config = load(None, ["method=fedavg", "federation.rounds=3"])
    with refused("run.not-branchable", ConfigError, key="method.push", value=0.5):
        fork(config, FedAvg(), config, Pushed(push=0.5))


def test_fields_of_two_stages_branch_a_run_before_the_earlier_one():
    changed = ["method.argmax=owned", "method.fa=false"]
    run, other = (load(None, ["method=bpfed", "federation.rounds=5", *more]) for more in ([], changed))
    assert fork(run, resolve(run).method, other, resolve(other).method) == Fork("finish", 5)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_later_stages_name_fields_and_begin_within_a_run(method):
    names = [name for names in method.later.values() for name in names]
    assert len(set(names)) == len(names)
    assert set(names) <= method.model_fields.keys()
    assert method.trains_as is None or method.trains_as in METHODS
    for rounds in (1, 30):
        stages = method(**{"teacher": "none"} if method.name == "fedsm" else {}).stages(rounds)
        assert method.later.keys() <= stages.keys()
        assert all(0 <= step <= rounds + 1 for step in stages.values())


def test_a_branch_that_cannot_be_run_can_be_resumed_and_one_that_is_killed_is_no_run(tmp_path, monkeypatch):
    run = make_run(tmp_path, "parent", "method=fedavg")
    monkeypatch.setattr(continuation, "carry_out", refuse)
    with pytest.raises(ConfigError, match="no cluster"):
        raylt.branch(run, ["method=ccvr"], tmp_path / "refused", fleet="local", quiet=True)
    with pytest.raises(CheckpointError, match=r"raylt\.resume"):
        raylt.branch(run, ["method=ccvr"], tmp_path / "refused", fleet="local", quiet=True)
    monkeypatch.setattr(checkpoint, "write", die)
    with pytest.raises(SystemExit):
        raylt.branch(run, ["method=ccvr"], tmp_path / "branch", fleet="local", quiet=True)
    assert not (tmp_path / "branch").exists()
    (tmp_path / "half").mkdir()
    with pytest.raises(CheckpointError, match="half"):
        raylt.branch(run, ["method=ccvr"], tmp_path / "half", fleet="local", quiet=True)


@pytest.mark.parametrize("step", [(continuation.counts, "copy"), (Journal, "_make_resumable")], ids=str)
def test_a_branch_that_fails_while_it_takes_over_steps_is_removed(tmp_path, monkeypatch, step):
    run = make_run(tmp_path, "parent", "method=fedavg")
    monkeypatch.setattr(*step, die)
    with pytest.raises(SystemExit):
        raylt.branch(run, ["method=ccvr"], tmp_path / "branch", fleet="local", quiet=True)
    assert not (tmp_path / "branch").exists()
    with refused("config.unknown-name", ConfigError, key="fleet", value="nonsense"):
        raylt.branch(run, ["method=ccvr"], tmp_path / "other", fleet="nonsense", quiet=True)
    assert not (tmp_path / "other").exists()


def refuse(setup, task, journal, *_):
    with journal:
        raise ConfigError("no cluster")


def die(*_):
    raise SystemExit
