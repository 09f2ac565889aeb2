import pytest
import torch
from tiny import COUNTS, CPU, Recorder, configure, fingerprint, make_experiment, make_setup, private_states

from raylt import tree
from raylt.core.evaluation.client_models import Judge, counts_on, judged_entries
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.fleet.reductions import each
from raylt.methods import make_method
from raylt.methods.bpfed.method import BPFed
from raylt.methods.fedavg import FedAvg
from raylt.methods.fedper import FedPer


def run(task, folder, method, **parts):
    experiment = make_experiment(configure(**parts), task, folder, method, host=Recorder)
    reports = []
    while not experiment.done:
        reports.append(experiment.step())
    return experiment, reports


def bits(experiment):
    states = private_states(experiment)
    return [fingerprint(experiment.server.model.state_dict())] + [fingerprint(states[id]["model"]) for id in states]


@pytest.mark.parametrize("participation", [1.0, 0.3])
def test_bpfed_with_everything_off_is_fedper_bit_for_bit(tiny_task, tmp_path, participation):
    federation = {"rounds": 3, "participation": participation}
    off = BPFed(alpha=0, crt=False, lws=False, initial="common")
    both = [run(tiny_task, tmp_path, method, federation=federation) for method in (FedPer(), off)]
    assert bits(both[0][0]) == bits(both[1][0])
    assert [r.accuracy for r in both[0][1]] == [r.accuracy for r in both[1][1][:3]]


def test_encoders_are_averaged_by_samples_and_classifiers_are_not(tiny_task, tmp_path):
    # one round from common weights: each client computes the same as in FedAvg, which averages both parts
    reference, _ = run(tiny_task, tmp_path, FedAvg(), federation={"rounds": 1})
    experiment, _ = run(tiny_task, tmp_path, FedPer(), federation={"rounds": 1})
    replies = {id: reply["model"] for name, _, id, reply in reference.fleet._host.replies if name == "train"}
    own = private_states(experiment)
    for id, reply in replies.items():
        assert torch.equal(own[id]["model"]["classifier.weight"], reply["classifier.weight"])
    weights = COUNTS.sum(1)
    for name, value in experiment.server.model.state_dict().items():
        if not name.startswith("encoder."):
            continue
        if value.is_floating_point():  # this includes BatchNorm's running statistics
            mean = sum(weights[id] * reply[name].double() for id, reply in replies.items()) / weights.sum()
            assert torch.allclose(value.double(), mean, atol=1e-6), name
        assert torch.equal(value, reference.server.model.state_dict()[name]), name


def test_classifiers_never_travel_and_differ_between_clients(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, FedPer(), evaluation={"personal": 1})
    host = experiment.fleet._host
    names = {path for sent in [*host.messages, *(reply for *_, reply in host.replies)] for path, _ in tree.leaves(sent)}
    assert any("running_mean" in name for name in names)
    assert not any("classifier" in name for name in names)
    own = {fingerprint(state["model"]) for id, state in private_states(experiment).items() if id != 3}
    assert len(own) == 4  # client 3 has one sample and cannot train
    start = make_setup(experiment.config, FedPer()).new_model(tiny_task.spec)
    assert fingerprint(private_states(experiment)[3]["model"]) == fingerprint(start.entries("classifier."))


def test_private_state_of_clients_that_are_not_sampled_stays(tiny_task, tmp_path):
    method = make_method({"name": "fedper"})
    experiment = make_experiment(
        configure(federation={"participation": 0.3}), tiny_task, tmp_path, method, host=Recorder
    )
    experiment.step()
    before = {id: fingerprint(state) for id, state in private_states(experiment).items()}
    experiment.step()
    asked = {id for name, round, id, _ in experiment.fleet._host.replies if name == "train" and round == 2}
    after = {id: fingerprint(state) for id, state in private_states(experiment).items()}
    assert {id for id in after if after[id] != before[id]} <= asked
    assert asked
    assert experiment.server.device == CPU


@pytest.mark.parametrize(
    "method",
    [FedPer(), BPFed(alpha=0, retrain_epochs=1), BPFed(alpha=0, retrain_epochs=1, argmax="owned")],
    ids=["fedper", "bpfed", "bpfed-owned"],
)
def test_clients_are_judged_as_if_each_had_encoded_the_test_set_itself(tiny_task, tmp_path, method, monkeypatch):
    experiment, _ = run(tiny_task, tmp_path, method, federation={"rounds": 2})
    fleet, encodings = experiment.fleet, []
    cells = counts_on(tiny_task.test, tiny_task.classes)
    fleet._host.model.encoder.register_forward_hook(lambda *_: encodings.append(1))

    def judged():
        encodings.clear()
        message = {"model": judged_entries(experiment.server, method)}
        got = fleet.ask(Judge(method).judge, fleet.everyone, message, confusion=cells, not_numbers=each)
        return {id: counts.tolist() for id, counts in got["confusion"].items()}, len(encodings)

    found, passes = judged()
    assert passes == 0  # the last step's evaluation has already encoded the images, in one batch
    with monkeypatch.context() as patch:
        patch.setattr(EvaluationSet, "_has_features_of", lambda *_: False)
        assert judged() == (found, len(fleet.ids))
    with torch.no_grad():
        experiment.server.model.get_parameter("encoder.stage2.0.weight").mul_(-1)
    moved, passes = judged()
    assert passes == 1
    assert moved != found


def test_judging_that_broke_off_is_taken_up_again(tiny_task, tmp_path):
    """Judging is interrupted as by a full device, after which the data of other clients are dropped."""
    experiment, _ = run(tiny_task, tmp_path, FedPer(), federation={"rounds": 1})
    model = experiment.fleet._host.model
    tests, fresh = (EvaluationSet(tiny_task.test, tiny_task.spec, torch.device("cpu")) for _ in range(2))
    whole = tests.counts(model, FedPer().predict, 5).all
    with torch.no_grad():
        model.get_parameter("encoder.stage2.0.weight").mul_(-1)
    calls = []

    def full_at_the_second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    hook = model.encoder.register_forward_hook(full_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        tests.counts(model, FedPer().predict, 5)
    hook.remove()
    again = tests.counts(model, FedPer().predict, 5).all
    assert torch.equal(again, fresh.counts(model, FedPer().predict, 5).all)
    assert whole.sum() == again.sum()


def test_a_prediction_from_changed_images_has_their_features_and_not_those_that_are_kept(tiny_task, tmp_path):
    experiment, _ = run(tiny_task, tmp_path, FedPer(), federation={"rounds": 1})
    model = experiment.fleet._host.model
    tests = EvaluationSet(tiny_task.test, tiny_task.spec, torch.device("cpu"))
    same = []

    def predict(judged, x):
        answers = judged(-x)
        same.append(torch.equal(answers, model(-x)))
        return answers

    tests.counts(model, predict, 50)
    assert same == [True]
