import time
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from refusals import refused
from tiny import COUNTS, CPU, Recorder, configure, fingerprint, make_experiment, make_setup, private_states
from torch import tensor

from raylt.config import load
from raylt.core.checkpoint import checkpoint
from raylt.core.checkpoint.client_states import SavedStates, part_of_client
from raylt.core.client import Reply
from raylt.core.evaluation import counts
from raylt.core.experiment import Experiment
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.fleet.reductions import each as by_client
from raylt.core.method import Method
from raylt.core.setup import private_entries
from raylt.core.training.sgd import learning_rate
from raylt.data.images.cache import Mapped
from raylt.data.samples import Samples
from raylt.data.task import Shard, build_task
from raylt.errors import ConfigError, Diverged
from raylt.methods.fedavg import FedAvg
from raylt.tree import snapshot

IDS = [0, 1, 2, 3, 5]


class OwnClassifier(Method):
    """FedPer (Arivazhagan et al., 2019): clients share the encoder, and each keeps its own classifier."""

    name: ClassVar[str] = "own_classifier"
    paper: ClassVar[str] = "for tests"
    personal: ClassVar[bool] = True

    def shared(self, model):
        return {name: value for name, value in model.entries().items() if not name.startswith("classifier.")}


class Finishing(FedAvg):
    """FedAvg with a phase after the last round and a state at the server."""

    name: ClassVar[str] = "finishing"

    def round(self, server, fleet):
        super().round(server, fleet)
        server.state["rounds"] = {"seen": server.state.get("rounds", {"seen": 0})["seen"] + 1}
        server.log(note=f"round {server.round}")

    finishes: ClassVar[bool] = True

    def finish(self, server, fleet):
        server.model.classifier.weight.data.zero_()
        server.log(note="finished")


class Slow(Finishing):
    """A method whose last phase times a stage of its own, twice."""

    name: ClassVar[str] = "slow"

    def finish(self, server, fleet):
        for _ in range(2):
            with server.timings.time("synthesis"):
                time.sleep(0.05)


class Twofold(OwnClassifier):
    """A personal method with a phase after the last round, and with a second model of each client."""

    name: ClassVar[str] = "twofold"
    finishes: ClassVar[bool] = True
    other_models: ClassVar[tuple[str, ...]] = ("same",)

    def finish(self, server, fleet):
        server.log(note="finished")

    def other_model(self, client, name):
        return client.model


class Staged(FedAvg):
    """FedAvg that can be branched after its first round."""

    name: ClassVar[str] = "staged"

    def stages(self, rounds):
        return {"early": 1} | super().stages(rounds)


@pytest.fixture
def validated(tiny_task):
    """Return the tiny task with a long-tailed validation set, taken from client 0: 10, 5, 2 and 1 samples."""
    x, y = tiny_task.test.x, tiny_task.test.y
    rows = np.concatenate([np.flatnonzero(y == c)[:n] for c, n in enumerate((10, 5, 2, 1))])
    return replace(
        tiny_task, validation=Shard(x[rows], y[rows]), validation_clients=np.zeros(len(rows), dtype=np.int64)
    )


@pytest.fixture
def build(tiny_task, tmp_path):
    """Return `build(method, federation={...})`, which makes an experiment on the tiny task with a `Recorder` as
    host."""

    def make(method: Method | None = None, folder=tmp_path, **parts) -> Experiment:
        return make_experiment(configure(**parts), tiny_task, folder, method, host=Recorder)

    return make


def run(experiment: Experiment) -> list:
    reports = []
    while not experiment.done:
        reports.append(experiment.advance())
    return reports


def judge_by_loop(model, task) -> torch.Tensor:
    """Return the counts of (true, predicted) of a model in evaluation mode, one test image at a time."""
    samples, matrix = Samples(task.test, task.spec, CPU), torch.zeros(4, 4, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        for i in range(len(samples)):
            matrix[samples.y[i], model(samples.batch(tensor([i])).x)[0].argmax()] += 1
    return matrix


def personal_models(experiment: Experiment):
    """Yield every client's id and model: the server's shared entries with the client's private ones."""
    method, server = experiment.method, experiment.server
    for id, private in private_states(experiment).items():
        model = make_setup(experiment.config, method).new_model(experiment.task.spec)
        model.load_state_dict(dict(snapshot(method.shared(server.model))) | private["model"], strict=True)
        yield id, model


def class_accuracies(matrix) -> list[float]:
    return [matrix[c, c].item() / 10 for c in range(4)]  # ten test images of each class


def on_own_classes(each: list[float]) -> tuple[list[float], list[float]]:
    """Return each client's accuracies on the classes that it holds, with equal weights and in its own mix."""
    owned = [sum(a for a, n in zip(each, COUNTS[k], strict=True) if n) / (COUNTS[k] > 0).sum() for k in IDS]
    matched = [sum(a * n for a, n in zip(each, COUNTS[k], strict=True)) / COUNTS[k].sum() for k in IDS]
    return owned, matched


# steps and figures


def test_steps_are_the_rounds_and_then_the_finish(build):
    experiment = build(Finishing(), federation={"rounds": 3})
    reports = run(experiment)
    assert [(r.step, r.phase) for r in reports] == [(1, "round"), (2, "round"), (3, "round"), (4, "finish")]
    assert [r.figures["note"] for r in reports] == ["round 1", "round 2", "round 3", "finished"]
    assert "loss" not in reports[-1].figures
    assert experiment.server.state == {"rounds": {"seen": 3}}
    # with a zero classifier only the bias decides: every image gets the same class, which is right for 10 of 40
    assert reports[-1].accuracy == 0.25


class Forgetting(Finishing):
    """The same, with a phase after the last round that changes the state in place."""

    name: ClassVar[str] = "forgetting"

    def finish(self, server, fleet):
        super().finish(server, fleet)
        server.state["rounds"]["seen"] = 0


def test_a_rehearsal_of_the_last_phase_is_undone(build):
    experiment = build(Forgetting())
    experiment.step()
    server = experiment.server
    before = fingerprint(server.model.state_dict())
    with experiment.rehearsal():
        assert (server.round, server.state) == (2, {"rounds": {"seen": 0}})
        assert not server.model.classifier.weight.any()
    assert (server.round, server.state) == (1, {"rounds": {"seen": 1}})
    assert fingerprint(server.model.state_dict()) == before
    assert server.figures["note"] == "round 1"


def test_a_report_says_what_the_time_of_its_step_went_to(build):
    first, last = run(build(Slow(), federation={"rounds": 1}))
    assert set(first.timings) == {"train", "aggregation", "evaluation", "checkpoint"}
    assert set(last.timings) == {"synthesis", "evaluation", "checkpoint"}
    assert 0.1 <= last.timings["synthesis"] <= last.seconds
    for report in (first, last):
        assert report.timings["evaluation"] == report.evaluation_seconds
        own = sum(s for stage, s in report.timings.items() if stage not in ("evaluation", "checkpoint"))
        assert 0 < own <= report.seconds


class Saving(FedAvg):
    """FedAvg with a stage of one second in each round."""

    name: ClassVar[str] = "saving"

    def round(self, server, fleet):
        super().round(server, fleet)
        server.timings.add({"saving": 1.0})


def test_a_stage_has_the_seconds_of_its_own_step(build):
    assert [report.timings["saving"] for report in run(build(Saving()))] == [1.0, 1.0]


class NamesStages(FedAvg):
    """FedAvg whose server or client function has the name of a stage that the experiment records."""

    name: ClassVar[str] = "names_stages"
    stage: str
    place: str

    def evaluation(self, client, message):
        return client.reply()

    def round(self, server, fleet):
        if self.place == "time":
            with server.timings.time(self.stage):
                super().round(server, fleet)
        elif self.place == "item":
            server.timings[self.stage] = 1.0
        else:
            fleet.ask(self.evaluation, fleet.everyone, {})


@pytest.mark.parametrize(
    ("stage", "place"), [("checkpoint", "time"), ("checkpoint", "item"), ("evaluation", "time"), ("evaluation", "ask")]
)
def test_stages_that_the_experiment_records_cannot_come_from_a_method(build, stage, place):
    experiment = build(NamesStages(stage=stage, place=place), output={"checkpoint_every": 5})
    with refused("method.wrong-argument", ConfigError, key="server.timings", value=stage):
        experiment.advance()
    report = build(NamesStages(stage="saving", place="time"), output={"checkpoint_every": 5}).advance()
    assert set(report.timings) == {"train", "aggregation", "saving", "evaluation"}


class Joining(FedAvg):
    """FedAvg whose clients are asked before the first round."""

    name: ClassVar[str] = "joining"

    def join(self, client, message):
        return client.reply()


def test_clients_join_once_before_the_first_round(build):
    experiment = build(Joining())
    reports = run(experiment)
    joined = [(round, id) for function, round, id, _ in experiment.fleet._host.replies if function == "join"]
    assert joined == [(0, id) for id in IDS]
    assert [sorted(r.traffic) for r in reports] == [["join", "train"], ["train"]]
    assert reports[0].traffic["join"] == {"down": 0, "up": 0, "replies": 5}


class JoiningWithTrouble(Joining):
    """The same, where client 0 raises and client 1 sends a wrong weight."""

    name: ClassVar[str] = "joining_with_trouble"

    def join(self, client, message):
        if client.id == 0:
            raise ValueError("no such luck")
        return Reply(0.0, {}) if client.id == 1 else client.reply()


def test_troubles_of_clients_that_join_are_in_the_first_report(build):
    experiment = build(JoiningWithTrouble(), federation={"retries": 1, "quorum": 0.5})
    experiment.fleet.on_note = lambda text: None
    first, second = run(experiment)
    assert (first.retried, first.lost, list(first.rejected)) == ([0], [0], [1])
    assert (second.retried, second.lost, second.rejected) == ([], [], {})


def test_a_join_that_does_nothing_is_not_sent(build):
    experiment = build(OwnClassifier(), federation={"participation": 0.3, "rounds": 1})
    (report,) = run(experiment)
    assert sorted(report.traffic) == ["train"]
    assert (
        {id for function, _, id, _ in experiment.fleet._host.replies if function == "train"}
        == set(report.participants)
        == set(experiment.fleet._private)
    )


@pytest.mark.parametrize(("every", "judged"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (4, [4, 5]), (9, [5])])
def test_global_model_is_judged_every_so_many_rounds_and_after_the_last(build, every, judged):
    reports = run(build(federation={"rounds": 5}, evaluation={"every": every}))
    assert [r.step for r in reports if r.accuracy is not None] == judged
    for r in reports:
        assert r.accuracy == r.global_accuracy
        assert (r.groups is None) == (r.clients is None) == (r.accuracy is None)
        assert (r.by_client is None) == (r.step < 5)


def test_figures_of_a_report_equal_a_loop_over_the_test_set(build, tiny_task):
    experiment = build(federation={"rounds": 4})
    report = run(experiment)[-1]
    matrix = judge_by_loop(experiment.server.model, tiny_task)
    each = class_accuracies(matrix)
    assert 0.25 < report.accuracy < 1  # otherwise the comparisons below would show little
    assert report.accuracy == report.global_accuracy == pytest.approx(sum(each) / 4)
    assert report.global_macro == pytest.approx(sum(each) / 4)
    union = [sum(matrix[c]) + sum(row[c] for row in matrix) - matrix[c][c] for c in range(4)]
    assert report.global_miou == pytest.approx(sum(matrix[c][c] / union[c] for c in range(4)) / 4)
    assert report.groups == pytest.approx({"many": each[0], "medium": (each[1] + each[2]) / 2, "few": each[3]})
    owned, matched = on_own_classes(each)
    # the worst tenth of 5 clients is one client
    assert report.clients["owned"] == pytest.approx({"mean": sum(owned) / 5, "worst_decile": min(owned)})
    assert report.clients["matched"] == pytest.approx({"mean": sum(matched) / 5, "worst_decile": min(matched)})
    assert report.clients["global"] == pytest.approx({"mean": sum(each) / 4, "worst_decile": sum(each) / 4})


def test_evaluation_changes_no_weight(build, tmp_path):
    seldom = build(folder=tmp_path, federation={"rounds": 3}, evaluation={"every": 3})
    often = build(folder=tmp_path, federation={"rounds": 3}, evaluation={"every": 1, "batch": 7})
    run(seldom)
    run(often)
    assert seldom.export_model() == often.export_model()


def test_training_makes_the_model_better_than_chance(build):
    # chance is 0.25; client 2 holds one class only and client 3 one sample, so the model is not perfect
    assert run(build(federation={"rounds": 8}))[-1].accuracy > 0.5


def test_server_and_clients_have_the_schedule_of_the_setup(tiny_task, tmp_path):
    """A process of clients has no registry of schedules of one's own."""
    config = configure()
    setup = replace(make_setup(config), schedule=lambda local, round, rounds: 0.125)
    host = ClientHost(setup, tiny_task.spec, tiny_task.test, CPU)
    experiment = Experiment(setup, tiny_task, LocalFleet(config, tiny_task, host), CPU, tmp_path)

    def tell_rate(client, message):
        return client.reply(rate=learning_rate(client))

    assert experiment.fleet.ask(tell_rate, [0, 1], {}, rate=by_client)["rate"] == {0: 0.125, 1: 0.125}
    assert learning_rate(experiment.server) == 0.125


# private entries


def test_personal_figures_pool_the_clients_own_models(build, tiny_task):
    experiment = build(OwnClassifier(), federation={"rounds": 3, "participation": 0.3})
    reports = run(experiment)
    matrices = {id: judge_by_loop(model, tiny_task) for id, model in personal_models(experiment)}
    assert sorted(matrices) == IDS
    assert len({str(class_accuracies(m)) for m in matrices.values()}) > 1
    each = {id: class_accuracies(m) for id, m in matrices.items()}
    report = reports[-1]
    assert report.accuracy == pytest.approx(sum(sum(a) for a in each.values()) / 20)
    assert report.global_accuracy == pytest.approx(
        sum(class_accuracies(judge_by_loop(experiment.server.model, tiny_task))) / 4
    )
    owned = [sum(a for a, n in zip(each[k], COUNTS[k], strict=True) if n) / (COUNTS[k] > 0).sum() for k in IDS]
    assert report.clients["owned"] == pytest.approx({"mean": sum(owned) / 5, "worst_decile": min(owned)})
    worst = min(sum(a) / 4 for a in each.values())
    assert report.clients["global"] == pytest.approx({"mean": report.accuracy, "worst_decile": worst})


def test_personal_models_are_judged_when_due_and_their_counts_are_no_traffic(build):
    reports = run(build(OwnClassifier(), federation={"rounds": 5}, evaluation={"personal": 2, "every": 5}))
    assert [r.step for r in reports if r.accuracy is not None] == [2, 4, 5]
    assert [r.step for r in reports if r.global_accuracy is not None] == [5]
    assert all("judge" not in r.traffic for r in reports)


def test_other_models_of_clients_are_judged_once_after_the_last_step(build):
    reports = run(build(Twofold(), evaluation={"personal": 1}))
    assert [report.others is None for report in reports] == [True, True, False]
    assert reports[-1].others["same"]["accuracy"] == reports[-1].accuracy


def test_clients_own_models_are_validated_in_evaluation_mode_and_with_equal_classes(validated, tmp_path):
    config = configure(federation={"rounds": 3}, evaluation={"batch": 7})
    experiment = make_experiment(config, validated, tmp_path, OwnClassifier())
    report = run(experiment)[-1]
    figures = []
    for _, model in personal_models(experiment):
        matrix = judge_by_loop(model, replace(validated, test=validated.validation))
        figures += [matrix[c, c].item() / n for c, n in enumerate((10, 5, 2, 1))]
    assert len(set(figures)) > 3  # otherwise equal classes would weigh as much as equal samples
    assert report.figures["validation"]["accuracy"] == pytest.approx(sum(figures) / len(figures))


def test_a_global_model_is_validated_with_equal_classes_and_on_the_images_of_each_client(validated, tmp_path):
    task = replace(validated, validation_clients=np.arange(18) % 2)
    experiment = make_experiment(configure(federation={"rounds": 3}), task, tmp_path)
    figures = run(experiment)[-1].figures["validation"]
    matrix = judge_by_loop(experiment.server.model, replace(task, test=task.validation))
    each = [matrix[c, c].item() / n for c, n in enumerate((10, 5, 2, 1))]
    assert figures["accuracy"] == pytest.approx(sum(each) / 4)
    assert figures["accuracy"] != pytest.approx(matrix.diagonal().sum().item() / 18)
    assert [figures[group] for group in ("many", "medium", "few")] == [each[0], (each[1] + each[2]) / 2, each[3]]
    owned, matched = on_own_classes(each)
    assert figures["owned"] == pytest.approx(sum(owned) / 5)
    assert figures["matched"] == pytest.approx(sum(matched) / 5)
    local = []
    for id in (0, 1):
        part = Shard(task.validation.x[id::2], task.validation.y[id::2])
        of_client = judge_by_loop(experiment.server.model, replace(task, test=part))
        local.append(of_client.diagonal().sum().item() / 9)
    assert local[0] != local[1]
    assert figures["local"] == pytest.approx(sum(local) / 2)
    assert figures["worst_decile"] == min(local)


def test_own_models_are_validated_whenever_they_are_judged(validated, tmp_path):
    config = configure(federation={"rounds": 3}, evaluation={"personal": 1, "every": 9})
    reports = run(make_experiment(config, validated, tmp_path, OwnClassifier()))
    assert [report.global_accuracy is None for report in reports] == [True, True, False]
    assert ["validation" in report.figures for report in reports] == [True, True, True]


def test_own_models_are_validated_on_rows_of_a_memory_mapped_array_as_in_memory(validated, tmp_path):
    x = validated.test.x
    np.save(tmp_path / "images.npy", x)
    rows = np.flatnonzero((validated.test.y == 3) | (validated.test.y == 1))[::-1].copy()
    figures = []
    for images in (x[rows], Mapped(str(tmp_path / "images.npy"), rows)):
        shard = Shard(images, validated.test.y[rows])
        task = replace(validated, validation=shard, validation_clients=np.zeros(len(rows), dtype=np.int64))
        experiment = make_experiment(configure(federation={"rounds": 3}), task, tmp_path, OwnClassifier())
        figures.append(run(experiment)[-1].figures["validation"])
    assert figures[0] == figures[1]


def test_private_classifier_appears_in_no_message_and_no_reply(build):
    experiment = build(OwnClassifier())
    run(experiment)
    host = experiment.fleet._host
    sent = [*host.messages, *(reply for *_, reply in host.replies)]
    models = [part["model"] for part in sent if "model" in part]
    assert len(models) >= 2 * 2 * len(IDS)  # down and up in each of two rounds
    assert not any("classifier" in name for model in models for name in model)
    assert any("encoder" in name for name in models[0])
    assert "classifier.weight" in experiment.server.model.state_dict()


def test_private_classifiers_of_two_trained_clients_differ(build):
    experiment = build(OwnClassifier())
    run(experiment)
    weights = {id: state["model"]["classifier.weight"] for id, state in private_states(experiment).items()}
    assert not torch.equal(weights[0], weights[5])


def test_private_classifier_is_trained_on_from_where_the_clients_last_round_left_it(build, monkeypatch):
    # a client alone gets its own encoder back and keeps its classifier, so this is FedAvg with one client
    monkeypatch.setattr(Method, "sample", lambda self, server, fleet: [5])
    experiment, plain = build(OwnClassifier()), build()
    run(experiment)
    run(plain)
    own = private_states(experiment)[5]["model"]
    assert torch.equal(own["classifier.weight"], plain.server.model.classifier.weight)


def test_clients_that_were_never_sampled_keep_their_initial_private_state(build, tiny_task):
    # ceil(0.3 * 6) = 2 clients in each of 2 rounds, so at least one of the five is never sampled
    experiment = build(OwnClassifier(), federation={"participation": 0.3})
    run(experiment)
    trained = {id for function, _, id, _ in experiment.fleet._host.replies if function == "train"}
    initial = private_entries(
        experiment.method, make_setup(experiment.config, experiment.method).new_model(tiny_task.spec)
    )
    assert initial.keys() == {"classifier.weight", "classifier.bias"}
    states = private_states(experiment)
    assert set(IDS) - trained
    for id in IDS:
        same = fingerprint(states[id]["model"]) == fingerprint(initial)
        assert same == (id not in trained or id == 3)  # client 3 has one sample and cannot train


# BatchNorm


def test_averaged_statistics_weight_float_buffers_and_take_the_largest_counter(build):
    experiment = build(federation={"rounds": 1})
    run(experiment)
    replies = {id: reply["model"] for function, _, id, reply in experiment.fleet._host.replies if function == "train"}
    after = experiment.server.model.state_dict()
    sizes = {k: COUNTS[k].sum().item() for k in IDS}
    for buffer in ("running_mean", "running_var"):
        name = f"encoder.stage1.1.{buffer}"
        mean = sum(sizes[k] * replies[k][name].double() for k in IDS) / 60
        assert torch.allclose(after[name].double(), mean, rtol=1e-6, atol=1e-9)
        assert not torch.equal(replies[0][name], replies[5][name])
    # in 2 epochs clients 0, 1, 2, 3 and 5 take 2*3, 2*2, 2*1, 0 and 2*2 steps
    counters = [replies[k]["encoder.stage1.1.num_batches_tracked"].item() for k in IDS]
    assert counters == [6, 4, 2, 0, 4]
    assert after["encoder.stage1.1.num_batches_tracked"] == 6


def test_local_statistics_stay_with_their_client(build):
    experiment = build(federation={"batchnorm": "local", "rounds": 3})
    reports = run(experiment)
    host = experiment.fleet._host
    models = [part["model"] for part in [*host.messages, *(reply for *_, reply in host.replies)] if "model" in part]
    assert models
    assert not any("running" in name or "tracked" in name for model in models for name in model)
    assert any(name == "encoder.stage1.1.weight" for name in models[0])  # BatchNorm's scale is shared
    means = {id: state["model"]["encoder.stage1.1.running_mean"] for id, state in private_states(experiment).items()}
    trained = [0, 1, 2, 5]
    assert all(not torch.equal(means[a], means[b]) for a in trained for b in trained if a < b)
    assert torch.equal(means[3], torch.zeros(32))  # client 3 has too few samples for a batch
    assert all(r.global_accuracy is None for r in reports)
    assert [r.accuracy is None for r in reports] == [True, True, False]


def test_with_local_statistics_clients_are_judged_with_their_own(build, tiny_task):
    experiment = build(federation={"batchnorm": "local", "rounds": 3})
    report = run(experiment)[-1]
    right = {id: judge_by_loop(model, tiny_task).diagonal().sum().item() for id, model in personal_models(experiment)}
    assert len(set(right.values())) > 1
    assert report.accuracy == pytest.approx(sum(right.values()) / (5 * 40))
    assert report.shown == "matched"
    assert report.clients["global"]["worst_decile"] == pytest.approx(min(right.values()) / 40)


# checkpoints


def test_every_step_leaves_a_checkpoint_that_can_be_continued(build, tmp_path):
    whole = build(Finishing(), tmp_path / "whole", federation={"rounds": 3})
    (tmp_path / "whole").mkdir()
    expected = [run(whole), whole.export_model()]
    reports = []
    for step in range(1, 5):
        experiment = build(Finishing(), federation={"rounds": 3})
        saved, faults = checkpoint.latest(tmp_path / "checkpoints")
        assert not faults
        if saved is not None:
            experiment.load(saved)
        reports.append(experiment.advance())
        newest, faults = checkpoint.latest(tmp_path / "checkpoints")
        assert (newest.facts["step"], faults) == (step, [])
        assert newest.facts["report"]["accuracy"] == reports[-1].accuracy
    assert experiment.done
    assert [r.accuracy for r in reports] == [r.accuracy for r in expected[0]]
    assert experiment.export_model() == expected[1]
    assert experiment.server.state == whole.server.state == {"rounds": {"seen": 3}}


def test_checkpoint_every_two_rounds_keeps_even_rounds_and_the_end(build, tmp_path):
    experiment, seen = build(Finishing(), federation={"rounds": 5}, output={"checkpoint_every": 2, "keep": 9}), []
    while not experiment.done:
        experiment.advance()
        seen.append(sorted(int(folder.name) for folder in (tmp_path / "checkpoints").glob("*")))
    assert seen == [[], [2], [2], [2, 4], [2, 4, 5], [2, 4, 5, 6]]


def test_steps_after_which_a_run_can_be_branched_have_a_checkpoint_that_stays(build, tmp_path):
    run(build(Staged(), federation={"rounds": 4}, output={"checkpoint_every": 100, "keep": 2}))
    assert checkpoint.steps(tmp_path / "checkpoints") == [1, 4]


def test_a_resumed_run_keeps_the_checkpoint_that_was_best_before(validated, tmp_path, monkeypatch):
    def judge(method, server, fleet, task):
        return {"accuracy": 0.9 if server.round == 1 else 0.1}

    monkeypatch.setattr("raylt.core.evaluation.evaluator.validate", judge)
    config = configure(federation={"rounds": 5}, output={"keep": 2})
    first = make_experiment(config, validated, tmp_path)
    first.advance()
    first.advance()
    second = make_experiment(config, validated, tmp_path)
    saved, _ = checkpoint.latest(tmp_path / "checkpoints")
    second.load(saved)
    run(second)
    assert checkpoint.steps(tmp_path / "checkpoints") == [1, 4, 5]
    assert checkpoint.at(tmp_path / "checkpoints", 5).facts["best"] == {"step": 1, "accuracy": 0.9}


def test_newest_checkpoints_alone_are_kept_with_their_counts(build, tmp_path, monkeypatch):
    monkeypatch.setattr(counts, "KEPT", 1)
    run(build(federation={"rounds": 4}, output={"keep": 2}))
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").glob("*")) == ["000003", "000004"]
    assert sorted(file.stem for file in (tmp_path / "confusions").glob("*")) == ["000003", "000004"]


def test_files_of_clients_that_did_not_train_are_carried_on_and_not_written_again(build, tmp_path, monkeypatch):
    monkeypatch.setattr("raylt.core.checkpoint.client_states.PACK_BYTES", 1)  # a file per client, as with large states
    monkeypatch.setattr("raylt.core.checkpoint.client_states.SMALL_PACK_BYTES", 1)
    # personal models are judged after the last round only, which is round 4
    experiment = build(OwnClassifier(), federation={"participation": 0.3, "rounds": 4}, output={"keep": 3}, seed=2)
    for _ in range(3):
        experiment.advance()
    trained = {
        id
        for function, round, id, _ in experiment.fleet._host.replies
        if (function, round) in (("train", 2), ("train", 3))
    }
    folder = tmp_path / "checkpoints"
    early = {id for function, round, id, _ in experiment.fleet._host.replies if (function, round) == ("train", 1)}
    first, third = (
        {
            id: folder / f"{step:06d}/{name}.safetensors"
            for id, name in part_of_client(checkpoint.at(folder, step).parts).items()
        }
        for step in (1, 3)
    )
    same = {id for id in early if first[id].name == third[id].name and first[id].samefile(third[id])}
    assert early - trained
    assert early & trained
    assert same == early - trained


def test_linked_private_states_survive_the_removal_of_older_checkpoints(build, tmp_path):
    experiment = build(OwnClassifier(), federation={"participation": 0.3, "rounds": 5}, output={"keep": 2})
    for _ in range(4):
        experiment.advance()
    saved, faults = checkpoint.latest(tmp_path / "checkpoints")
    assert not faults
    for id, state in experiment.fleet.private_states(experiment.fleet._private):
        assert fingerprint(SavedStates(saved).read(id)) == fingerprint(state)


def test_checkpoint_after_a_gap_holds_the_clients_of_all_rounds_since_the_last(build, tmp_path):
    experiment = build(
        OwnClassifier(), federation={"participation": 0.3, "rounds": 5}, output={"checkpoint_every": 2, "keep": 9}
    )
    for _ in range(4):
        experiment.advance()
    saved, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert {id: fingerprint(SavedStates(saved).read(id)) for id in experiment.fleet._private} == {
        id: fingerprint(state) for id, state in experiment.fleet.private_states(experiment.fleet._private)
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_run_that_holds_a_validation_part_is_judged_on_it_and_trains_the_same(method, tmp_path):
    ended = []
    for every in (1, 2):
        config = load(
            None,
            [
                "data.source=digits",
                "data.clients=3",
                "data.validation=0.2",
                f"method={method}",
                f"evaluation.every={every}",
                "federation.rounds=2",
                "evaluation.personal=0",
            ],
        )
        experiment = make_experiment(config, build_task(config.data), tmp_path / str(every))
        first, last = experiment.step(), experiment.step()
        # FedAvg is validated in the rounds that are judged anyway
        assert ("validation" in first.figures) == (every == 1 and method == "fedavg")
        assert 0 < last.figures["validation"]["accuracy"] <= 1
        assert last.figures["validation"]["accuracy"] != last.accuracy
        assert "judge" not in last.traffic  # a client's own judgement is sent by no client
        ended.append((fingerprint(experiment.server.model.state_dict()), last.figures, last.accuracy))
    assert ended[0] == ended[1]


def test_checkpoints_of_a_resumed_run_hold_the_clients_of_all_rounds(build, tmp_path):
    settings = {"participation": 0.3, "rounds": 5}
    first, second = (build(OwnClassifier(), federation=settings) for _ in range(2))
    for _ in range(2):
        first.advance()
    second.load(checkpoint.latest(tmp_path / "checkpoints")[0])
    report = second.advance()
    states = SavedStates(checkpoint.latest(tmp_path / "checkpoints")[0])
    assert states.part_of.keys() > set(report.participants)
    assert {id: fingerprint(states.read(id)) for id in states.part_of} == {
        id: fingerprint(state) for id, state in second.fleet.private_states(second.fleet._private)
    }


class Exploding(FedAvg):
    """FedAvg with a large loss in one round; in the next, two of five clients send too large values or raise."""

    name: ClassVar[str] = "exploding"

    def train(self, client, message):
        reply = super().train(client, message)
        if client.round == self.last + 1 and client.id in (1, 3):
            assert not self.raises
            reply.tree["model"]["classifier.weight"] = reply.tree["model"]["classifier.weight"] + 1e7
        return reply

    def round(self, server, fleet):
        super().round(server, fleet)
        server.log(loss=server.figures["loss"] * (self.factor if server.round == self.last else 1.0))

    factor: float = 100.0
    last: int = 1
    raises: bool = False


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("factor", "last", "code"),
    [(100.0, 1, "training.diverged"), (100.0, 2, "training.diverged"), (1.0, 1, "reply.too-few")],
)
def test_too_large_values_after_a_loss_far_above_guessing_are_divergence(build, tmp_path, resumed, factor, last, code):
    method, settings = Exploding(factor=factor, last=last), {"quorum": 0.8, "rounds": 3}
    experiment = build(method, federation=settings)
    for _ in range(last):
        report = experiment.advance()
    if resumed:
        saved, _ = checkpoint.latest(tmp_path / "checkpoints")
        experiment = build(method, federation=settings)
        experiment.load(saved)
    with refused(code) as caught:
        experiment.advance()
    assert caught.value.details["cause"] == "reply.out-of-range"
    if code == "training.diverged":
        assert isinstance(caught.value, Diverged)
        assert caught.value.details["loss"] == report.figures["loss"]
        assert (caught.value.details["round"], caught.value.details["key"]) == (last, "local.lr")


def test_clients_that_raise_after_a_loss_far_above_guessing_are_no_divergence(build):
    experiment = build(Exploding(raises=True), federation={"quorum": 0.8, "retries": 0})
    experiment.fleet.on_note = lambda text: None
    experiment.advance()
    with refused("reply.too-few", cause="client.failed"):
        experiment.advance()


class LogsTwoLosses(Exploding):
    """The same, with a loss of two parts as its figure."""

    name: ClassVar[str] = "logs_two_losses"

    def round(self, server, fleet):
        super().round(server, fleet)
        server.log(loss={"ce": server.figures["loss"], "kd": 0.0})


@pytest.mark.parametrize("resumed", [False, True])
def test_a_loss_that_is_no_number_does_not_hide_that_there_are_too_few_replies(build, tmp_path, resumed):
    method, settings = LogsTwoLosses(), {"quorum": 0.8}
    experiment = build(method, federation=settings)
    experiment.advance()
    if resumed:
        saved, _ = checkpoint.latest(tmp_path / "checkpoints")
        experiment = build(method, federation=settings)
        experiment.load(saved)
    with refused("reply.too-few"):
        experiment.advance()
