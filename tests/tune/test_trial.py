"""Trials in this process, on the digits."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from refusals import refused
from tiny import make_experiment, pixels

from raylt.config import load
from raylt.core.evaluation.evaluator import balance, validate
from raylt.core.fleet.reductions import total
from raylt.core.method import Method
from raylt.data.samples import Samples
from raylt.data.task import build_task
from raylt.errors import CheckpointError, ConfigError
from raylt.hyper import Choice, hp
from raylt.methods import METHODS
from raylt.methods.fedavg import FedAvg
from raylt.models import MODELS
from raylt.models.split import SplitModel
from tune.asha import Outcome
from tune.loop import holders, size_of
from tune.plan import TaskSize, client_steps, default_metric
from tune.records import Score, TrialRecord, kind_of, score_of
from tune.search import search
from tune.space import configure, space
from tune.trial import Trial, TrialJob, local_fleet

SETTINGS = ["data.clients=4", "data.validation=0.2", "data.imbalance=5", "local.lr=0.1"]


class Late(Method):
    """Gains or loses accuracy in its last phase; before it, the deployed model shows the opposite."""

    name: ClassVar[str] = "late"
    paper: ClassVar[str] = "none"

    gains: bool = hp(True, Choice(True, False), "whether the last phase helps")

    def note(self, client, message):
        client.state["noted"] = client.state.get("noted", 0) + 1
        return client.reply(samples=len(client))

    finishes: ClassVar[bool] = True

    def finish(self, server, fleet):
        assert fleet.ask(self.note, fleet.everyone, {}, samples=total)["samples"] > 0
        server.state["finished"] = server.state.get("finished", 0) + 1
        if not self.gains:
            with torch.no_grad():
                for value in server.model.classifier.parameters():
                    value.zero_()

    def global_model(self, server):
        return server.model if server.state.get("finished") or not self.gains else _Constant(server.spec.classes)


class Personal(FedAvg):
    """FedAvg that is judged by the clients' own models."""

    name: ClassVar[str] = "personal"
    personal: ClassVar[bool] = True

    def shared(self, model):
        return {key: value for key, value in super().shared(model).items() if key.startswith("encoder")}


class Looking(FedAvg):
    """FedAvg that refuses every task, and names the number of dimensions of its samples."""

    name: ClassVar[str] = "looking"

    def prepare(self, task, config, model):
        raise ConfigError(str(task.test.x.ndim), code="method.wrong-argument")


class _Constant(SplitModel):
    def __init__(self, classes):
        super().__init__(torch.nn.Flatten(), 1, classes)

    def forward(self, x):
        return torch.zeros(len(x), self.classes)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    for method in (Late, Personal, Looking):
        monkeypatch.setitem(METHODS, method.name, method)


def trial(folder, *settings, rungs=True, splits=1):
    config = load(None, [*SETTINGS, *settings])
    config = configure(config, config.method["name"], {})
    job = TrialJob(folder, str(folder), "accuracy", rungs, None, splits=splits)
    return Trial(job, "t", config, client_steps(config, size_of(config).clients), local_fleet)


def finish(trial):
    scores = []
    while True:
        scores += trial.step()
        if trial.done:
            trial.close()
            return scores


def model_sha256(folder):
    return json.loads((folder / "trials/t/summary.json").read_text())["model_sha256"]


@pytest.mark.slow
def test_a_trial_rehearses_its_last_phase_at_the_rungs_and_is_judged_by_it(tmp_path):
    scores = finish(trial(tmp_path, "method=late", "federation.rounds=6"))
    assert [(score.step, score.kind) for score in scores] == [
        (1, "proxy"),
        (2, "rehearsal"),
        (3, "proxy"),
        (4, "proxy"),
        (5, "proxy"),
        (6, "proxy"),
        (7, "final"),
    ]
    proxies = [score.value for score in scores if score.kind == "proxy"]
    assert proxies == [pytest.approx(0.1)] * 5  # a constant prediction among ten classes
    assert scores[1].value > 0.15
    assert scores[-1].value > 0.3
    assert scores[-1].client_steps == scores[-2].client_steps == 3 * scores[1].client_steps
    lines = (tmp_path / "trials/t/metrics.jsonl").read_text().splitlines()
    figures = [json.loads(line)["figures"] for line in lines]
    assert [each["validation"]["accuracy"] for each in figures] == pytest.approx([0.1] * 6 + [scores[-1].value])
    assert [each.get("rehearsal") for each in figures] == [None, scores[1].validation, *[None] * 5]


@pytest.mark.slow
def test_the_final_score_is_that_of_the_worst_split(tmp_path):
    scores = finish(trial(tmp_path / "both", "method=fedavg", "federation.rounds=3", splits=2))
    alone = []
    for seed in (0, 1):
        alone.append(finish(trial(tmp_path / f"{seed}", "method=fedavg", "federation.rounds=3", f"data.seed={seed}")))
    finals = [of_split[-1] for of_split in alone]
    assert finals[0].value != finals[1].value
    worst = min((0, 1), key=lambda split: finals[split].value)
    assert scores[-1] == replace(finals[worst], split=worst, client_steps=2 * finals[0].client_steps)
    assert scores[:-1] == alone[0][:-1]  # the second split has no scores before the end
    assert {run.name for run in (tmp_path / "both/trials").iterdir()} == {"t", "t-split-1"}


@pytest.mark.slow
def test_a_trial_continues_on_the_split_at_which_it_was_interrupted(tmp_path):
    expected = finish(trial(tmp_path / "straight", "method=fedavg", "federation.rounds=3", splits=2))[-1]
    first = trial(tmp_path / "again", "method=fedavg", "federation.rounds=3", splits=2)
    for _ in range(4):  # the second split has taken a step
        first.step()
    first.close()
    again = trial(tmp_path / "again", "method=fedavg", "federation.rounds=3", splits=2)
    assert not again.done
    assert finish(again)[-1] == expected
    ended = trial(tmp_path / "again", "method=fedavg", "federation.rounds=3", splits=2)
    assert finish(ended)[-1] == expected


@pytest.mark.slow
def test_a_rehearsal_leaves_no_trace(tmp_path):
    for name, rungs in (("with", True), ("without", False)):
        finish(trial(tmp_path / name, "method=late", "federation.rounds=6", rungs=rungs))
    assert model_sha256(tmp_path / "with") == model_sha256(tmp_path / "without")


@pytest.mark.slow
def test_halving_keeps_trials_that_gain_in_their_last_phase(tmp_path):
    """Scores before the last phase mislead: trials that gain in it show chance level until then."""
    config = load(None, [*SETTINGS, "method=late", "federation.rounds=6"])
    for order in ("false, true", "true, false"):
        result = search(
            config,
            space(config, {"method.gains": f"grid({order})", "data.seed": "grid(0, 1, 2)"}),
            searcher="grid",
            out=tmp_path,
            name=order,
            fleet="local",
        )
        states = {
            gains: [r.outcome.state for r in result.trials if r.values["method.gains"] is gains]
            for gains in (True, False)
        }
        assert result.best.values["method.gains"] is True
        if order.startswith("false"):  # the winning trials start after the losing ones and are not stopped
            assert states[True].count("done") >= 2
        else:
            assert states[False] == ["stopped"] * 3


@pytest.mark.slow
def test_an_interrupted_trial_continues_to_the_same_bits(tmp_path):
    straight = finish(trial(tmp_path / "straight", "method=late", "federation.rounds=6"))
    for steps in (1, 2, 6):
        folder = tmp_path / f"cut-{steps}"
        first = trial(folder, "method=late", "federation.rounds=6")
        for _ in range(steps):
            first.step()
        first.close()
        if steps == 2:  # as if killed between the checkpoint and its score
            lines = (folder / "trials/t/scores.jsonl").read_text().splitlines()
            (folder / "trials/t/scores.jsonl").write_text(lines[0] + "\n")
        assert finish(trial(folder, "method=late", "federation.rounds=6")) == straight
        assert model_sha256(folder) == model_sha256(tmp_path / "straight")
    again = trial(tmp_path / "straight", "method=late", "federation.rounds=6")
    assert again.step() == straight
    assert again.done


def test_a_method_sees_the_images_before_they_are_encoded(tmp_path):
    with pytest.raises(ConfigError, match=r"^4$"):
        trial(tmp_path, "method=looking", "trainable=classifier", f"data.root={tmp_path}")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_trial_killed_before_it_began_begins_again(tmp_path):
    (tmp_path / "trials/t").mkdir(parents=True)
    (tmp_path / "trials/t/split.json").write_text("{")
    assert finish(trial(tmp_path, "method=fedavg", "federation.rounds=2"))[-1].kind == "final"


@pytest.mark.slow
def test_personal_models_are_judged_at_rungs_and_the_end_on_validation_samples(tmp_path):
    scores = finish(trial(tmp_path, "method=personal", "federation.rounds=6"))
    assert [(score.step, score.kind) for score in scores] == [(2, "round"), (6, "final")]
    assert scores[-1].validation["accuracy"] != scores[-1].test["accuracy"]
    assert scores[-1].validation["matched"] > scores[-1].validation["accuracy"]  # clients know their own classes best


def test_every_class_counts_the_same_on_validation():
    # 9 of 10 are right in class 0, 0 of 1 in class 1, class 2 has no samples: (0.9 + 0) / 2
    matrix = torch.tensor([[9, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert balance(matrix).diagonal().sum() / balance(matrix).sum() == pytest.approx(0.45)


@pytest.mark.slow
def test_nothing_of_a_trial_is_left_but_its_record(tmp_path):
    finish(trial(tmp_path, "method=fedavg", "federation.rounds=2"))
    assert not (tmp_path / "trials/t/checkpoints").exists()
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_trials_of_segmentation_are_judged_on_held_out_images_as_each_client_sees_them(method, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "lraspp", pixels)
    config = load(
        None,
        [
            "data.source=shapes",
            "data.partition=classes",
            "data.clients=6",
            "data.imbalance=2",
            "data.validation=0.2",
            "model=lraspp",
            f"method={method}",
            "local.batch=64",
            "federation.participation=0.2",
            "evaluation.batch=80",
        ],
    )
    experiment = make_experiment(config, build_task(config.data), tmp_path)
    experiment.step()
    figures = validate(experiment.method, experiment.server, experiment.fleet, experiment.task)
    assert len(experiment.task.validation) == 64
    assert set(figures) == {"accuracy", "many", "medium", "few", "owned", "matched", "miou", "local", "worst_decile"}
    assert all(0 <= value <= 1 for value in figures.values())


@pytest.mark.slow
def test_methods_that_cannot_do_the_task_are_refused_before_a_search_starts(tmp_path):
    config = load(None, ["data.source=shapes", "data.partition=iid", "data.imbalance=1", "model=lraspp", "method=sfd"])
    with refused("config.conflict", ConfigError, key="method", value="sfd"):
        search(config, {"method.gamma": Choice(0.1, 1.0)}, samples=1, out=tmp_path, fleet="local")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_local_validation_is_on_the_images_taken_from_each_client(method, tmp_path):
    config = load(None, ["data.validation=0.3", "data.clients=3", f"method={method}", "local.epochs=1"])
    task = build_task(config.data)
    rows = task.validation.ids
    for id in range(3):
        taken = rows[task.validation_clients == id]
        assert set(taken) <= set(task.split.clients[id].tolist())
        assert not set(taken) & set(task.shards[id].ids.tolist())
    experiment = make_experiment(config, task, tmp_path)
    experiment.step()
    figures = validate(experiment.method, experiment.server, experiment.fleet, task)
    assert 0 < figures["local"] < 1
    if method == "fedper":  # the counts of each client's own model passed the check of their totals
        return
    samples = Samples(task.validation, task.spec, torch.device("cpu"))
    model = experiment.server.model.eval()
    means = []
    for id in range(3):
        batch = samples.batch(torch.from_numpy(np.flatnonzero(task.validation_clients == id)))
        means.append((model(batch.x).argmax(1) == batch.y).float().mean().item())
    assert figures["local"] == pytest.approx(sum(means) / 3)
    assert figures["worst_decile"] == pytest.approx(min(means))


def test_validation_is_of_the_clients_that_train_by_the_classes_that_they_own(tmp_path):
    config = load(None, ["data.validation=0.3", "data.clients=5", "data.new_clients=2", "method=fedavg"])
    task = build_task(config.data)
    experiment = make_experiment(config, task, tmp_path)
    for _ in range(2):
        experiment.step()
    figures = validate(experiment.method, experiment.server, experiment.fleet, task)
    samples = Samples(task.validation, task.spec, torch.device("cpu"))
    batch = samples.batch(torch.arange(len(samples)))
    with torch.no_grad():
        right = (experiment.server.model.eval()(batch.x).argmax(1) == batch.y).double()
    recalls = torch.stack([right[batch.y == c].mean() for c in range(task.classes)])
    counts = torch.from_numpy(task.client_counts)[experiment.fleet.ids]
    assert len(counts) == 3
    assert figures["owned"] == pytest.approx(np.mean([recalls[n > 0].mean() for n in counts]))
    assert figures["matched"] == pytest.approx(np.mean([(recalls * n).sum() / n.sum() for n in counts]))
    local = [right[task.validation_clients == id].mean() for id in experiment.fleet.ids]
    assert figures["local"] == pytest.approx(np.mean(local))


def test_a_search_of_personal_methods_goes_by_the_clients_own_images():
    config = load(None, ["method=fedper"])
    local = config.model_copy(update={"federation": config.federation.model_copy(update={"batchnorm": "local"})})
    assert default_metric(config, ["fedper", "ditto"]) == "local"
    assert default_metric(config, ["fedper", "fedavg"]) == "accuracy"
    assert default_metric(local, ["fedavg"]) == "local"


def test_a_step_is_judged_at_rungs_at_intervals_and_at_the_end():
    config = load(None, ["method=fedavg", "federation.rounds=6", "evaluation.every=2"])
    steps, rungs = range(1, 8), [3]
    assert [kind_of(step, config, False, rungs) for step in steps[:-1]] == [
        None,
        "round",
        "round",
        "round",
        None,
        "final",
    ]
    assert [kind_of(step, config, True, rungs) for step in steps] == [
        None,
        "proxy",
        "rehearsal",
        "proxy",
        None,
        "proxy",
        "final",
    ]


def test_a_score_has_the_cost_until_its_round_and_the_test_figures_of_its_step():
    config = load(None, ["method=fedavg", "federation.rounds=6"])
    clients = {kind: {"mean": mean, "worst_decile": 0.1} for kind, mean in (("owned", 0.4), ("matched", 0.45))}
    report = {"step": 3, "accuracy": 0.5, "groups": {"few": 0.2}, "clients": clients}
    score = score_of(report, "round", {"few": 0.25, "many": None}, "few", config, 60)
    assert (score.step, score.value, score.client_steps) == (3, 0.25, 30)
    assert score.test == {"accuracy": 0.5, "few": 0.2, "owned": 0.4, "matched": 0.45}
    assert score_of(report, "rehearsal", {"few": 0.25}, "few", config, 60).test == {}  # of another model
    assert score_of(report, "round", {"few": 0.25, "many": None}, "many", config, 60) is None
    # the step after the last round costs nothing
    assert score_of(report | {"step": 7}, "final", {"few": 0.25}, "few", config, 60).client_steps == 60
    no_round = config.model_copy(update={"federation": config.federation.model_copy(update={"rounds": 0})})
    assert score_of(report | {"step": 1}, "final", {"few": 0.25}, "few", no_round, 60).client_steps == 60


def test_the_score_that_decides_is_that_of_the_outcomes_step_and_kind():
    config = load(None, ["method=fedavg"])
    record = TrialRecord("t", "fedavg", {}, config, 90)
    kinds = {1: "round", 3: "round", 9: "final"}
    record.scores = {step: Score(step, kind, 0.5, 0, {"few": step / 10}, {}) for step, kind in kinds.items()}
    assert record.figures == {}
    record.outcome = Outcome("stopped", 3, 0.5)
    assert record.figures == {"few": 0.3}
    assert [score.step for score in record.counted_scores] == [1, 3]
    record.outcome = Outcome("done", 9, 0.5)
    assert record.figures == {"few": 0.9}
    assert [score.step for score in record.counted_scores] == [1, 3, 9]


def test_clients_that_join_after_training_take_no_steps():
    settings = ["method=fedavg", "data.clients=5", "data.new_clients=2"]
    everyone = size_of(load(None, settings[:2])).clients
    assert len(everyone) == 5
    assert len(size_of(load(None, settings)).clients) == 3


def test_clients_without_samples_hold_none(monkeypatch):
    monkeypatch.setattr("tune.loop.size_of", lambda config: TaskSize([5, 0, 3, 0], (8, 8, 1), 4))
    assert holders(load(None, ["method=fedavg"])) == 2


def test_a_trial_is_compared_with_others_on_its_first_split_alone(tmp_path, monkeypatch):
    class Opened:
        def __init__(self, job, folder, config, *_):
            opened.append((folder.name, config.data.seed, job.rungs))
            self.done = True

        def step(self):
            return [Score(3, "final", 0.5, 0, {}, {})]

        def close(self):
            pass

    opened = []
    monkeypatch.setattr("tune.trial.TrialRun", Opened)
    for rungs in (True, False):
        finish(trial(tmp_path, "method=fedavg", "federation.rounds=2", rungs=rungs, splits=2))
    assert opened == [("t", 0, True), ("t-split-1", 1, False), ("t", 0, False), ("t-split-1", 1, False)]


def test_scores_of_later_splits_are_checked_without_rungs(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr("tune.records.exists", lambda path: True)
    monkeypatch.setattr("tune.records.Files", lambda path: SimpleNamespace(state="stopped", checkpoint=lambda: None))
    monkeypatch.setattr(TrialRecord, "_read_split", lambda *_: [])
    monkeypatch.setattr(TrialRecord, "_check_scores", lambda self, path, *rest: checked.append((path.name, rest[-1])))
    record = TrialRecord("t", "fedavg", {}, load(None, ["method=fedavg"]), 9, splits=2)
    record.check_interrupted(tmp_path / "t", "accuracy", [1, 3])
    assert checked == [("t", [1, 3]), ("t-split-1", ())]


@pytest.mark.parametrize(("batchnorm", "missing"), [("local", False), ("average", True)])
def test_rounds_in_which_own_models_are_not_evaluated_lack_no_score(tmp_path, batchnorm, missing):
    config = load(None, ["method=fedavg", "federation.rounds=6", f"federation.batchnorm={batchnorm}"])
    record = TrialRecord("t", "fedavg", {}, config, 9)
    with refused("search.changed", step=1) if missing else nullcontext():
        record._check_scores(tmp_path, [{}, {}], "accuracy", ())


def test_a_trial_of_another_configuration_is_not_continued(tmp_path):
    first = trial(tmp_path, "method=fedavg", "federation.rounds=2")
    first.close()
    with refused("search.changed", CheckpointError, trial="t"):
        trial(tmp_path, "method=fedavg", "federation.rounds=2", "local.lr=0.2")


def test_an_ended_trial_is_restored_with_its_values_and_the_metrics_of_its_run(tmp_path, monkeypatch):
    config = load(None, ["method=fedavg"])
    score = Score(2, "final", 0.5, 9, {"accuracy": 0.5}, {}, split=1)
    ended = {"values": {"local.lr": 0.1}, "points": [score.to_json()], "failed": None, "trial": "t"}
    figures = [{"figures": {}}, {"figures": {"validation": {"accuracy": 0.5}}}]
    monkeypatch.setattr(TrialRecord, "_read_split", lambda *_: figures)

    def restored(values):
        record = TrialRecord("t", "fedavg", values, config, 9, splits=2)
        record.restore(ended, tmp_path / "trials/t")
        return record.scores

    assert restored({"local.lr": 0.1}) == {2: score}
    with refused("search.changed", CheckpointError, trial="t"):
        restored({"local.lr": 0.2})
    figures[1]["figures"]["validation"] = {"accuracy": 0.6}
    with refused("search.changed", CheckpointError, trial="t", step=2):
        restored({"local.lr": 0.1})
