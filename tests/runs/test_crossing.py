"""A run is continued and inspected on the kind of device that made it, unless the user says otherwise."""

import shutil

import pytest
from small_runs import make_run

import raylt
from raylt import Run
from raylt.config import load
from raylt.errors import ConfigError
from raylt.runs.debug import replay
from raylt.runs.folder import provenance

REFUSED = (
    r"resources.device: .* made on NVIDIA Pretence, would continue on cpu, which gives other bits. "
    r"Set resources.device=cuda on a machine that has it, or resources.device=cpu to continue all the same"
)


class Interrupts(raylt.Callback):
    def on_step(self, report):
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Do a run of two rounds that records that a GPU made it."""
    describe = provenance.describe_process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            provenance, "describe_process", lambda *described: describe(*described) | {"device": "NVIDIA Pretence"}
        )
        run = make_run(
            tmp_path_factory.mktemp("runs"),
            "one",
            "method=ccvr",
            "method.retrain_epochs=1",
            "federation.rounds=2",
            "output.keep=3",
        )
    return run.folder


@pytest.fixture
def halfway(made, tmp_path):
    """Return a copy of the run as if interrupted after its first round."""
    folder = shutil.copytree(made, tmp_path / "one")
    for name in ("summary.json", "model.safetensors"):
        (folder / name).unlink()
    for step in ("000002", "000003"):
        shutil.rmtree(folder / "checkpoints" / step)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    return folder


def test_a_run_records_what_it_was_computed_on(tmp_path):
    run = make_run(tmp_path, "one", "method=fedavg", "local.precision=bfloat16", "resources.deterministic=true")
    (line,) = provenance.read(run.folder)
    assert {key: line[key] for key in ("device", "server_device", "driver", "cuda", "precision", "deterministic")} == {
        "device": "cpu",
        "server_device": "cpu",
        "driver": None,
        "cuda": None,
        "precision": "bfloat16",
        "deterministic": True,
    }
    assert line["torch"]
    assert line["cpu"]
    assert {
        key: run.summary["made"][key] for key in line if key not in ("after_step", "directory", *provenance.LINKS)
    } == {key: value for key, value in line.items() if key not in ("after_step", "directory", *provenance.LINKS)}


def test_a_resumed_run_does_not_change_the_kind_of_device_by_itself(halfway):
    with pytest.raises(ConfigError, match=REFUSED):
        Run.open(halfway).resume(fleet="local", quiet=True)
    assert len(Run.open(halfway).reports) == 1
    assert len(provenance.read(halfway)) == 1


def test_a_resumed_run_changes_the_kind_of_device_only_on_request(halfway):
    with pytest.raises(KeyboardInterrupt):
        Run.open(halfway).resume(["resources.device=cpu"], fleet="local", quiet=True, callbacks=[Interrupts()])
    # the next process continues on the same kind of device, and so needs no request
    summary = Run.open(halfway).resume(fleet="local", quiet=True).summary
    assert summary["made"]["mixed"]["device"] == ["NVIDIA Pretence", "cpu"]


def test_a_branch_does_not_change_the_kind_of_device_by_itself(made, tmp_path):
    with pytest.raises(ConfigError, match=REFUSED):
        raylt.branch(made, ["method.virtual=10"], tmp_path / "branch", fleet="local", quiet=True)
    begun = Run.open(tmp_path / "branch")  # the shared steps exist, so this continues them
    assert len(begun.reports) == 2
    assert begun.resume(["resources.device=cpu"], fleet="local", quiet=True).summary["made"]["device"] == "cpu"


def test_a_call_is_repeated_on_another_kind_of_device_only_on_request(made):
    run = Run.open(made)
    with pytest.raises(ConfigError, match=REFUSED):
        replay(run, 2, 0, None)
    assert replay(run, 2, 0, None, "cpu").function == "train"


def test_a_run_that_asks_for_a_gpu_can_be_read_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr("raylt.core.device._on_gpu", lambda config, leased: False)
    config = load(
        None, ["method=fedavg", "federation.rounds=1", "local.epochs=1", "data.clients=3", "resources.device=cuda"]
    )
    folder = raylt.run(config, out=tmp_path, name="one", fleet="local", quiet=True).folder
    monkeypatch.undo()
    assert Run.open(folder).experiment().server.device.type == "cpu"
