import shutil

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from small_runs import make_run

from raylt import Run
from raylt.errors import CheckpointError
from raylt.plots.client_groups import draw_clusters, read_client_groups

MUPFL = [
    "method=mupfl",
    "method.m=5",
    "method.tau=2",
    "method.matching_steps=2",
    "federation.rounds=7",
    "data.clients=6",
    "federation.participation=0.7",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Run:
    return make_run(tmp_path_factory.mktemp("clusters"), "one", *MUPFL)


@pytest.mark.slow
def test_picture_is_a_figure_that_is_also_written(finished, tmp_path):
    path = tmp_path / "clusters.png"
    assert draw_clusters(finished, path=path)._repr_png_().startswith(b"\x89PNG")
    with Image.open(path) as image:
        assert image.size == (1950, 990)
        assert len(image.convert("RGB").getcolors(1950 * 990) or []) > 50


@pytest.mark.parametrize("round", [None, 3, 6])
def test_what_is_drawn_is_what_the_run_recorded(finished, round):
    groups = read_client_groups(finished, round)
    line = finished.reports[(round or 7) - 1]
    figures = line["figures"]
    assert groups.round == line["step"] == (round or 7)
    assert (groups.ids, groups.labels) == (line["participants"], figures["clusters"])
    assert len(groups.ids) == 5
    assert np.array_equal(groups.counts, finished.task.client_counts[groups.ids])
    assert list(groups.kappas) == [1, 2, 3, 4, 5, 6, 7]
    assert groups.kappas[groups.round] == figures["kappa"] == len(set(groups.labels))
    assert groups.silhouette == figures["silhouettes"][str(figures["kappa"])]
    # principal components are centred, uncorrelated and sorted by variance
    assert np.allclose(groups.points.mean(0), 0, atol=1e-9)
    covariance = np.cov(groups.points.T)
    assert abs(covariance[0, 1]) < 1e-9
    assert covariance[0, 0] >= covariance[1, 1] > 0


def test_unfinished_runs_can_be_drawn(finished, tmp_path):
    copy = tmp_path / "unfinished"
    shutil.copytree(finished.folder, copy)
    (copy / "summary.json").unlink()
    assert draw_clusters(Run.open(copy)).axes


def test_other_methods_and_rounds_are_refused(finished, tmp_path):
    with refused("checkpoint.not-kept", CheckpointError, round=2, rounds=[3, 4, 5, 6, 7]):
        draw_clusters(finished, 2)
    plain = make_run(tmp_path, "plain", "method=fedavg", "federation.rounds=1")
    with refused("run.wrong-kind", CheckpointError, method="fedavg"):
        draw_clusters(plain)


def test_participants_of_a_single_cluster_can_be_drawn(tmp_path):
    run = make_run(tmp_path, "two", *MUPFL, "federation.participation=0.3", "federation.rounds=1")
    groups = read_client_groups(run)
    assert groups.labels == [0, 0]
    assert groups.silhouette is None
    draw_clusters(run)
