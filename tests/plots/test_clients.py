import math
import shutil
import warnings
from pathlib import Path

import pytest
from PIL import Image
from refusals import refused
from small_runs import make_run

from raylt import Run
from raylt.errors import CheckpointError, ConfigError
from raylt.plots.clients import ClientComparison, compare_clients, draw_clients

SETTINGS = "federation.rounds=2", "data.clients=4", "data.alpha=0.2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    settings = {name: f"method={name}" for name in ("fedper", "fedavg", "bpfed")}
    made = {name: make_run(folder, name, *SETTINGS, method) for name, method in settings.items()}
    return made | {"other": make_run(folder, "other", *SETTINGS, "method=fedavg", "data.seed=1")}


def copied(run: Run, place: Path) -> Run:
    return Run.open(shutil.copytree(run.folder, place))


def test_figures_of_every_client_are_kept_at_the_end_and_average_to_the_mean(runs):
    for name in ("fedper", "fedavg", "bpfed"):
        reports = runs[name].reports
        assert [r["step"] for r in reports if r["by_client"]] == ([2, 3] if name == "bpfed" else [2])
        for kind, values in reports[-1]["by_client"].items():
            assert len(values) == 4
            assert sum(values) / 4 == pytest.approx(reports[-1]["clients"][kind]["mean"])


@pytest.mark.parametrize("metric", ["owned", "matched", "long_tailed", "global"])
def test_runs_over_the_same_split_stand_side_by_side(runs, metric):
    comparison = compare_clients([runs["fedper"], str(runs["bpfed"].folder)], metric)
    assert list(comparison.runs) == ["fedper", "bpfed"]
    split = runs["fedper"].split
    assert comparison.sizes == [len(rows) for rows in split.clients]
    assert comparison.split_sha256 == split.sha256
    for name, values in comparison.runs.items():
        last = runs[name].reports[-1]
        assert values == last["by_client"][metric]
        assert comparison.spread()[name]["mean"] == pytest.approx(last["clients"][metric]["mean"])
        assert comparison.spread()[name]["worst_decile"] == pytest.approx(min(values))


def test_spread_by_hand_leaves_out_clients_that_are_not_judged():
    comparison = ClientComparison("owned", "0", [3, 0, 5], {"one": [0.5, None, 1.0]}, [3, 0, 4])
    assert comparison.spread() == {"one": {"mean": 0.75, "deviation": 0.25, "worst_decile": 0.5}}


def test_sizes_are_those_of_the_samples_that_clients_trained_on(tmp_path):
    run = make_run(tmp_path, "held", *SETTINGS, "method=fedavg", "data.validation=0.3")
    assert compare_clients([run]).sizes == [len(shard) for shard in run.task.shards]


def test_a_client_that_is_not_judged_has_no_bar():
    bars = draw_clients(ClientComparison("owned", "", [1, 2], {"run": [None, 0.5]}, [1, 1])).axes[0].patches
    assert math.isnan(bars[0].get_height())
    assert bars[1].get_height() == 50


def test_mean_is_also_shown_without_the_clients_of_at_most_two_classes():
    runs = {"one": [0.5, 0.1, None, 1.0], "two": [0.2, 0.9, 0.3, 0.4]}
    comparison = ClientComparison("owned", "0", [3, 4, 5, 6], runs, [3, 2, 1, 4])
    assert comparison.spread()["one"]["mean_of_more_than_two_classes"] == pytest.approx(0.75)
    assert comparison.spread()["two"]["mean_of_more_than_two_classes"] == pytest.approx(0.3)
    assert comparison.table().row_count == 4 + 4
    every = ClientComparison("owned", "0", [3, 4], {"one": [0.5, 0.1]}, [3, 3])
    assert "mean_of_more_than_two_classes" not in every.spread()["one"]


def test_owned_classes_are_those_of_the_runs_split(runs):
    comparison = compare_clients([runs["fedper"]], "owned")
    assert comparison.owned == [int((row > 0).sum()) for row in runs["fedper"].task.client_counts]


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "names"), [(1, 1), (20, 5), (100, 3)])
def test_picture_shows_a_group_of_bars_per_client(tmp_path, clients, names):
    runs = {f"run {i}": [0.2 + 0.1 * i if k else None for k in range(clients)] or [0.5] for i in range(names)}
    if clients == 1:
        runs = {"run": [0.5]}
    draw_clients(ClientComparison("owned", "0", [7] * clients, runs, [3] * clients), tmp_path / "clients.png")
    with Image.open(tmp_path / "clients.png") as image:
        assert image.width <= 6000
        assert len(image.convert("RGB").getcolors(image.width * image.height) or []) > 20


def test_other_splits_and_runs_that_cannot_be_used_are_refused(runs, tmp_path):
    for empty in ([], str(runs["fedper"].folder)):
        with refused("config.wrong-type", ConfigError, key="runs"):
            compare_clients(empty, "owned")
    with refused("run.other-split", CheckpointError, path=str(runs["other"].folder)):
        compare_clients([runs["fedper"], runs["other"]], "owned")
    unfinished = copied(runs["fedper"], tmp_path / "unfinished")
    (unfinished.folder / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"raylt\.resume"):
        compare_clients([unfinished], "owned")
    edited = copied(runs["fedper"], tmp_path / "edited")
    lines = edited.folder / "metrics.jsonl"
    lines.write_text(lines.read_text().replace('"by_client": {"owned": [', '"by_client": {"owned": [1.0, '))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        compare_clients([edited], "owned")


def test_runs_of_one_name_are_distinguished_by_their_folders(runs, tmp_path):
    again = copied(runs["fedper"], tmp_path / "fedper")
    assert list(compare_clients([runs["fedper"], again], "owned").runs) == [
        str(runs["fedper"].folder),
        str(again.folder),
    ]
    assert len(compare_clients([again, again], "owned").runs) == 1


def test_clients_have_their_names_where_the_data_name_them():
    named = ClientComparison("owned", "0", [3, 4], {"one": [0.5, 0.1]}, [3, 3], ("[wien]", "linz"))
    assert list(named.table().columns[0].cells)[:2] == ["[wien]", "linz"]
    assert ClientComparison("owned", "0", [3, 4], {"one": [0.5, 0.1]}, [3, 3]).names == ("0", "1")


@pytest.mark.parametrize("names", [("a", "b", "x" * 60 + "y"), tuple(f"{'x' * 59}{k}y" for k in range(20))])
def test_long_names_of_clients_leave_room_for_the_bars(tmp_path, names):
    n = len(names)
    comparison = ClientComparison("owned", "0", [7] * n, {"one": [0.5] * n}, [3] * n, names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = draw_clients(comparison, tmp_path / "clients.png")
    ax = figure.axes[0]
    assert ax.get_position().height > 0.3
    height = figure.get_window_extent().height
    for label in ax.get_xticklabels():
        assert label.get_text().count("…") == (len(label.get_text()) > 10)
        assert 0 <= label.get_window_extent().y0 < height
    assert "xy" in ax.get_xticklabels()[-1].get_text() or "9y" in ax.get_xticklabels()[-1].get_text()
