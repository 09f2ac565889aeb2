import pytest
import torch
from PIL import Image
from refusals import refused
from small_runs import make_run

from raylt.errors import CheckpointError, ConfigError
from raylt.plots.features import draw_encoders, draw_features, spread
from raylt.plots.style import new_figure, save

QUICK = (
    "method=sfd",
    "method.rf_dim=60",
    "method.m_min=80",
    "method.m_max=90",
    "method.synthesis_steps=2",
    "method.retrain_epochs=2",
)


@pytest.mark.slow
def test_picture_of_a_finished_run_is_a_figure_that_is_also_written(tmp_path):
    run = make_run(tmp_path, "one", *QUICK)
    path = tmp_path / "it.png"
    assert draw_features(run, path)._repr_png_().startswith(b"\x89PNG")
    with Image.open(path) as image:
        assert image.size == (1800, 960)
        assert len(image.convert("RGB").getcolors(1800 * 960) or []) > 50
    for place in ("absent/it.png", "it.abc"):
        with refused("file.unwritable", ConfigError, key="--picture", path=str(tmp_path / place)):
            draw_features(run, tmp_path / place)


@pytest.mark.parametrize(
    ("place", "reason"),
    [(".", "it is a folder"), ("absent/it.png", "No such file or directory"), ("..", "it is a folder")],
)
def test_a_picture_that_cannot_be_written_has_one_reason_and_one_remedy(tmp_path, monkeypatch, place, reason):
    monkeypatch.chdir(tmp_path)
    with refused("file.unwritable", ConfigError, path=place) as caught:
        save(new_figure(2, 2), place)
    assert str(caught.value).endswith(
        f"{place} cannot be written ({reason}). Give a .png, .pdf or .svg in a folder that can be written to."
    )


def test_runs_without_synthetic_features_are_refused(tmp_path):
    with refused("run.wrong-kind", CheckpointError, method="fedavg"):
        draw_features(make_run(tmp_path, "other", "method=fedavg"))
    unfinished = make_run(tmp_path, "unfinished", *QUICK)
    (unfinished.folder / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"raylt\.resume"):
        draw_features(unfinished)


def test_classes_that_are_shown_are_spread_with_both_ends():
    assert spread(list(range(100)), 10) == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99]
    assert spread([7, 3, 5], 10) == [7, 3, 5]
    assert spread([4], 10) == [4]


@pytest.mark.slow
def test_encoders_of_several_runs_are_drawn_in_one_map(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("raylt.plots.features.SHOWN_CLASSES", 3)
    monkeypatch.setattr("raylt.plots.features.SHOWN_FEATURES", 12)
    monkeypatch.setattr(
        "raylt.plots.features._map", lambda parts: drawn.append(parts) or [part[:, :2].numpy() for part in parts]
    )
    runs = [make_run(tmp_path, name, f"method={name}") for name in ("fedavg", "fedprox")]
    path = tmp_path / "both.png"
    draw_encoders(runs, path)
    with Image.open(path) as image:
        assert image.size == (1800, 960)
    (parts,) = drawn  # both runs share one fit
    # sorted from the most frequent class to the rarest
    assert [len(part) for part in parts] == 2 * [12, 12, runs[0].task.counts[9]]
    for own in (parts[:3], parts[3:]):
        assert torch.cat(own).norm(dim=1).mean().item() == pytest.approx(1)
    assert not torch.equal(parts[0], parts[3])


@pytest.mark.slow
def test_encoders_of_other_splits_and_unfinished_runs_are_refused(tmp_path):
    run, other = (make_run(tmp_path, f"run{seed}", "method=fedavg", f"data.seed={seed}") for seed in (0, 1))
    with refused("run.other-split", CheckpointError, path=str(other.folder)):
        draw_encoders([run, other], tmp_path / "x.png")
    (other.folder / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"raylt\.resume"):
        draw_encoders([run, other], tmp_path / "x.png")
