import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raylt.config import load
from raylt.data.task import build_task
from raylt.errors import CheckpointError
from raylt.plots.clusters import draw_clusters, read_clusters
from raylt.runs.runner import start

SETTINGS = ["federation.rounds=7", "local.epochs=1", "data.clients=6", "federation.participation=0.7"]
MUPFL = ["method=mupfl", "method.m=5", "method.tau=2", "method.matching_steps=2"]


class Silent:
    def says(self, text): ...
    def starts(self, folder, config, reports): ...
    def steps(self, report): ...


def run(folder: Path, name: str, *settings: str) -> Path:
    return start(load(None, [*SETTINGS, *settings]), folder, name, "local", None, Silent())[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("clusters"), "one", *MUPFL)


def test_picture_is_written_into_the_folder(finished):
    path = draw_clusters(finished)
    assert path == finished / "clusters.png"
    with Image.open(path) as image:
        assert image.size == (1950, 990)
        assert len(image.convert("RGB").getcolors(1950 * 990) or []) > 50


@pytest.mark.parametrize("round", [None, 3, 6])
def test_what_is_drawn_is_what_the_run_recorded(finished, round):
    found = read_clusters(finished, round)
    line = json.loads((finished / "metrics.jsonl").read_text().splitlines()[(round or 7) - 1])
    figures = line["figures"]
    assert found.round == line["step"] == (round or 7)
    assert (found.ids, found.labels) == (line["participants"], figures["clusters"])
    assert len(found.ids) == 5
    task = build_task(load(finished / "config.yaml").data.model_copy(update={"split": str(finished / "split.json")}))
    assert np.array_equal(found.counts, task.client_counts[found.ids])
    assert list(found.kappas) == [1, 2, 3, 4, 5, 6, 7]
    assert found.kappas[found.round] == figures["kappa"] == len(set(found.labels))
    assert found.silhouette == figures["silhouettes"][str(figures["kappa"])]
    # principal components: centred, uncorrelated, the larger variance first
    assert np.allclose(found.points.mean(0), 0, atol=1e-9)
    covariance = np.cov(found.points.T)
    assert abs(covariance[0, 1]) < 1e-9
    assert covariance[0, 0] >= covariance[1, 1] > 0


def test_unfinished_runs_can_be_drawn(finished, tmp_path):
    copy = tmp_path / "unfinished"
    shutil.copytree(finished, copy)
    (copy / "summary.json").unlink()
    assert draw_clusters(copy).exists()


def test_other_folders_and_rounds_are_refused(finished, tmp_path):
    with pytest.raises(CheckpointError, match="not a run folder"):
        draw_clusters(tmp_path)
    with pytest.raises(CheckpointError, match=r"kept of rounds 3, 4, 5, 6, 7, not of 2; give one of them with --round"):
        draw_clusters(finished, 2)
    plain = run(tmp_path, "plain", "method=fedavg", "federation.rounds=1")
    with pytest.raises(CheckpointError, match="fedavg left no clusters; give a run of mupfl"):
        draw_clusters(plain)


def test_participants_of_a_single_cluster_can_be_drawn(tmp_path):
    folder = run(tmp_path, "two", *MUPFL, "federation.participation=0.3", "federation.rounds=1")
    found = read_clusters(folder)
    assert found.labels == [0, 0]
    assert found.silhouette is None
    draw_clusters(folder)
