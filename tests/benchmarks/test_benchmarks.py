"""The scripts of benchmarks/ run with their smallest settings, and their figures are as promised."""

import argparse
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerator  # noqa: F401 - torch must know of the pretend device before autograd first runs in a process
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import raylt
from raylt.config import load
from raylt.core.training.stacked_sgd import ClientStack
from raylt.models import MODELS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str, *arguments: object) -> str:
    """Run a script; return its output."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load_module(name: str) -> Any:
    """Import a script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their own module there
    spec.loader.exec_module(module)
    return module


def save_images(folder: Path, name: str, classes: int, side: int) -> list[Path]:
    """Save images whose classes differ in brightness, and random texts; return both files."""
    rng, files = np.random.default_rng(0), [folder / f"{name}.npz", folder / f"{name}.npy"]
    y, test = np.arange(20 * classes) % classes, np.arange(10 * classes) % classes
    x, x_test = (
        (40 * labels[:, None, None, None] + rng.integers(0, 40, (len(labels), side, side, 3))).astype(np.uint8)
        for labels in (y, test)
    )
    np.savez(
        files[0],
        x_train=x,
        y_train=y,
        x_test=x_test,
        y_test=test,
        class_names=np.array([f"{name} {c}" for c in range(classes)]),
    )
    np.save(files[1], rng.standard_normal((classes, 16)).astype(np.float32))
    return files


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return images, and features of them from a stand-in that was fitted to other images."""
    folder = tmp_path_factory.mktemp("standin")
    other = save_images(folder, "other", 6, 16)
    target, texts = save_images(folder, "mine", 4, 8)
    output = script(
        "standin", *other, target, texts, folder / "out.npz", "--model", "small", "--epochs", 2, "--batch", 32
    )
    assert "zero-shot accuracy on the test set of mine" in output
    return target, folder / "out.npz"


@pytest.mark.slow
def test_a_step_is_measured_beside_the_peak_of_a_core():
    printed = script("step", "--model", "small", "--batch", 8)
    shares = [float(row.split()[-1].rstrip("%")) for row in printed.splitlines()[2:5]]
    assert len(shares) == 3
    assert all(0 < share < 100 for share in shares)
    assert "aten::convolution_backward" in printed


@pytest.mark.slow
def test_a_stand_in_gives_unit_features_that_say_what_they_are(images):
    with np.load(images[1]) as out:
        assert out["image"].shape == (80, 16)
        assert np.allclose(np.linalg.norm(out["image"].astype(np.float32), axis=1), 1, atol=1e-3)
        assert str(out["about"]).startswith("stand-in for CLIP: small")


@pytest.mark.slow
def test_rows_of_fedsm_that_share_a_first_stage_are_what_whole_runs_give(images, tmp_path):
    source, teacher = images
    common = [
        f"data.source=npz:{source}",
        "data.imbalance=10",
        "data.partition=iid",
        "data.clients=4",
        "model=small",
        "federation.rounds=4",
        "federation.participation=0.5",
        "local.epochs=1",
        "local.batch=8",
        "local.lr=0.1",
        "method=fedsm",
        f"method.teacher=npz:{teacher}",
        "method.retrain_rounds=2",
        "method.size=8",
        "method.retrain_epochs=2",
    ]
    both = raylt.run(load(None, common), out=tmp_path, name="both", fleet="local", quiet=True)
    for row in ("method.retrain_rounds=0", "method.partner=random", "method.softmax=0.05"):
        branched = raylt.branch(both, [row], tmp_path / f"branch {row}", fleet="local", quiet=True)
        whole = raylt.run(load(None, [*common, row]), out=tmp_path, name=row, fleet="local", quiet=True)
        for what in ("accuracy", "groups", "by_client", "figures"):
            assert branched.reports[-1][what] == whole.reports[-1][what]
        assert branched.summary["model_sha256"] == whole.summary["model_sha256"]


@pytest.mark.timeout(600)
@pytest.mark.soak
@pytest.mark.slow
def test_a_run_gives_the_weights_of_the_bare_loop():
    assert "same weights, bit for bit: yes" in script("overhead", "--rounds", 2, "--model", "small")


@pytest.mark.soak
@pytest.mark.slow
def test_the_servers_memory_is_measured():
    assert [line.split()[0] for line in script("memory", "--model", "small", "--clients", 2, 3).splitlines()[1:]] == [
        "2",
        "3",
    ]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield load_module("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_the_gpus_benchmark_refuses_in_one_line_where_there_is_none(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["gpu.py", "--out", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit) as refused:
        gpu.main()
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: resources.device = cuda: a GPU is asked for, and torch cannot use it")
    assert error.count("\n") == 1
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.slow
def test_the_parts_of_the_gpus_benchmark_find_what_they_promise(gpu):
    small = {"device": "cpu", "model": "small"}
    same = list(gpu.bits(600, methods=("fedavg",), samples=16, **small))
    assert [(finding["deterministic"], finding["same"]) for finding in same] == [(False, True), (True, True)]
    assert all(finding["same_without_graphs"] for finding in same)
    steps = list(gpu.steps(600, methods=("fedavg",), samples=64, epochs=(1, 4), **small))
    assert [finding["graphs"] for finding in steps] == ["auto", "off"]
    assert all(isinstance(finding["ms"], float) for finding in steps)
    assert list(gpu.steps(-1, **small)) == []  # measurements that do not fit into the time are left out
    lines = gpu.table([{"part": "steps", **steps[0]}, {"part": "memory", "problem": "no time was left"}]).splitlines()
    assert lines[0].startswith("steps      method fedavg  graphs auto  ms ")
    assert lines[1] == "memory     problem no time was left"


@pytest.mark.slow
def test_single_functions_are_timed_as_they_are_on_a_gpu(gpu):
    rates = list(gpu.rates(600, "cpu", 32, 2))
    assert [finding.get("precision") for finding in rates] == ["float32", "tf32", "bfloat16", None]
    judged = list(gpu.judging(600, ("small",), "cpu", 20, (10, 20)))
    assert [(finding["images"], finding["batch"]) for finding in judged] == [(20, 10), (20, 20)]
    fitted = list(gpu.classifier(600, (4,), "cpu", 64))
    assert [finding["schedule"] for finding in fitted] == ["constant", "epoch"]
    assert next(gpu.synthesis(600, (4,), "cpu", 20, 10, 2))["seconds"] > 0


@pytest.mark.slow
def test_clients_are_timed_in_stacks_and_alone(gpu, monkeypatch):
    sizes = []
    train = ClientStack.train
    monkeypatch.setattr(ClientStack, "train", lambda self, *args: sizes.append(len(args[1])) or train(self, *args))
    (finding,) = gpu.stacks(600, (("small", 5, 10),), "cpu", 4, 1)
    assert sizes == [4, 4, 2, 4]
    assert min(finding["alone_ms"], finding["stacked_ms"]) > 0
    assert isinstance(finding["same_in_any_stack"], bool)


@pytest.mark.soak
@pytest.mark.slow
def test_client_actors_on_ray_give_the_bits_of_one_process(gpu, monkeypatch):
    module = importlib.import_module("gpu_sharing")

    @contextmanager
    def without_daemon(folder, served=True):
        yield os.environ.copy(), None if served else "not asked for"

    monkeypatch.setattr(module, "mps", without_daemon)
    few = (
        "model=small",
        "data.clients=4",
        "data.partition=iid",
        "data.imbalance=1",
        "federation.rounds=2",
        "local.epochs=1",
    )
    monkeypatch.setattr(module, "until", lambda seconds, cases: cases[:2])
    local, actors, none = gpu.actors(300, ("local", "2"), few, 200, 0)
    assert [local["deterministic"], actors["deterministic"]] == [True, True]
    assert [local["processes"], actors["processes"]] == [0, 2]
    assert local["model"] == actors["model"]
    assert all(row["command_s"] > row["train_s"] > 0 for row in (local, actors))
    assert none == {"mps": "not started", "problem": "not asked for"}


@pytest.mark.slow
def test_what_a_part_found_is_kept_when_it_crashes_or_hangs(gpu):
    found = "print('{}', flush=True)"
    crashed = list(gpu.findings_of([sys.executable, "-c", f"{found}; raise ValueError('x')"], 60))
    assert crashed == [{}, {"problem": "ValueError: x"}]
    hung = list(gpu.findings_of([sys.executable, "-c", f"{found}; import time; time.sleep(60)"], 2))
    assert hung == [{}, {"problem": "not done after 2 s"}]


@pytest.mark.slow
def test_launches_of_a_step_are_those_that_are_recorded():
    spec = importlib.util.spec_from_file_location("launches", BENCHMARKS / "launches.py")
    assert spec is not None
    assert spec.loader is not None
    launches = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launches)
    kept = {row["step"]: row for row in json.loads((BENCHMARKS / "launches.json").read_text())["steps"]}
    assert list(kept) == [*launches.METHODS, "fit_classifier"]
    assert launches.classifier() == kept["fit_classifier"]
    assert launches.measured("mupfl", {}) == kept["mupfl"]
    assert all((row["replayed"], row["waits"]) == (2, 0) for row in kept.values())


@pytest.mark.slow
def test_a_round_of_each_protocol_is_measured(gpu):
    small = ("model=small", "local.epochs=1")
    found = list(gpu.rounds(300, ways=(("float32", "off"),), device="cpu", overrides=small, samples=1000))
    assert [finding["method"] for finding in found] == ["fedavg", "fedsm", "sfd"]
    assert all(finding["all_seconds"] > finding["seconds"] > 0 for finding in found)


@pytest.mark.parametrize("name", ["privacy_trade", "attackers", "inversion", "hostile_sums", "sum_lies", "server_work"])
def test_a_table_of_a_page_is_written_from_what_was_measured(monkeypatch, name):
    """`python benchmarks/NAME.py --page` writes the table."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    recorded, module = importlib.import_module("recorded"), importlib.import_module(name)
    page = getattr(module, "PAGE", recorded.PAGE).read_text()
    table = module.table(recorded.kept(name))
    assert recorded.filled(page, name, table) == page
    assert recorded.filled(page, name, "| other |") != page
    with pytest.raises(ValueError, match=f"0 places for the table of {name}, not one"):
        recorded.filled("nothing", name, table)


@pytest.mark.soak
@pytest.mark.slow
def test_scale_prints_a_line_for_each_number_of_clients():
    heads, row = script("scale", "--clients", 100, "--rounds", 12).splitlines()
    assert heads.split()[0] == "clients"
    clients, *figures, model = row.split()
    assert clients == "100"
    assert len(figures) == 12
    assert all(float(figure) > 0 for figure in figures)
    assert re.fullmatch("[0-9a-f]{8}", model)


@pytest.mark.slow
def test_trained_parts_prints_bytes_and_seconds_of_each_part():
    pytest.importorskip("timm")
    rows = json.loads(script("trained_parts", "--images", 32, "--turns", 1))
    sizes = [rows[part]["kib"] for part in ("classifier", "norm", "lora:8", "last:1", "last:2", "all")]
    assert sizes == [50, 379, 762, 1670, 4056, 13383]
    assert all(row["seconds"] > 0 for row in rows.values())


def test_scale_keeps_the_figures_of_each_number_of_clients(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    scale = load_module("scale")
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(scale.recorded, "HERE", tmp_path)
    arguments = argparse.Namespace(asked=100, method="fedavg", rounds=6, actors=2)
    for clients in (1000, 10000, 1000):
        scale.keep(scale.Row(clients, *[1.234] * 10, model="abc"), arguments)
    kept = scale.recorded.kept("scale")
    assert list(kept) == ["1000 clients, 100 asked, fedavg", "10000 clients, 100 asked, fedavg"]
    assert kept["10000 clients, 100 asked, fedavg"]["clients"] == 10000
    assert kept["10000 clients, 100 asked, fedavg"]["first_s"] == 1.23


def test_the_speed_table_of_the_page_is_that_of_the_record():
    table = load_module("peers/table")
    written = table.PAGE.read_text().partition(table.BEGIN)[2].partition(table.END)[0]
    assert written.strip("\n") == table.show(json.loads(table.RECORD.read_text()))


@pytest.mark.parametrize(
    ("system", "fleet", "stacked"),
    [("ray", "ray", "off"), ("local-stacked", "local", "auto"), ("processes", "processes", "off")],
)
def test_the_speed_table_runs_each_fleet_by_its_name(system, fleet, stacked, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(raylt, "run", lambda method, **options: asked.update(options))
    monkeypatch.setattr(sys, "argv", ["run_raylt.py", str(tmp_path), system])
    settings = {"model": "cnn", "rounds": 5, "per_round": 100, "clients": 1000, "batch": 5, "lr": 0.05}
    (tmp_path / "scale.json").write_text(json.dumps(settings))
    load_module("peers/run_raylt").main()
    assert asked["fleet"] == fleet
    assert asked["overrides"]["local.stacked"] == stacked


def test_the_speed_table_keeps_the_figures_of_systems_that_were_left_out():
    speed = load_module("speed")

    def scale(commit, value, systems, missing):
        figures = dict.fromkeys(systems, value)
        return {"commit": commit, "loss": figures, "turns": figures, "systems": figures, "missing": missing}

    earlier = scale("aaa", 1, ("bare", "flgo"), {"blazefl": "cannot be installed", "PFLlib": "no package"})
    missing = {"flgo": speed.LEFT_OUT, "flower": speed.LEFT_OUT, "PFLlib": "no package"}
    taken = scale("bbb", 2, ("bare", "blazefl"), missing)
    joined = speed.joined(earlier, taken)
    assert joined["systems"] == joined["loss"] == joined["turns"] == {"bare": 2, "blazefl": 2, "flgo": 1}
    assert joined["missing"] == {"flower": speed.LEFT_OUT, "PFLlib": "no package"}
    assert joined["commit"] == "aaa, bbb"
    assert speed.joined(None, taken) == taken


@pytest.mark.parametrize(("name", "shape"), [("resnet8", (32, 32, 3)), ("cnn", (28, 28, 1))])
def test_the_networks_of_the_speed_table_are_raylts(name, shape):
    ours, net = MODELS[name](10, shape), getattr(load_module("peers/workload"), name)(shape[2])
    net.load_state_dict(ours.state_dict())
    x = torch.randn(2, shape[2], *shape[:2], generator=torch.Generator().manual_seed(0))
    assert torch.equal(net(x), ours(x))


@pytest.mark.slow
def test_time_and_memory_of_a_command_are_those_of_all_its_processes(tmp_path):
    child = "import time; x = bytearray(50_000_000)\nwhile time.process_time() < 1: pass"
    command = (
        "import subprocess, sys; print('ROUND 1', flush=True); "
        f"subprocess.run([sys.executable, '-c', {child!r}]); print('ROUND 2', flush=True); "
        "print('ROUND 3', flush=True); print('ROUND 4', flush=True)"
    )
    program = (
        "import os, pathlib, sys; from peers.measure import measure; took = measure([sys.executable, '-c', "
        "sys.argv[1]], dict(os.environ), pathlib.Path(sys.argv[2]), 60); "
        "print(took.cpu, took.round_cpu, took.memory)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, tmp_path / "log"],
        capture_output=True,
        text=True,
        check=True,
        cwd=BENCHMARKS,
    )
    cpu, round_cpu, memory = map(float, done.stdout.split())
    assert cpu == pytest.approx(1, abs=0.5)
    assert round_cpu < 0.1  # the median, so a single slow round does not count
    assert memory > 50


def test_the_stand_in_learns_directions_of_texts_that_it_was_not_fitted_to():
    standin = load_module("standin_pretrained")
    generator = torch.Generator().manual_seed(0)
    text = F.normalize(torch.randn(30, 8, generator=generator) + 1, dim=1)
    y = torch.arange(3000) % 30
    mixing = torch.randn(8, 12, generator=generator)
    z = text[y] @ mixing + 0.05 * torch.randn(3000, 12, generator=generator) + 3
    known = y < 24
    head, r = standin.fit_and_scale(z[known], y[known], text[:24])
    assert r in standin.LENGTHS
    new = ~known
    logits = standin.teacher_logits(head, z[new], text[24:], r)
    assert (logits.argmax(1) == y[new] - 24).float().mean() > 0.8
    images = standin.image_vectors(head, z[new], text[24:], r)
    # what all images share is equally close to all texts
    shared = images @ text[24:].T - r * head(z[new]) @ text[24:].T
    assert torch.allclose(shared, shared[0, 0].expand(600, 6), atol=1e-5)
    assert torch.allclose(logits, 100 * F.normalize(images, dim=1) @ text[24:].T, atol=1e-3)


def test_the_stand_in_takes_some_images_of_each_class_and_halves_them():
    standin = load_module("standin_pretrained")
    y = np.array([0, 0, 0, 1, 2, 2])
    assert np.bincount(y[standin.some_of_each(y, 2)]).tolist() == [2, 1, 2]
    image = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1).repeat(3, axis=3)
    # means of 0, 1, 4, 5 and so on: 2.5, 4.5, 10.5, 12.5, rounded to even
    assert standin.shrink(image, 2)[0, :, :, 0].tolist() == [[2, 4], [10, 12]]


def test_cuts_names_cases_and_measures_the_same_bits_twice():
    cuts = load_module("cuts")
    assert set(json.loads(cuts.RECORD.read_text())) <= set(cuts.CASES)
    (first, bits), (second, again) = (cuts.fit(6, 3, 2) for _ in range(2))
    assert first > 0
    assert second > 0
    assert bits == again
    assert cuts.augmentation("crop_flip")[0] > 0
