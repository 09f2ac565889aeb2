"""The scripts of benchmarks/ in their smallest settings: that they run, and what they promise of their figures."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raylt
from raylt.config import load

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str, *arguments: object) -> str:
    """What a script prints."""
    done = subprocess.run([sys.executable, BENCHMARKS / f"{name}.py", *map(str, arguments)], capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def save_images(folder: Path, name: str, classes: int, side: int) -> list[Path]:
    """An image set whose classes differ in brightness, and random texts for them: their files."""
    rng, files = np.random.default_rng(0), [folder / f"{name}.npz", folder / f"{name}.npy"]
    y, test = np.arange(20 * classes) % classes, np.arange(10 * classes) % classes
    x, x_test = ((40 * labels[:, None, None, None] + rng.integers(0, 40, (len(labels), side, side, 3))).astype(np.uint8)
                 for labels in (y, test))
    np.savez(files[0], x_train=x, y_train=y, x_test=x_test, y_test=test,
             class_names=np.array([f"{name} {c}" for c in range(classes)]))
    np.save(files[1], rng.standard_normal((classes, 16)).astype(np.float32))
    return files


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Images, and the features that a stand-in gives for them which was fitted to other images."""
    folder = tmp_path_factory.mktemp("standin")
    other, (mine, texts) = save_images(folder, "other", 6, 16), save_images(folder, "mine", 4, 8)
    said = script("standin", *other, mine, texts, folder / "out.npz", "--model", "small", "--epochs", 2, "--batch", 32)
    assert "zero-shot accuracy on the test set of mine" in said
    return mine, folder / "out.npz"


@pytest.mark.slow
def test_a_stand_in_gives_unit_features_that_say_what_they_are(images):
    with np.load(images[1]) as out:
        assert out["image"].shape == (80, 16)
        assert np.allclose(np.linalg.norm(out["image"].astype(np.float32), axis=1), 1, atol=1e-3)
        assert str(out["about"]).startswith("stand-in for CLIP: small")


@pytest.mark.slow
def test_rows_of_fedsm_that_share_a_first_stage_are_what_whole_runs_give(images, tmp_path):
    source, teacher = images
    common = [f"data.source=npz:{source}", "data.imbalance=10", "data.partition=iid", "data.clients=4", "model=small",
              "federation.rounds=4", "federation.participation=0.5", "local.epochs=1", "local.batch=8", "local.lr=0.1",
              "method=fedsm", f"method.teacher=npz:{teacher}", "method.rounds=2", "method.size=8", "method.epochs=2"]
    both = raylt.run(load(None, common), out=tmp_path, name="both", fleet="local", quiet=True)
    for row in ("method.rounds=0", "method.partner=random", "method.softmax=0.05"):
        branched = raylt.branch(both, [row], tmp_path / f"branch {row}", fleet="local", quiet=True)
        whole = raylt.run(load(None, [*common, row]), out=tmp_path, name=row, fleet="local", quiet=True)
        for what in ("accuracy", "groups", "by_client", "figures"):
            assert branched.reports[-1][what] == whole.reports[-1][what]
        assert branched.summary["model_sha256"] == whole.summary["model_sha256"]


@pytest.mark.slow
def test_a_run_gives_the_weights_of_the_bare_loop():
    assert "same weights, bit for bit: yes" in script("overhead", "--rounds", 2, "--model", "small")


@pytest.mark.slow
def test_the_servers_memory_is_measured():
    assert [line.split()[0] for line in script("memory", "--model", "small", "--clients", 2, 3).splitlines()[1:]] == [
        "2", "3"]
