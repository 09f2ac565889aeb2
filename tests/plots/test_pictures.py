import pytest
from PIL import Image
from small_runs import make_run

from raylt.errors import CheckpointError, ConfigError
from raylt.plots.features import draw_features

QUICK = ("method=sfd", "method.rf_dim=60", "method.m_min=80", "method.m_max=90", "method.synthesis_steps=2",
         "method.epochs=2")


@pytest.mark.slow
def test_picture_of_a_finished_run_is_written_into_its_folder_or_elsewhere(tmp_path):
    run = make_run(tmp_path, "one", *QUICK)
    path = draw_features(run)
    assert path == tmp_path / "one" / "features.png"
    with Image.open(path) as image:
        assert image.size == (1800, 960)
        assert len(image.convert("RGB").getcolors(1800 * 960) or []) > 50
    assert draw_features(run, tmp_path / "it.png").is_file()
    for place in ("absent/it.png", "it.abc"):
        with pytest.raises(ConfigError, match=r"--picture .*; give a \.png that can be written"):
            draw_features(run, tmp_path / place)


def test_runs_without_synthetic_features_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="fedavg left no synthetic features"):
        draw_features(make_run(tmp_path, "other", "method=fedavg"))
    unfinished = make_run(tmp_path, "unfinished", *QUICK)
    (unfinished.folder / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="not finished; continue it with raylt resume"):
        draw_features(unfinished)
