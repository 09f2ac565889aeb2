import naive
import pytest
import torch
from rounds import flat, replies, run, start
from tiny import configure, fingerprint, make_experiment, open_client, private_states
from torch.nn import functional as F

from raylt.core.method import Method
from raylt.methods.fedrod import FedRoD


class Balanced(Method):
    """FedAvg with the balanced softmax, which is FedRoD without its personal half."""

    name = "balanced"
    paper = "Ren et al., NeurIPS 2020"

    def objective(self, client, message):
        return lambda batch: F.cross_entropy(client.model(batch.x) + client.counts.log(), batch.y)


def scramble(client) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in client.model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator)


def test_objective_is_balanced_softmax_of_g_and_cross_entropy_of_g_plus_p(tiny_task):
    client = open_client(tiny_task, FedRoD(), 1)  # class counts 8, 3, 3, 0
    scramble(client)
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    with torch.no_grad():
        z = client.model.encoder(batch.x)
        g, p = client.model.classifier(z).double(), client.model.personal(z).double()
        total = 0.0
        for i, c in enumerate(batch.y.tolist()):
            weighed = {j: client.counts[j].item() * g[i, j].exp() for j in range(3)}  # the client lacks class 3
            total -= (weighed[c] / sum(weighed.values())).log() + (g + p)[i].log_softmax(0)[c]
    loss = FedRoD().objective(client, {})(batch)
    assert loss.item() == pytest.approx((total / 14).item(), rel=1e-5)


def test_personal_loss_moves_p_alone(tiny_task):
    client = open_client(tiny_task, FedRoD(), 1)
    scramble(client)
    client.model.eval()
    batch, params = client.samples.batch(torch.arange(14)), dict(client.model.named_parameters())
    whole = torch.autograd.grad(FedRoD().objective(client, {})(batch), list(params.values()))
    balanced = F.cross_entropy(client.model(batch.x) + client.counts.log(), batch.y)
    alone = torch.autograd.grad(balanced, list(params.values()), allow_unused=True)
    for name, g, expected in zip(params, whole, alone, strict=True):
        if name.startswith("personal."):
            assert expected is None
            assert g.any()
        else:
            assert torch.allclose(g, expected, atol=1e-7), name


def test_generic_half_is_fedavg_with_the_balanced_softmax(tiny_task, tmp_path):
    plain, both = (run(tiny_task, tmp_path, method) for method in (Balanced(), FedRoD()))
    shared = {name: value for name, value in both.server.model.state_dict().items() if not name.startswith("personal.")}
    assert fingerprint(shared) == fingerprint(plain.server.model.state_dict())
    judged = both.method.global_model(both.server).state_dict()
    assert fingerprint(judged) == fingerprint(plain.server.model.state_dict())


def test_personal_classifiers_stay_at_their_clients(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedRoD())
    message = experiment.method.message(experiment.server)
    reply = replies(experiment, [0, 1], "model", "loss", message=message)
    assert not [name for name in [*message["model"], *reply[0]["model"]] if name.startswith("personal.")]
    own = {id: state["model"] for id, state in private_states(experiment).items()}
    assert own[0].keys() == {"personal.weight", "personal.bias"}
    assert fingerprint(own[0]) != fingerprint(own[1])
    assert not any(value.any() for value in own[2].values())  # client 2 was never asked to train


def test_client_is_judged_by_the_sum_of_both_classifiers(tiny_task):
    client = open_client(tiny_task, FedRoD(), 1)
    scramble(client)
    batch = client.samples.batch(torch.arange(14))
    with torch.no_grad():
        z = client.model.eval().encoder(batch.x)
        expected = client.model.classifier(z) + client.model.personal(z)
        assert torch.allclose(FedRoD().client_model(client).eval()(batch.x), expected, atol=1e-5)


def test_client_that_never_took_part_answers_as_the_generic_classifier_does(tiny_task, tmp_path):
    server = run(tiny_task, tmp_path, FedRoD(), rounds=1).server
    client = open_client(tiny_task, FedRoD())
    client.receive(FedRoD().shared(server.model))
    assert fingerprint(FedRoD().client_model(client).state_dict()) == fingerprint(
        FedRoD().global_model(server).state_dict()
    )
    assert torch.isfinite(flat(run(tiny_task, tmp_path, FedRoD(), rounds=1))).all()


def test_balanced_softmax_of_equal_counts_is_cross_entropy(tiny_task):
    client = open_client(tiny_task, FedRoD())
    client.counts = torch.tensor([5, 5, 5, 5])
    client.model.eval()
    batch = client.samples.batch(torch.arange(8))
    plain = F.cross_entropy(client.model(batch.x), batch.y)
    # P is 0 at the start, so both terms are the plain cross-entropy
    assert FedRoD().objective(client, {})(batch).item() == pytest.approx(2 * plain.item(), rel=1e-6)


def test_sum_of_both_classifiers_is_what_the_run_reports_of_each_client_and_g_of_all(tiny_task, tmp_path):
    experiment = make_experiment(configure(evaluation={"personal": 1}), tiny_task, tmp_path, FedRoD())
    report = experiment.step()
    own, (x, y) = private_states(experiment), (naive.pixels(torch.from_numpy(tiny_task.test.x)), tiny_task.test.y)
    model, accuracy = experiment.server.model.eval(), {}
    with torch.no_grad():
        z = model.encoder(x)
        generic = model.classifier(z)
        for id, state in own.items():
            personal = F.linear(z, state["model"]["personal.weight"], state["model"]["personal.bias"])
            accuracy[id] = ((generic + personal).argmax(1).numpy() == y).mean()
    assert report.global_accuracy == pytest.approx((generic.argmax(1).numpy() == y).mean())
    assert {id: report.by_client["global"][id] for id in own} == pytest.approx(accuracy)
    assert report.accuracy == pytest.approx(sum(accuracy.values()) / len(accuracy))
    assert len(set(accuracy.values())) > 1
