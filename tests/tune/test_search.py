"""Whole searches on the digits, in this process and on Ray."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image
from refusals import refused

import raylt
from actors.capacity import Need
from raylt.config import load
from raylt.config.sections import LAST_SEED
from raylt.errors import CheckpointError, ConfigError, DiskFull, RayltError
from raylt.hyper import Uniform
from raylt.runs.callbacks.base import Callback
from raylt.store import Folder
from tune import resume, search, space, spaces_of
from tune.checks import check_trials
from tune.loop import SearchLoop
from tune.placement import bundles_of, check_fit, fitting, most_on_gpu, place_trial
from tune.plan import SearchPlan
from tune.records import PLAN, Score
from tune.report.results import csv_table
from tune.verify import verify_search

SETTINGS = ["method=fedprox", "data.clients=4", "data.imbalance=5", "federation.rounds=6", "local.epochs=1"]
RANGES = {"local.lr": "loguniform(0.01, 0.3)"}


def config_of(*settings):
    return load(None, [*SETTINGS, *settings])


def small_search(out, *settings, name="s", samples=8, **changes):
    config = config_of(*settings)
    return search(
        config, space(config, RANGES), samples, out=out, name=name, **{"fleet": "local", "parallel": 2, **changes}
    )


def results(result):
    return [(r.id, r.values, r.outcome) for r in result.trials]


@pytest.mark.parametrize(
    ("changes", "code", "key"),
    [
        ({"scheduler": "none", "grace": 2}, "config.conflict", "--grace"),
        ({"grace": 4}, "search.no-rungs", "--grace"),
        ({"settings": ["federation.rounds=2"]}, "search.no-rungs", "--scheduler"),
        ({"settings": ["federation.rounds=1"], "grace": 1}, "search.no-rungs", "--scheduler"),
    ],
)
def test_a_first_comparison_that_never_comes_is_refused(tmp_path, changes, code, key):
    settings = changes.pop("settings", [])
    with refused(code, ConfigError, key=key):
        small_search(tmp_path, *settings, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheduler", ["asha", "none"])
def test_a_patience_of_the_settings_is_refused_without_a_remedy_that_fails(tmp_path, scheduler):
    with refused("search.not-searchable", ConfigError, key="federation.patience", value=2) as caught:
        small_search(tmp_path, "federation.patience=2", scheduler=scheduler)
    assert "scheduler=" not in str(caught.value)


@pytest.mark.slow
def test_a_search_whose_trials_all_failed_can_be_continued_as_its_error_says(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("tune.trial.Trial.__init__", fail)
        with refused("search.no-result", RayltError, trials=2) as caught:
            small_search(tmp_path, "federation.rounds=1", samples=2, scheduler="none", retries=0)
    assert f"tune.resume({str(tmp_path / 's')!r})" in str(caught.value)
    assert len(resume(tmp_path / "s", fleet="local").trials) == 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return small_search(tmp_path_factory.mktemp("undisturbed"))


def figures(folder):
    """Return the summary of a run without its times, its provenance and a trial's validation figures."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["figures"].pop("validation", None)
    return {
        key: value
        for key, value in summary.items()
        if "seconds" not in key and key not in ("date", "made", "provenance", "line", "sha256")
    }


@pytest.mark.slow
def test_the_best_configuration_gives_the_trials_figures_to_the_bit(undisturbed, tmp_path):
    best = load(undisturbed.folder / "best.yaml")
    assert best == undisturbed.config
    folder = raylt.run(best, out=tmp_path, name="again", fleet="local", quiet=True).folder
    assert figures(folder) == figures(undisturbed.folder / "trials" / undisturbed.best.id)
    assert undisturbed.best.deciding_score.test["accuracy"] == figures(folder)["accuracy"]["last"]


@pytest.mark.slow
def test_a_search_leaves_its_tables_and_a_picture(undisturbed):
    folder = undisturbed.folder
    with (folder / "trials.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["trial"] for row in rows] == [r.id for r in undisturbed.trials]
    assert {row["state"] for row in rows} == {"done", "stopped"}
    assert [row["trial"] for row in json.loads((folder / "trials.json").read_text())] == [r["trial"] for r in rows]
    assert (folder / "search.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "trials" / undisturbed.best.id).glob("events.*"))
    assert yaml.safe_load((folder / "best.yaml").read_text())["method"]["name"] == "fedprox"
    assert not list(folder.glob("trials/*/checkpoints"))


@pytest.mark.slow
def test_test_figures_decide_nothing(undisturbed, monkeypatch, tmp_path):
    from tune import records

    monkeypatch.setattr(records, "_test_figures", lambda report: {"accuracy": 0.0})
    assert results(small_search(tmp_path)) == results(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 14])
def test_a_resumed_search_equals_an_undisturbed_one_and_runs_no_finished_trial_again(
    undisturbed, tmp_path, after, monkeypatch
):
    add_scores = SearchLoop.add_scores
    count = [0]

    def interrupt(self, id, scores):
        count[0] += 1
        if count[0] > after:
            raise KeyboardInterrupt
        return add_scores(self, id, scores)

    with monkeypatch.context() as patch:
        patch.setattr(SearchLoop, "add_scores", interrupt)
        with pytest.raises(KeyboardInterrupt):
            small_search(tmp_path)
    with (tmp_path / "s/trials.jsonl").open("a") as stream:
        stream.write('{"trial": "fedprox-00')  # a line that a kill has cut off
    ended = {json.loads(line)["trial"] for line in (tmp_path / "s/trials.jsonl").read_text().splitlines()[:-1]}
    before = {id: os.stat(tmp_path / "s/trials" / id / "metrics.jsonl").st_mtime_ns for id in ended}
    result = resume(tmp_path / "s", fleet="local")
    assert results(result) == results(undisturbed)
    assert before == {id: os.stat(tmp_path / "s/trials" / id / "metrics.jsonl").st_mtime_ns for id in ended}
    assert (tmp_path / "s/best.yaml").read_text().splitlines()[4:] == (
        undisturbed.folder / "best.yaml"
    ).read_text().splitlines()[4:]


@pytest.mark.slow
def test_a_failed_trial_is_shown_and_run_again_on_resume(tmp_path, monkeypatch):
    from raylt.methods.fedprox import FedProx

    with monkeypatch.context() as patch:
        whole = FedProx.train

        def train(self, client, message):
            if self.mu < 0.02:
                raise ValueError("too small")
            return whole(self, client, message)

        patch.setattr(FedProx, "train", train)
        result = small_search(tmp_path, samples=6, retries=0)
    failed = [r for r in result.trials if r.failed]
    assert failed
    assert all("too small" in r.failed for r in failed)
    assert result.best not in failed
    again = resume(tmp_path / "s", fleet="local")
    assert not any(r.failed for r in again.trials)


@pytest.mark.slow
def test_a_search_on_two_splits_ranks_by_the_worse_and_fails_where_one_fails(tmp_path, monkeypatch):
    from raylt.methods.fedprox import FedProx

    whole = FedProx.train

    def train(self, client, message):
        if self.mu < 0.02 and client.config.data.seed == 1:
            raise ValueError("diverged")
        return whole(self, client, message)

    monkeypatch.setattr(FedProx, "train", train)
    changes = {"samples": 4, "retries": 0, "scheduler": "none", "searcher": "random"}
    result = small_search(tmp_path, "federation.rounds=2", splits=2, **changes)
    alone = small_search(tmp_path, "federation.rounds=2", name="alone", **changes)
    failed = [r.id for r in result.trials if r.failed]
    assert failed == [r.id for r in result.trials if r.values["method.mu"] < 0.02]
    assert 0 < len(failed) < 4
    for both, first in zip(result.trials, alone.trials, strict=True):
        assert both.values == first.values
        if both.id not in failed:
            assert both.outcome.score <= first.outcome.score
            assert both.spent == 2 * first.spent
    best = (tmp_path / "s/best.yaml").read_text()
    assert f"the worst of 2 splits, with data.seed={result.best.deciding_score.split}." in best
    findings = {finding.what: finding.whole for finding in verify_search(tmp_path / "s")}
    assert all(findings.values())
    assert f"trials/{result.best.id}-split-1" in findings
    again = resume(tmp_path / "s", fleet="local")
    assert [r.outcome for r in again.trials] == [r.outcome for r in result.trials]


@pytest.mark.parametrize(
    ("settings", "splits", "code", "key"),
    [
        ([f"data.seed={LAST_SEED}"], 2, "config.out-of-range", "data.seed"),
        ([], 21, "config.wrong-type", "splits"),
    ],
)
def test_splits_without_a_seed_are_refused(tmp_path, settings, splits, code, key):
    with refused(code, ConfigError, key=key):
        small_search(tmp_path, *settings, splits=splits)


@pytest.mark.slow
def test_several_methods_spend_the_same_budget(tmp_path):
    config = config_of()
    spaces = spaces_of(["fedavg", "fedprox"], {"local.lr": space(config, RANGES)["local.lr"]}, config)
    result = search(config, spaces, budget=700, searcher="random", out=tmp_path, name="s", fleet="local")
    for method in spaces:
        trials = [r for r in result.trials if r.method == method]
        assert 700 - trials[0].cost < sum(r.spent for r in trials) <= 700


def test_a_stopped_trial_is_told_to_stop_and_each_trial_has_one_line(tmp_path):
    class Ended(Callback):
        def on_trial_end(self, trial, best, ended):
            ends.append((trial.trial, trial.state, None if best is None else best.trial, ended))

    ends = []
    config = config_of("federation.rounds=9")
    plan = SearchPlan(config, {"fedprox": space(config, RANGES)}, 3, searcher="random")
    (tmp_path / "search.json").write_text(json.dumps(plan.to_json()))
    loop = SearchLoop(tmp_path, plan, Ended())
    first, second, third = (loop.next().id for _ in range(3))
    assert loop.add_scores(first, [Score(1, "round", 0.5, 0, {}, {})])
    assert not loop.add_scores(second, [Score(1, "round", 0.4, 0, {}, {})])
    loop.close_trial(third, "out of memory")
    for id in (second, first, first):  # the one that runs the trials may say it twice
        loop.add_scores(first, [Score(3, "round", 0.5, 0, {}, {}), Score(9, "final", 0.6, 0, {}, {})])
        loop.close_trial(id, None)
    assert ends == [(third, "failed", None, 1), (second, "stopped", first, 2), (first, "done", first, 3)]
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [line["trial"] for line in lines] == [third, second, first]


class _Reports(Callback):
    def __init__(self):
        self.trials = []

    def on_trial_end(self, trial, best, ended):
        self.trials.append(trial)


@pytest.mark.slow
def test_a_search_by_several_metrics_shows_all_and_its_first_metric_decides(undisturbed, tmp_path):
    several = ["accuracy", "many", "worst_decile"]
    reports = _Reports()
    result = small_search(tmp_path, metric=several, callbacks=[reports])
    assert results(result) == results(undisturbed)
    assert {tuple(trial.other_scores) for trial in reports.trials if trial.score is not None} == {tuple(several[1:])}
    with (result.folder / "trials.csv").open() as stream:
        front = [row["trial"] for row in csv.DictReader(stream) if row["front"] == "True"]
    assert set(front) == {record.id for record in result.front}
    assert result.front[0] is result.best
    assert (result.folder / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "By the search's other metrics: many" in (result.folder / "best.yaml").read_text()
    assert all(finding.whole for finding in verify_search(result.folder))
    assert resume(result.folder, fleet="local").front[0].id == result.best.id
    assert undisturbed.front == [undisturbed.best]
    assert not (undisturbed.folder / "pareto.png").exists()


@pytest.mark.slow
def test_a_full_disk_names_the_search_and_the_call_that_continues_it(tmp_path, monkeypatch):
    def full(_):
        raise DiskFull(tmp_path / "s" / "trials.jsonl")

    monkeypatch.setattr(SearchLoop, "next", full)
    with refused("disk.full", DiskFull, path=str(tmp_path / "s")) as caught:
        small_search(tmp_path)
    assert f"tune.resume({str(tmp_path / 's')!r})" in str(caught.value)


@pytest.mark.slow
def test_a_search_folder_is_not_used_twice(undisturbed):
    with refused("search.exists", CheckpointError, path=str(undisturbed.folder)):
        small_search(undisturbed.folder.parent)
    with refused("search.not-found", CheckpointError, path=str(undisturbed.folder.parent)):
        resume(undisturbed.folder.parent)


@pytest.mark.parametrize("ended", [False, True])
def test_a_search_that_took_the_folder_while_another_started_is_left_alone(tmp_path, monkeypatch, ended):
    module = sys.modules["tune.search"]
    open_cluster = module._open_cluster
    folder = tmp_path / "s"
    locks = []

    def start_the_first(fleet, address):
        folder.mkdir()
        with Folder.open(folder) as search_folder:
            search_folder.write(PLAN, "the first search")
            lock = search_folder.lock(".lock")
        if ended:
            os.close(lock)
        else:
            locks.append(lock)
        return open_cluster(fleet, address)

    monkeypatch.setattr(module, "_open_cluster", start_the_first)
    with refused("search.exists" if ended else "search.busy", CheckpointError, path=str(folder)):
        small_search(tmp_path, "federation.rounds=1", samples=1, scheduler="none")
    assert (folder / PLAN).read_text() == "the first search"
    for lock in locks:
        os.close(lock)


@pytest.mark.slow
def test_a_search_reads_a_folder_again_whose_inner_files_have_changed(tmp_path):
    def add_images(first, last):
        for number in range(first, last):
            file = tmp_path / f"images/{number % 2}/{number:03d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), number).save(file)

    settings = [f"data.source=folder:{tmp_path / 'images'}", f"data.root={tmp_path}", "data.size=8", "model=small"]
    settings += ["data.imbalance=1", "data.clients=2", "federation.rounds=1", "local.batch=2"]
    changes = {"samples": 1, "scheduler": "none"}
    add_images(0, 40)
    before = small_search(tmp_path, *settings, name="before", **changes)
    add_images(40, 80)
    after = small_search(tmp_path, *settings, name="after", **changes)
    assert after.best.cost > before.best.cost


def test_searches_that_start_in_the_same_second_have_different_names(tmp_path, monkeypatch):
    module = sys.modules["tune.search"]
    times = [datetime(2026, 1, 2, 3, 4, 5, 6_000), datetime(2026, 1, 2, 3, 4, 5, 7_000)]
    monkeypatch.setattr(module, "datetime", SimpleNamespace(now=lambda: times.pop(0)))
    names = [module._new_folder(tmp_path, None, ["fedavg"]).name for _ in range(2)]
    assert names == ["search-fedavg-20260102-030405-006", "search-fedavg-20260102-030405-007"]


@pytest.mark.parametrize(
    ("changes", "code", "key"),
    [
        ({"budget": 3}, "search.budget-too-small", "--budget"),
        ({"metric": "few"}, "search.no-class", "--metric"),
        ({"searcher": "TPE"}, "config.wrong-type", "searcher"),
        ({"scheduler": "ASHA"}, "config.wrong-type", "scheduler"),
        ({"metric": "acc"}, "config.wrong-type", "metric"),
        ({"metric": ["accuracy", "accuracy"]}, "config.conflict", "--metric"),
        ({"metric": ["accuracy", "few"]}, "search.no-class", "--metric"),
        ({"metric": ["accuracy", "acc"]}, "config.wrong-type", "other_metrics.0"),
        ({"samples": 0}, "config.wrong-type", "samples"),
        ({"parallel": -1}, "config.out-of-range", "parallel"),
        ({"fleet": "Local"}, "config.unknown-name", "fleet"),
        ({"retries": -1}, "config.wrong-type", "retries"),
        ({"seed": -1}, "config.wrong-type", "seed"),
        ({"metric": []}, "config.out-of-range", "metric"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_starts(tmp_path, changes, code, key):
    config = load(None, [*SETTINGS, "data.groups=[0, 1]"])
    arguments = {"samples": 8, "out": tmp_path, "name": "s", "fleet": "local", **changes}
    value = changes.get(key.partition(".")[0].removeprefix("--"), changes.get("metric"))
    with refused(code, ConfigError, key=key, value=value[-1] if isinstance(value, list) and value else value):
        search(config, space(config, RANGES), **arguments)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("config", "spaces", "code", "key"),
    [
        ({"method": "fedavg"}, {"local.lr": Uniform(0.1, 0.2)}, "config.wrong-type", "config"),
        (load(None, SETTINGS), ["local.lr"], "config.wrong-type", "spaces"),
        (load(None, SETTINGS), {"local.lr": "uniform(0.1, 0.2)"}, "search.bad-range", "local.lr"),
        (load(None, SETTINGS), {"fedavg": {"local.lr": 0.1}}, "search.bad-range", "local.lr"),
        (load(None, SETTINGS), {}, "search.nothing-to-search", "spaces"),
        (load(None, SETTINGS), {"fedavg": {}}, "search.nothing-to-search", "spaces"),
    ],
)
def test_what_is_no_configuration_or_space_is_refused_before_anything_starts(tmp_path, config, spaces, code, key):
    with refused(code, ConfigError, key=key):
        search(config, spaces, samples=1, out=tmp_path, name="s", fleet="local")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "lag"), [(3, 3), (None, 2)])
def test_the_lag_of_tpe_is_the_given_number_of_parallel_trials_on_every_cluster(tmp_path, monkeypatch, parallel, lag):
    module = sys.modules["tune.search"]
    monkeypatch.setattr(module, "_open_cluster", lambda fleet, address: nullcontext([]))
    monkeypatch.setattr(module, "_place", lambda *_: (None, 2))  # the cluster holds two trials
    settings = {"samples": 2, "scheduler": "none", "fleet": "ray", "parallel": parallel}
    assert small_search(tmp_path, "federation.rounds=1", **settings).plan.lag == lag


@pytest.mark.parametrize(
    ("settings", "ranges", "code", "key"),
    [
        (["method=fednova", "local.optimiser=adam"], RANGES, "config.conflict", "local.optimiser"),
        (["method=fednova"], {"local.optimiser": "choice(sgd, adam)"}, "config.conflict", "local.optimiser"),
        (["method=flea", "model=small"], {"method.layer": "grid(stem, stage1)"}, "model.lacks-layer", "method.layer"),
    ],
)
def test_settings_that_the_method_refuses_are_refused_before_anything_starts(tmp_path, settings, ranges, code, key):
    config = config_of(*settings)
    with refused(code, ConfigError, key=key):
        search(config, space(config, ranges), samples=4, out=tmp_path, name="s", fleet="local")
    assert not (tmp_path / "s").exists()


def test_a_value_that_goes_with_some_values_of_other_settings_is_accepted():
    config = config_of("method=flea", "data.validation=0.2")
    layers = {"method.layer": "choice(stem, stage1)"}  # of these, small has stage1
    with refused("model.lacks-layer", ConfigError, key="method.layer", value="stem"):
        check_trials(config, "flea", space(config, {"model": "choice(small)", **layers}), 0)
    check_trials(config, "flea", space(config, {"model": "choice(small, resnet8)", **layers}), 0)


def test_an_unknown_tracker_is_refused_before_anything_starts(tmp_path):
    config = config_of()
    with pytest.raises(ConfigError, match="mlflow"):
        search(config, space(config, RANGES), out=tmp_path, name="s", fleet="local", track=["elsewhere"])
    assert not (tmp_path / "s").exists()


def test_a_fleet_that_cannot_be_is_refused_before_anything_starts(tmp_path):
    config = config_of()
    with refused("config.conflict", ConfigError, key="address", value="auto"):
        search(config, space(config, RANGES), out=tmp_path, name="s", fleet="local", address="auto")
    with refused("config.unknown-name", ConfigError, key="fleet", value="processes"):
        search(config, space(config, RANGES), out=tmp_path, name="s", fleet="processes")
    assert not (tmp_path / "s").exists()


def test_trials_share_a_cluster_evenly():
    def placed(have, trials, clients=20, *settings):
        return place_trial(config_of(*settings), clients, trials, have)

    assert placed({"CPU": 2}, 8).actors == 1
    assert placed({"CPU": 64}, 8).actors == 8
    assert placed({"CPU": 64}, 2).actors == 20  # no more actors than clients
    assert placed({"CPU": 64}, 8, 20, "resources.actors=3").actors == 3
    for have, trials in (({"CPU": 16, "GPU": 1}, 20), ({"CPU": 64, "GPU": 8}, 20), ({"CPU": 64, "GPU": 8}, 3)):
        bundles = bundles_of(placed(have, trials))
        nodes = [{"CPU": have["CPU"] / have["GPU"], "GPU": 1.0}] * int(have["GPU"])
        assert fitting(bundles, nodes, 100) >= min(trials, 8 * have["GPU"])


def test_client_actors_of_a_trial_follow_from_its_settings_and_the_cluster():
    def placed(have, trials, *settings):
        return place_trial(config_of(*settings), 20, trials, have)

    assert placed({"CPU": 64.0}, 8, "resources.clients_per_actor=3").actors == 7
    # 16 actors of a quarter fit on the GPUs, and 4 on the CPUs
    assert placed({"CPU": 4.0, "GPU": 4.0}, 2, "resources.gpus_per_client=0.25").actors == 2
    assert placed({"CPU": 64.0, "GPU": 7.0}, 5, "resources.gpus_per_client=0.28").actors == 5  # 25 fit on the GPUs
    # two trials at once, since there are CPUs for four actors: each has a GPU
    assert placed({"CPU": 4.0, "GPU": 4.0}, 20, "resources.actors=2").gpus == 0.95


def test_the_largest_bundle_takes_its_place_first():
    nodes = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 0.5}]
    assert fitting([{"GPU": 0.05}, {"CPU": 1.0, "GPU": 1.0}], nodes, 8) == 1


def test_as_many_trials_share_a_gpu_as_fit_its_memory():
    def placed(most, trials, gpus, *settings):
        have = {"CPU": 64.0, "GPU": float(gpus)}
        bundles = bundles_of(place_trial(config_of(*settings), 20, trials, have, most))
        return len(bundles) - 1, fitting(bundles, [have], 100)

    # (client actors per trial, trials at once): with their servers they never exceed the processes that GPUs hold
    assert placed(math.inf, 20, 1) == (8, 8)
    assert placed(6, 20, 1) == (1, 3)
    assert placed(7, 2, 1) == (2, 2)
    assert placed(3, 20, 4) == (2, 4)
    assert placed(1, 20, 1) == (1, 1)  # the measured process is server and client in one
    assert placed(6, 20, 1, "resources.actors=2") == (2, 2)
    with refused("cluster.too-small", ConfigError, actors=3, gpus=1.0, per_gpu=3):
        placed(3, 20, 1, "resources.actors=3")


def test_memory_of_gpus_and_of_their_machines_bounds_processes():
    nodes = [{"CPU": 8.0, "GPU": 2.0, "memory": 100.0}, {"CPU": 8.0, "memory": 1.0}]
    assert most_on_gpu(nodes, Need(gpu_memory=0.2)) == 4  # 0.9 / 0.2
    assert most_on_gpu(nodes, Need(memory=15, gpu_memory=0.2)) == 3  # 0.9 * 100 / 15, shared by two GPUs
    assert most_on_gpu(nodes, Need()) == math.inf


def test_trials_that_share_a_gpu_are_sized_by_the_largest_of_them(monkeypatch):
    from tune import placement as trial_placement
    from tune.search import _place

    seen = []

    def probe(setup, task, gpus):
        seen.append((setup.method.name, setup.config.model, setup.config.local.batch, gpus))
        return None if setup.config.model == "resnet8" else Need(1.0, 0.2 if setup.method.name == "fedavg" else 0.3)

    monkeypatch.setattr(trial_placement, "probe", probe)
    config = config_of("resources.cpus_per_client=0.5")
    ranges = {"model": "choice(small, resnet8)", "local.batch": "grid(16, 64, 32)"}
    plan = SearchPlan(config, spaces_of(["fedavg", "fedprox"], space(config, ranges), config), searcher="random")
    nodes = [{"CPU": 16.0, "GPU": 2.0}]
    placed, at_once = _place(plan, nodes, None)
    assert seen == [(name, model, 64, 1) for name in ("fedavg", "fedprox") for model in ("small", "resnet8")]
    assert (placed.actors, at_once) == (2, 2)  # a GPU holds 0.9 / 0.3 processes, one of which is a server
    seen.clear()
    # not measured: the share is given, and each client has its own actor
    for settings in ("resources.gpus_per_client=0.25", "data.clients=2"):
        _place(replace(plan, base=config_of(settings), spaces={"fedavg": {}}), nodes, None)
    _place(plan, [{"CPU": 16.0}], None)
    assert not seen


def test_the_need_of_a_search_is_the_largest_of_each_kind_with_the_largest_batches(monkeypatch):
    from tune import placement as trial_placement

    seen = []

    def probe(setup, task, gpus):
        seen.append((setup.config.local.batch, setup.config.evaluation.batch))
        return Need(1.0, 0.3) if setup.method.name == "fedavg" else Need(2.0, 0.2)

    monkeypatch.setattr(trial_placement, "probe", probe)
    config = config_of()
    ranges = {"local.batch": "choice(16, 64, 32)", "evaluation.batch": "choice(16, 512, 64)"}
    plan = SearchPlan(config, spaces_of(["fedavg", "fedprox"], space(config, ranges), config), searcher="random")
    assert trial_placement.need_of(plan) == Need(2.0, 0.3)
    assert seen == [(64, 512)] * 2


def test_a_trial_that_does_not_fit_is_refused_with_what_is_missing():
    bundles = bundles_of(
        place_trial(config_of("resources.actors=4", "resources.gpus_per_client=0.5"), 4, 8, {"CPU": 2.0})
    )
    with refused("cluster.too-small", ConfigError, cluster={"CPU": 2.0, "GPU": 0}) as caught:
        check_fit(bundles, [{"CPU": 2.0}], 8)
    assert caught.value.details["trial"] == {"CPU": 4.0, "GPU": pytest.approx(1.85)}
    # the cluster has enough in all, but no node has room for one bundle
    with refused("cluster.too-small", ConfigError, largest_node={"CPU": 2.0, "GPU": 0}):
        check_fit([{}, {"CPU": 3.0}], [{"CPU": 2.0}, {"CPU": 2.0}], 8)


# on Ray

ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS")}


def command(*arguments):
    return [sys.executable, "-m", "raylt", "tune", *arguments]


@pytest.mark.slow
def test_a_search_on_ray_with_a_killed_process_equals_one_without(undisturbed, ray_session, tmp_path, monkeypatch):
    import ray

    from tune.ray_tune import backend

    actors, free = ray.util.list_named_actors(all_namespaces=True), ray.available_resources().get("CPU")
    killed, at_once = [], set()
    decide, suggest = backend._TrialStopper.on_trial_result, backend._TrialSuggester.suggest

    def watch(self, controller, trial, result):
        if trial.config["trial"] == "fedprox-000" and result["round"] == 3 and not killed:
            killed.append(result["pid"])
            os.kill(result["pid"], signal.SIGKILL)
        return decide(self, controller, trial, result)

    def count(self, trial_id):
        suggestion = suggest(self, trial_id)
        at_once.add(len(self._adapter.running))
        return suggestion

    monkeypatch.setattr(backend._TrialStopper, "on_trial_result", watch)
    monkeypatch.setattr(backend._TrialSuggester, "suggest", count)
    result = small_search(tmp_path, "resources.actors=1", fleet="ray")
    assert killed
    assert max(at_once) == 2
    assert results(result) == results(undisturbed)
    assert figures(result.folder / "trials/fedprox-000") | {"troubles": None} == figures(
        undisturbed.folder / "trials/fedprox-000"
    ) | {"troubles": None}
    assert {r.outcome.state for r in result.trials} == {"done", "stopped"}
    assert ray.is_initialized()  # a search does not end the session that it joined
    until = time.monotonic() + 20
    while ray.util.list_named_actors(all_namespaces=True) != actors and time.monotonic() < until:
        time.sleep(0.2)
    assert ray.util.list_named_actors(all_namespaces=True) == actors
    while ray.available_resources().get("CPU") != free and time.monotonic() < until:
        time.sleep(0.2)
    assert ray.available_resources().get("CPU") == free


@pytest.mark.slow
def test_a_search_that_waits_for_room_says_so_once_and_goes_on(ray_session, tmp_path, monkeypatch):
    import ray
    from ray.util import placement_group, remove_placement_group

    monkeypatch.setattr("tune.ray_tune.waiting.QUIET_WAIT_S", 0.5)
    other = placement_group([{"CPU": 4}])
    ray.get(other.ready())
    waits = []

    class OtherJobEnds(Callback):
        def on_message(self, text, minor=False):
            if "no room" in text:
                waits.append(text)
                remove_placement_group(other)

    result = small_search(
        tmp_path, "resources.actors=1", fleet="ray", samples=1, scheduler="none", callbacks=[OtherJobEnds()]
    )
    assert len(waits) == 1
    assert [trial.outcome.state for trial in result.trials] == ["done"]


@pytest.mark.slow
def test_a_search_killed_on_ray_is_resumed_to_the_same_end(tmp_path):
    asked = [*SETTINGS, *(f"{key}={text}" for key, text in RANGES.items()), "--samples", "3", "--out", str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command(*asked, "--name", "s", "--parallel", "2"), stdout=log, stderr=log, env=ENVIRONMENT
        )
        table = tmp_path / "s/trials.jsonl"
        until = time.monotonic() + 120
        while not (table.exists() and table.read_text().count("\n") >= 1):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until, (tmp_path / "log").read_text()
            time.sleep(0.05)
        process.kill()
        process.wait()
    ended = [json.loads(line)["trial"] for line in table.read_text().splitlines()]
    before = {id: os.stat(tmp_path / "s/trials" / id / "metrics.jsonl").st_mtime_ns for id in ended}
    shown = subprocess.run(
        command("--resume", str(tmp_path / "s")),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    assert before == {id: os.stat(tmp_path / "s/trials" / id / "metrics.jsonl").st_mtime_ns for id in ended}
    straight = small_search(tmp_path / "straight", samples=3)
    rows = json.loads((tmp_path / "s/trials.json").read_text())
    assert rows == json.loads((straight.folder / "trials.json").read_text())
    assert "best first" in shown.stdout
    assert all(word not in shown.stdout + shown.stderr for word in ("Traceback", "ray_results", "Configuration for"))


@pytest.mark.slow
def test_a_trial_larger_than_the_cluster_ends_the_command_at_once(tmp_path):
    begun = time.monotonic()
    done = subprocess.run(
        command(*SETTINGS, "resources.actors=4", "resources.cpus_per_client=100", "--out", str(tmp_path)),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "cluster.too-small" in done.stderr
    assert "400 CPUs" in done.stderr
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - begun < 60
    assert not list(Path(tmp_path).iterdir())


def test_a_given_share_of_a_gpu_leaves_each_trial_s_server_its_place():
    node = {"CPU": 16, "GPU": 1}
    for share, most in ((1, 1), (0.5, 2), (0.25, 4)):
        config = config_of(f"resources.gpus_per_client={share}", "resources.actors=1")
        assert check_fit(bundles_of(place_trial(config, 4, 8, node)), [node], 8) == most
    several = place_trial(config_of("resources.gpus_per_client=2", "resources.actors=1"), 4, 8, node | {"GPU": 4})
    assert several.gpus == 2


def shop_search(folder):
    """A search over the user's own data, whose files name the client of each sample."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (90, 8, 8), dtype=np.uint8), np.arange(90) % 3
    np.savez(
        folder / "shops.npz",
        x_train=images,
        y_train=labels,
        x_test=images[:9],
        y_test=labels[:9],
        class_names=["a", "b", "c"],
        id_train=np.arange(90) // 30,
    )
    config = load(
        None, ["method=fedavg", f"data.source=npz:{folder / 'shops.npz'}", "federation.rounds=2", "local.epochs=1"]
    )
    assert config.data.clients is None
    return search(
        config,
        space(config, {"local.lr": "grid(0.01, 0.1)"}),
        out=folder,
        name="s",
        searcher="grid",
        scheduler="none",
        fleet="local",
    )


@pytest.mark.slow
def test_a_search_over_a_relative_path_is_resumed_from_any_folder(tmp_path, monkeypatch):
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    begun.mkdir()
    elsewhere.mkdir()
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (60, 8, 8, 1)).astype(np.uint8), np.arange(60) % 3
    np.savez(begun / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y, class_names=np.array(list("abc")))
    monkeypatch.chdir(begun)
    settings = ("data.source=npz:own.npz", "data.imbalance=1", "data.doubles=keep", "federation.rounds=2")
    first = small_search("out", *settings, samples=2, scheduler="none")
    lines = (first.folder / "trials.jsonl").read_text().splitlines(keepends=True)
    (first.folder / "trials.jsonl").write_text("".join(lines[:1]))
    monkeypatch.chdir(elsewhere)
    again = resume(first.folder, fleet="local")
    assert results(again) == results(first)
    assert Path.cwd() == elsewhere


@pytest.mark.slow
def test_a_search_over_one_s_own_data_is_resumed(tmp_path):
    result = shop_search(tmp_path)
    ran = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    again = resume(tmp_path / "s", fleet="local")
    assert results(again) == results(result)
    assert ran == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}


@pytest.mark.slow
def test_a_trial_that_cannot_be_opened_is_one_failed_trial(tmp_path):
    config = load(None, ["method=flea", "data.clients=3", "federation.rounds=1", "local.epochs=1"])
    ranges = {"model": "choice(small,resnet8)", "method.layer": "choice(stem,stage1)"}  # small has no layer stem
    result = search(
        config,
        space(config, ranges, fields=["layer"]),
        8,
        out=tmp_path,
        name="s",
        searcher="random",
        scheduler="none",
        fleet="local",
        retries=0,
    )
    failed = [r for r in result.trials if r.failed]
    assert {(r.values["model"], r.values["method.layer"]) for r in failed} == {("small", "stem")}
    assert result.best not in failed
    assert all("method.layer" in r.failed for r in failed)


def test_no_text_of_a_table_is_computed_by_a_spreadsheet():
    rows = [{"trial": "a", "score": -0.5, "values": "=cmd|' /C calc'!A0"}, {"trial": "@SUM(1)", "more": "-"}]
    assert csv_table(rows).splitlines() == [
        "trial,score,values,more",
        "a,-0.5,'=cmd|' /C calc'!A0,",
        "'@SUM(1),,,'-",
    ]
