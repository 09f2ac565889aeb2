from pathlib import Path

import pytest
from PIL import Image

from raylt.config import load
from raylt.errors import CheckpointError
from raylt.plots.features import draw_features
from raylt.runs.runner import start


class Silent:
    def says(self, text): ...
    def starts(self, folder, config, reports): ...
    def steps(self, report): ...


def run(folder: Path, name: str, *settings: str) -> Path:
    config = load(None, ["federation.rounds=1", "local.epochs=1", "data.clients=3", *settings])
    return start(config, folder, name, "local", None, Silent())[1]


QUICK = ("method.rf_dim=60", "method.m_min=80", "method.m_max=90", "method.synthesis_steps=2", "method.epochs=2")


def test_picture_of_a_finished_run_is_written_into_its_folder(tmp_path):
    path = draw_features(run(tmp_path, "one", *QUICK))
    assert path == tmp_path / "one" / "features.png"
    with Image.open(path) as image:
        assert image.size == (1800, 960)
        assert len(image.convert("RGB").getcolors(1800 * 960) or []) > 50


def test_runs_without_synthetic_features_and_other_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a run folder"):
        draw_features(tmp_path)
    with pytest.raises(CheckpointError, match="fedavg left no synthetic features"):
        draw_features(run(tmp_path, "other", "method=fedavg"))
    unfinished = run(tmp_path, "unfinished", *QUICK)
    (unfinished / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="not finished; continue it with raylt resume"):
        draw_features(unfinished)
