"""Names with dollar signs are drawn literally, although matplotlib reads text between two of them as a formula."""

import numpy as np
import pytest
from small_runs import make_run

from raylt import Run
from raylt.plots.classes import confusion_of, draw_classes, draw_confusion
from raylt.plots.client_groups import draw_clusters
from raylt.plots.data import draw_data
from raylt.plots.features import draw_encoders, draw_features
from raylt.plots.predictions import draw_predictions

NAMES = [r"$\nothing$", r"from $\frac$ to $\nothing$", "5$", "ten"]  # no valid formulas: matplotlib would refuse them
SFD = (
    "method=sfd",
    "method.rf_dim=60",
    "method.m_min=80",
    "method.m_max=90",
    "method.synthesis_steps=2",
    "method.retrain_epochs=2",
)
MUPFL = ("method=mupfl", "method.m=5", "method.tau=2", "method.matching_steps=2", "federation.rounds=3")
MAPS = ("method=fedavg", "model=lraspp", "data.partition=iid")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, str]:
    """Save images with single labels and with label maps, whose classes have these names; return the settings."""
    folder, draws = tmp_path_factory.mktemp("named"), np.random.default_rng(0)
    y, maps = np.arange(80) % 4, draws.integers(4, size=(12, 16, 16), dtype=np.uint8)
    x = (60 * y[:, None, None, None] + draws.integers(40, size=(80, 8, 8, 1))).astype(np.uint8)
    scenes = draws.integers(256, size=(12, 16, 16, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", x_train=x, y_train=y, x_test=x, y_test=y, class_names=NAMES)
    np.savez(folder / "maps.npz", x_train=scenes, y_train=maps, x_test=scenes, y_test=maps, class_names=NAMES)
    return {kind: f"data.source=npz:{folder}/{kind}.npz" for kind in ("images", "maps")}


def run_of(folder, source: str, *settings: str) -> Run:
    return make_run(folder, "named", source, "data.imbalance=1", *settings)


@pytest.mark.slow
def test_pictures_of_features_and_data(tmp_path, sources):
    run = run_of(tmp_path, sources["images"], "model=small", *SFD)
    draw_features(run, tmp_path / "features.png")
    draw_encoders([run], tmp_path / "encoders.png")
    draw_data(run.task, str(tmp_path / "data.png"))
    assert (tmp_path / "data.png").is_file()
    draw_confusion(confusion_of(run), tmp_path / "confusion.png")
    draw_classes(confusion_of(run), tmp_path / "classes.png")
    assert all((tmp_path / name).is_file() for name in ("confusion.png", "classes.png"))


@pytest.mark.slow
def test_picture_of_clusters(tmp_path, sources):
    draw_clusters(run_of(tmp_path, sources["images"], "model=small", *MUPFL), path=tmp_path / "clusters.png")


@pytest.mark.slow
def test_picture_of_label_maps(tmp_path, sources):
    draw_predictions(run_of(tmp_path, sources["maps"], *MAPS), path=tmp_path / "predictions.png")
