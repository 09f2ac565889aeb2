import math

import naive
import pytest
import torch
from killed import resume, run_and_kill
from rounds import run
from tiny import configure, fingerprint, make_experiment, open_client, private_states
from torch.nn import functional as F

from raylt.methods.fedgrab import Balancer, FedGraB, boost, estimated_shares, exempt_classes, most_frequent


def test_weight_of_a_controllers_output():
    # (10 / 9) / (1 / 9 + 1) = 1, and 10 where exp(-0.5 x) vanishes
    assert boost(torch.tensor([0.0, 1e4, -1e4])).tolist() == pytest.approx([1, 10, 0], abs=1e-5)
    assert boost(torch.tensor(2.0)).item() == pytest.approx((10 / 9) / (1 / 9 + math.exp(-1)))


def test_classes_are_exempt_from_frequent_to_rare():
    drawn = torch.stack([exempt_classes(4, torch.Generator().manual_seed(seed)) for seed in range(4000)]).double()
    # the first class is always exempt, the second with 0.1^(1/3); the third with 0.1^(2/3) if the second is, else with
    # 0.1^(1/3)
    p, q = 0.1 ** (1 / 3), 0.1 ** (2 / 3)
    third = p * q + (1 - p) * p
    fourth = p * q * 0.1 + (p * (1 - q) + (1 - p) * p) * q + (1 - p) ** 2 * p
    assert drawn.mean(0).tolist() == pytest.approx([1, p, third, fourth], abs=0.03)
    assert exempt_classes(1, torch.Generator().manual_seed(0)).tolist() == [True]


def test_controller_by_hand(tiny_task):
    balancer = Balancer(open_client(tiny_task, FedGraB()), FedGraB(kp=2, ki=0.5, kd=4))
    for difference, output in ((-1.0, 2 + 0.5 + 4), (-3.0, None), (-2.0, None)):
        balancer.state["difference"] = torch.full((4,), difference)
        made = balancer.control()[0].item()
        if output is not None:
            assert made == pytest.approx(output)
    # errors 1, 3, 2: 6.5 + 2 (3 - 1) + 0.5 * 3 + 4 (3 - 2) = 16; 16 + 2 (2 - 3) + 0.5 * 2 + 4 (2 - 6 + 1) = 3
    assert made == pytest.approx(3)


def test_round_is_that_of_naive_code_and_controllers_go_on_in_the_next(tiny_task, tmp_path):
    """Compare the controllers' weights, the loss and the summed gradients, class by class and batch by batch."""
    experiment = run(tiny_task, tmp_path, FedGraB(), rounds=2)
    states, model = {id: ([0.0] * 4, [[0.0] * 4, [0.0] * 4], [0.0] * 4) for id in naive.clients_of(tiny_task)}, None
    for t in (1, 2):
        ends, weights = [], []
        for id in naive.clients_of(tiny_task):
            local, (x, y) = naive.new_model(tiny_task), naive.client_data(tiny_task, id)
            if model is not None:
                local.load_state_dict(model)
            difference, errors, output = states[id]
            order = naive.generator("order", "train", t, id)

            def loss(rows, local=local, x=x, y=y, difference=difference, errors=errors, output=output, order=order):
                logits, value, n = local(x[rows]), 0.0, len(rows)
                uniform = torch.rand(4, generator=order)
                left_out = 0
                for c in range(4):
                    e = -difference[c]
                    output[c] += 10 * (e - errors[0][c]) + 0.01 * e + 0.1 * (e - 2 * errors[0][c] + errors[1][c])
                    errors[1][c], errors[0][c] = errors[0][c], e
                    w, v = ((10 / 9) / (1 / 9 + math.exp(-0.5 * o)) for o in (output[c], -output[c]))
                    own = y[rows] == c
                    s = logits[:, c].detach().sigmoid()
                    if uniform[c] < 0.1 ** (left_out / 3):
                        left_out += 1
                        w = v = 1.0
                    else:
                        difference[c] += (w * (1 - s[own]).sum() - v * s[~own].sum()).item() / n
                    positive, negative = F.logsigmoid(logits[own, c]).sum(), F.logsigmoid(-logits[~own, c]).sum()
                    value = value - (w * positive + v * negative) / n
                return value

            naive.train(local, naive.epochs_of(len(y), order), loss)
            ends.append(naive.entries(local))
            weights.append(len(y))
        model = naive.average(ends, weights)
    assert naive.differences(naive.entries(experiment.server.model), model, atol=2e-4) == {}
    for id, state in private_states(experiment).items():
        assert state["state"]["balancer"]["difference"].tolist() == pytest.approx(states[id][0], abs=1e-3)


def test_without_gains_every_weight_is_one(tiny_task):
    client = open_client(tiny_task, FedGraB())
    balancer, batch = Balancer(client, FedGraB(kp=0, ki=0, kd=0)), client.samples.batch(torch.arange(8))
    client.model.eval()
    for _ in range(3):
        loss = balancer(batch)
    target = F.one_hot(batch.y, 4).float()
    plain = F.binary_cross_entropy_with_logits(client.model(batch.x), target, reduction="sum") / 8
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize("field", [{"kp": 1.0}, {"ki": 1.0}, {"kd": 5.0}], ids=str)
def test_every_gain_changes_the_model(tiny_task, tmp_path, field):
    plain, other = (
        fingerprint(run(tiny_task, tmp_path, FedGraB(**fields), rounds=1).server.model.state_dict())
        for fields in ({}, field)
    )
    assert plain != other


def test_prior_of_the_classes_from_a_classifier_by_hand():
    # lengths 5, 3, 1: mean 3, deviation sqrt(8 / 3); above the smallest by 4, 2, 0 deviations; shares 2/3, 1/3, 0
    weight = torch.tensor([[3.0, 4.0], [0.0, 3.0], [1.0, 0.0]])
    assert estimated_shares(weight).tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert estimated_shares(torch.eye(4)).tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, []), (0.3, [2]), (0.5, [2]), (0.51, [0, 2]), (0.95, [0, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_most_frequent_classes_that_hold_a_share(share, expected):
    chosen = most_frequent(torch.tensor([0.3, 0.04, 0.5, 0.16], dtype=torch.float64), share)
    assert chosen.nonzero().flatten().tolist() == expected


def test_controllers_of_frequent_classes_are_shut_and_forget(tiny_task):
    client, method = open_client(tiny_task, FedGraB()), FedGraB()
    balancer = Balancer(client, method, torch.tensor([True, False, False, True]))
    free = Balancer(client, method)
    for one in (balancer, free):
        one.state["difference"] = torch.tensor([-1.0, -2.0, 3.0, -4.0])
        one.control()
        one.state["difference"] = torch.tensor([-2.0, -2.0, 1.0, -1.0])
    made, unbound = balancer.control(), free.control()
    assert made.tolist() == [0, unbound[1].item(), unbound[2].item(), 0]
    assert all(balancer.state[name][0] == 0 for name in ("last", "before_last", "output"))
    assert balancer.state["difference"][0] == -2


def test_differences_of_shut_classes_are_still_summed(tiny_task):
    client, method = open_client(tiny_task, FedGraB()), FedGraB()
    balancer = Balancer(client, method, torch.ones(4, dtype=torch.bool))
    for _ in range(8):  # the first class is exempt in every batch, the others in some
        balancer(client.samples.batch(torch.arange(len(client))))
    assert (balancer.state["difference"] != 0).tolist() == [False, True, True, True]


@pytest.mark.parametrize("share", [0.5, 0.75])
def test_analyser_shuts_by_the_mean_of_the_rounds_before(tiny_task, tmp_path, share):
    method = FedGraB(shut=share)
    experiment, seen = make_experiment(configure(federation={"rounds": 3}), tiny_task, tmp_path, method), []
    for t in (1, 2, 3):
        assert ("shut" in method.message(experiment.server)) == (t > 1)
        experiment.step()
        seen.append(estimated_shares(experiment.server.model.classifier.weight.detach()))
        mean = sum(seen) / len(seen)
        shut = method.message(experiment.server)["shut"]
        assert experiment.server.state["shares"].tolist() == pytest.approx(mean.tolist())
        assert torch.equal(shut, most_frequent(mean, share))
        assert 0 < shut.sum() < 4
    ends = private_states(experiment)
    message = method.message(experiment.server)
    assert all(
        set((state["state"]["balancer"]["output"] == 0).nonzero().flatten().tolist())
        >= set(most_frequent(sum(seen[:2]) / 2, share).nonzero().flatten().tolist())
        for state in ends.values()
    )
    assert "shut" in message


def test_without_the_analyser_nothing_is_sent_and_with_it_the_second_round_is_another(tiny_task, tmp_path):
    assert "shut" not in FedGraB().message(run(tiny_task, tmp_path, FedGraB(), rounds=1).server)
    first, second = (
        [
            fingerprint(run(tiny_task, tmp_path, method, rounds=rounds).server.model.state_dict())
            for method in (FedGraB(), FedGraB(shut=0.75))
        ]
        for rounds in (1, 2)
    )
    assert first[0] == first[1]
    assert second[0] != second[1]


@pytest.mark.slow
@pytest.mark.soak
def test_killed_in_the_analyser_and_resumed_it_ends_the_same(tmp_path):
    run_and_kill(
        tmp_path,
        ["method=fedgrab", "method.shut=0.75", "federation.rounds=3", "local.epochs=1", "data.clients=3"],
        "raylt.methods.fedgrab",
        "estimated_shares",
        2,
    )
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 1
    straight, killed = resume(tmp_path)
    assert straight["model_sha256"] == killed["model_sha256"]
