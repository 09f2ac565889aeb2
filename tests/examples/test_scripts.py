"""The scripts of examples/ run unchanged."""

import runpy
from pathlib import Path

import pandas
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Return a function that runs a script in an empty folder and returns its variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    return lambda name: runpy.run_path(str(EXAMPLES / name))


def test_first_comparison_finds_ccvr_above_fedavg_in_the_few_shot_classes(run_script, tmp_path):
    scope = run_script("first_comparison.py")
    difference = scope["difference"]
    assert isinstance(difference, pandas.DataFrame)
    assert list(difference.index) == list(scope["SEEDS"])
    assert (difference["ccvr"] > 0.2).all()
    assert (tmp_path / "comparison/clients.png").stat().st_size > 1000


def test_own_images_end_in_a_model_that_names_a_photo(run_script, tmp_path, capsys):
    scope = run_script("own_images.py")
    assert scope["prediction"].names[0] in scope["model"].class_names
    assert (tmp_path / "runs/shops/data.png").stat().st_size > 1000
    assert "Köln Süd" in capsys.readouterr().out


def test_own_method_without_its_term_is_fedavg(run_script, capsys):
    run_script("own_method.py")
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("the model of FedAvg: True") for line in lines] == [True, False, False]
