import copy

import naive
import pytest
import torch
from refusals import refused
from rounds import run, start
from tiny import configure, fingerprint, make_setup, open_client
from torch import nn
from torch.nn import functional as F

from raylt.errors import ConfigError
from raylt.methods import flea
from raylt.methods.flea import FLea, distance_correlation, shared_fault, shared_samples
from raylt.models import SplitModel, build_model
from raylt.models.layers import halves
from raylt.ops.distillation import divergence

SHARE = {"share": 0.3}


def correlation(x, a):
    """Compute the distance correlation by its definition, in loops."""
    n = len(x)
    distances = [[[(p - q).norm().item() for q in points] for p in points] for points in (x.flatten(1), a.flatten(1))]
    centred = []
    for d in distances:
        rows = [sum(row) / n for row in d]
        grand = sum(rows) / n
        centred.append([[d[i][j] - rows[i] - rows[j] + grand for j in range(n)] for i in range(n)])

    def moment(p, q):
        return sum(p[i][j] * q[i][j] for i in range(n) for j in range(n)) / n**2

    p, q = centred
    return (moment(p, q) / (moment(p, p) * moment(q, q)) ** 0.5) ** 0.5


def test_distance_correlation_is_that_of_its_definition():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 2, generator=generator)
    a = x.flatten(1) @ torch.randn(6, 4, generator=generator) + torch.randn(7, 4, generator=generator)
    assert distance_correlation(x, a).item() == pytest.approx(correlation(x, a), rel=1e-4)
    assert distance_correlation(x, 3 * x + 1).item() == pytest.approx(1, abs=1e-4)


def test_distance_correlation_of_equal_points_is_finite_with_its_gradient():
    a = torch.ones(4, 3, requires_grad=True)
    value = distance_correlation(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), a)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(a.grad).all()


def test_distance_correlation_has_the_gradient_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    x, a = torch.randn(6, 3, generator=generator), torch.randn(6, 2, generator=generator).requires_grad_()
    (gradient,) = torch.autograd.grad(distance_correlation(x, a), a)
    for i, j in ((0, 0), (2, 1), (5, 0)):
        step = torch.zeros_like(a)
        step[i, j] = 1e-2
        slope = (distance_correlation(x, a + step) - distance_correlation(x, a - step)) / 2e-2
        assert gradient[i, j].item() == pytest.approx(slope.item(), abs=2e-3)


def test_divergence_is_from_the_received_model_to_the_clients():
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.9, 0.1]])
    expected = 0.5 * (torch.log(torch.tensor(0.5 / 0.9)) + torch.log(torch.tensor(0.5 / 0.1)))
    assert divergence(q.log() + 3, teacher=p.log()).item() == pytest.approx(expected.item(), rel=1e-5)


def test_shares_of_a_mixture_are_beta_2_2():
    lam = torch.rand(20000, 3, generator=torch.Generator().manual_seed(0)).median(1).values
    assert lam.mean().item() == pytest.approx(0.5, abs=0.01)
    assert lam.var().item() == pytest.approx(1 / 20, rel=0.05)


def test_buffer_holds_the_activations_of_the_last_rounds_clients(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FLea(**SHARE), rounds=2)
    method, server = experiment.method, experiment.server
    a, y = [], []
    for id in naive.clients_of(tiny_task):
        rows = method.shared_rows(open_client(tiny_task, method, id, experiment.config))
        x, labels = naive.client_data(tiny_task, id)
        assert len(rows) == -(-len(labels) * 3 // 10)  # 30 % of the samples, rounded up
        with torch.no_grad():
            a.append(server.model.eval().encoder.stage1(x[rows]))
        y.append(labels[rows])
    assert torch.allclose(server.state["buffer"]["a"], torch.cat(a), atol=1e-5)
    assert server.state["buffer"]["y"].tolist() == torch.cat(y).tolist()


def test_a_whole_number_of_samples_is_not_rounded_up():
    assert 0.07 * 100 > 7  # as floats
    assert [shared_samples(0.07, n) for n in (1, 100, 101)] == [1, 7, 8]


def test_shared_samples_are_drawn_at_random(tiny_task):
    shared = [FLea(**SHARE).shared_rows(open_client(tiny_task, FLea(), id)) for id in (0, 1, 2)]
    assert any(not torch.equal(rows, torch.arange(len(rows))) for rows in shared)
    assert all(len(rows.unique()) == len(rows) for rows in shared)


def test_objective_of_the_second_round_written_out(tiny_task, tmp_path):
    """The value is exact, while the models of two rounds are compared with a large tolerance."""
    method = FLea(**SHARE, kd=0.7, dcor=2.0)
    experiment = run(tiny_task, tmp_path, method, rounds=1)
    message = method.message(experiment.server)
    client = open_client(tiny_task, method, 1, experiment.config)
    client.begin("train", 2)
    client.receive(message["model"])
    objective, batch = method.objective(client, message), client.samples.batch(torch.arange(8))
    client.model.eval()
    with torch.no_grad():
        value = objective(batch).item()
    order = naive.generator("order", "train", 2, 1)
    drawn = torch.randint(len(message["buffer"]["y"]), (8,), generator=order)
    lam = torch.rand(8, 3, generator=order).sort(1).values[:, 1]
    other, labels = message["buffer"]["a"][drawn], message["buffer"]["y"][drawn]
    net = client.model
    with torch.no_grad():
        a = net.encoder.stage1(batch.x)

        def upper(h):
            return net.classifier(net.encoder.pool(net.encoder.stage2(h)))

        log_p = upper(lam[:, None, None, None] * a + (1 - lam[:, None, None, None]) * other).log_softmax(1)
        own, theirs = (log_p[torch.arange(8), y] for y in (batch.y, labels))
        mixed = -(lam * own + (1 - lam) * theirs).mean()
        # the client's model is still the received one, so there is no divergence
        expected = F.cross_entropy(upper(a), batch.y) + mixed + 2 * distance_correlation(batch.x, a)
    assert value == pytest.approx(expected.item(), rel=1e-5)


# the gradient of the distance correlation's square root amplifies rounding: 3e-3 on one kind of processor
TOLERANCE = 5e-3


def naive_round(task, model, buffer, shared_of, method):
    """Do a round of all clients in plain torch; return the averaged entries."""
    start, ends, weights = naive.entries(model), [], []
    for id in naive.clients_of(task):
        local, received = copy.deepcopy(model), copy.deepcopy(model).eval()
        x, y = naive.client_data(task, id)
        call = naive.generator("order", "train", 1 if buffer is None else 2, id)

        def kl(p, q):
            return (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum(1).mean()

        def loss(rows, x=x, y=y, local=local, received=received, call=call):
            a = local.encoder.stage1(x[rows])

            def upper(net, h):
                return net.classifier(net.encoder.pool(net.encoder.stage2(h)))

            if buffer is None:
                logits = upper(local, a)
                with torch.no_grad():
                    target = received(x[rows])
                return (
                    F.cross_entropy(logits, y[rows]) + 0.5 * kl(target, logits) + 3 * distance_correlation(x[rows], a)
                )
            drawn = torch.randint(len(buffer["y"]), (len(rows),), generator=call)
            other, labels = buffer["a"][drawn], buffer["y"][drawn]
            lam = torch.rand(len(rows), 3, generator=call).sort(1).values[:, 1]
            wide = lam[:, None, None, None]
            mixed = upper(local, wide * a + (1 - wide) * other).log_softmax(1)
            soft = -(lam * mixed[torch.arange(len(rows)), y[rows]] + (1 - lam) * mixed[torch.arange(len(rows)), labels])
            plain = F.cross_entropy(upper(local, a), y[rows])
            with torch.no_grad():
                target = upper(received, other)
            return plain + soft.mean() + kl(target, upper(local, other)) + 3 * distance_correlation(x[rows], a)

        epochs = naive.EPOCHS * (3 if buffer is None else 1)
        naive.train(local, naive.epochs_of(len(y), call, epochs), loss)
        ends.append(naive.entries(local))
        weights.append(len(y))
    model.load_state_dict(start)
    return naive.average(ends, weights)


def test_two_rounds_are_those_of_naive_code(tiny_task, tmp_path):
    method = FLea(**SHARE)
    experiment = run(tiny_task, tmp_path, method, rounds=1)
    model = naive.new_model(tiny_task)
    first = naive_round(tiny_task, model, None, None, method)
    assert naive.differences(naive.entries(experiment.server.model), first, atol=TOLERANCE) == {}
    buffer = experiment.server.state["buffer"]
    model.load_state_dict(experiment.server.model.state_dict())
    experiment.server.round = 2
    experiment.fleet.begin(2)
    method.round(experiment.server, experiment.fleet)
    second = naive_round(tiny_task, model, buffer, None, method)
    assert naive.differences(naive.entries(experiment.server.model), second, atol=TOLERANCE) == {}


@pytest.mark.parametrize(("message", "steps"), [({}, 12), ({"buffer": {}}, 4)], ids=["first round", "later"])
def test_a_number_of_steps_is_that_of_a_later_round(tiny_task, monkeypatch, message, steps):
    client = open_client(tiny_task, FLea(), 0, configure(local={"steps": 4}))
    taken = []

    def count(method, client, message, epochs):
        taken.append(client.steps(epochs))
        return {}

    monkeypatch.setattr(flea, "train_model", count)
    FLea().train(client, {"model": {}} | message)
    assert taken == [steps]


def test_distance_correlation_of_near_points_is_nearly_that_of_its_definition():
    generator = torch.Generator().manual_seed(0)
    x, a = (0.05 * torch.randn(8, 3, generator=generator) for _ in range(2))
    assert distance_correlation(x, a).item() == pytest.approx(correlation(x, a), abs=0.02)


def test_shared_samples_are_the_same_in_every_round(tiny_task):
    client = open_client(tiny_task, FLea(), 0)
    early = FLea(**SHARE).upload(client, {"encoder": {}}).tree["samples"]
    client.begin("upload", 7)
    late = FLea(**SHARE).upload(client, {"encoder": {}}).tree["samples"]
    assert fingerprint(early) == fingerprint(late)


@pytest.mark.parametrize("layer", ["stage3", "pool"])
def test_layer_that_is_not_there_is_refused(tiny_task, layer):
    with refused("model.lacks-layer", ConfigError, key="method.layer", value=layer):
        FLea(layer=layer).prepare(tiny_task, make_setup(configure()).config, build_model("small", 4, (8, 8, 1)))


def test_models_without_named_stages_are_answered_with_others(tiny_task):
    with refused("model.lacks-layer", ConfigError, key="method.layer") as caught:
        FLea().prepare(tiny_task, configure(), SplitModel(nn.Linear(1, 2), 2, 4))
    assert "Use a built-in model" in str(caught.value)


def test_layer_says_which_activations_travel(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FLea(layer="stage2"))
    lower, upper = halves(experiment.server.model, "stage2")
    assert [name for name, _ in lower.named_children()] == ["stage1", "stage2"]
    assert [name for name, _ in upper.named_children()] == ["pool"]
    assert experiment.method.activation_shape(experiment.server) == (64, 4, 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "field",
    [{"layer": "stage2"}, {"share": 0.6}, {"kd": 5.0}, {"dcor": 0.5}, {"warm_up": 1}, {"warm_kd": 5.0}],
    ids=str,
)
def test_every_field_changes_the_model(tiny_task, tmp_path, field):
    plain, other = (
        fingerprint(run(tiny_task, tmp_path, FLea(**SHARE | fields), rounds=2).server.model.state_dict())
        for fields in ({}, field)
    )
    assert plain != other


def test_activations_are_of_images_as_they_are(tiny_task, monkeypatch):
    client = open_client(tiny_task, FLea(), 0)
    monkeypatch.setattr(FLea, "shared_rows", lambda self, client: torch.tensor([0, 5]))
    reply = FLea().upload(client, {"encoder": {}})
    x, y = naive.client_data(tiny_task, 0)
    with torch.no_grad():
        expected = client.model.eval().encoder.stage1(x[[0, 5]])
    assert torch.allclose(torch.stack([reply.tree["samples"][i]["a"] for i in range(2)]), expected, atol=1e-5)
    assert [reply.tree["samples"][i]["y"] for i in range(2)] == y[[0, 5]].tolist()


def test_a_client_shares_as_many_samples_as_it_has_of_classes_that_exist():
    samples = {i: {"a": torch.zeros(1), "y": 3} for i in range(2)}
    assert shared_fault(20, {"samples": samples}, 0.1, 4) is None
    for lie in ({}, {0: samples[0]}, samples | {1: {"a": torch.zeros(1), "y": 4}}, samples | {2: samples[0]}):
        assert shared_fault(20, {"samples": lie}, 0.1, 4), lie
