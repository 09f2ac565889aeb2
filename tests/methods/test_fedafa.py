import naive
import pytest
import torch
from refusals import refused
from rounds import flat, run
from tiny import Recorder, configure, fingerprint, make_experiment, make_setup, open_client, private_states
from torch import nn, tensor
from torch.nn import functional as F

from raylt.errors import ConfigError
from raylt.methods.fedafa import FedAFA, adversarial
from raylt.methods.fedavg import FedAvg

QUICK = {"steps": 3, "tune_epochs": 2, "tune_batch": 8}


def own(experiment) -> dict:
    return {
        id: state["state"]["personal"]
        for id, state in private_states(experiment).items()
        if "personal" in state["state"]
    }


def test_rounds_are_fedavgs_to_the_bit(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, method, rounds=2) for method in (FedAvg(), FedAFA(**QUICK))]
    assert fingerprint(ends[0].server.model.state_dict()) == fingerprint(ends[1].server.model.state_dict())


def naive_stage_2(task, w, id, fields, round):
    """Return a client's upper layers after stage 2, the share of generated features and the loss, sample by sample.

    Layers are those of the network `small`.
    """
    x, y = naive.client_data(task, id)
    counts = torch.bincount(y, minlength=task.classes).double()
    order = naive.generator("order", "personalise", round, id)
    model, glob = naive.new_model(task), naive.new_model(task)
    model.load_state_dict(w)
    glob.load_state_dict(w)
    model.eval()
    glob.eval()
    params = list(model.classifier.parameters())
    velocity = [torch.zeros_like(p) for p in params]
    made, seen, losses = 0, 0, 0.0

    def upper(net, a):
        return net.classifier(a.mean((2, 3)))

    for _ in range(fields["tune_epochs"]):
        drawn = torch.multinomial((1 / counts)[y], len(y), replacement=True, generator=order)
        for rows in drawn.split(fields["tune_batch"]):
            if len(rows) < 2:
                continue
            labels = y[rows]
            with torch.no_grad():
                a = model.encoder.stage2(model.encoder.stage1(x[rows]))
            uniform = torch.rand(len(rows), generator=order)
            chosen = [i for i in range(len(rows)) if uniform[i] >= counts[labels[i]] / counts.max()]
            mixed = a.clone()
            if chosen:
                fit = torch.stack(
                    [
                        torch.stack(
                            [1 - max(counts[labels[j]] - counts[labels[g]], 0) / counts.max() for j in range(len(rows))]
                        )
                        for g in chosen
                    ]
                )
                seeds = torch.multinomial(fit, 1, generator=order).flatten()
                z, target = a[seeds].clone(), labels[chosen]
                top = z.max().item()
                noise = torch.rand(z.shape, generator=order) - (z.max() + z.min()) / 2
                for channel in range(z.shape[1]):
                    noise[:, channel] /= max(noise[:, channel].norm().item(), 1.0)
                z = (z + noise).clamp(0, top)
                for _ in range(fields["steps"]):
                    z.requires_grad_()
                    gradient = torch.stack(
                        [
                            torch.autograd.grad(F.cross_entropy(upper(glob, z)[i : i + 1], target[i : i + 1]), z)[0][i]
                            for i in range(len(z))
                        ]
                    )
                    z = z.detach()
                    for i in range(len(z)):
                        z[i] -= fields["step"] * gradient[i] / gradient[i].norm()
                    z = z.clamp(0, top)
                with torch.no_grad():
                    probability = upper(glob, z).softmax(1)
                for i, g in enumerate(chosen):
                    if probability[i, target[i]] >= fields["accept"]:
                        mixed[g] = z[i]
                        made += 1
            seen += len(rows)
            # without a generated feature both terms are equal
            loss = fields["c"] * F.cross_entropy(upper(model, mixed), labels) + (1 - fields["c"]) * F.cross_entropy(
                upper(model, a), labels
            )
            losses += loss.item() * len(rows)
            for p, v, g in zip(params, velocity, torch.autograd.grad(loss, params), strict=True):
                v.mul_(fields["tune_momentum"]).add_(g + fields["tune_weight_decay"] * p.detach())
                p.data.sub_(fields["tune_lr"] * v)
    return naive.entries(model), made / max(seen, 1), losses / max(seen, 1)


@pytest.mark.parametrize(
    "fields", [{"accept": 0.3, "tune_lr": 0.05}, {"accept": 0.0, "c": 0.9, "tune_lr": 0.1, "step": 2.0}], ids=str
)
def test_stage_2_by_naive_code(tiny_task, tmp_path, fields):
    method = FedAFA(**QUICK | fields)
    experiment = run(tiny_task, tmp_path, method, rounds=2)
    w, shares, losses, sizes = dict(experiment.server.model.state_dict()), [], [], []
    for id in naive.clients_of(tiny_task):
        expected, share, loss = naive_stage_2(tiny_task, w, id, method.model_dump(), 3)
        client = open_client(tiny_task, method, id, experiment.config)
        client.receive(w)
        client.state["personal"] = own(experiment)[id]
        assert naive.differences(dict(method.client_model(client).state_dict()), expected) == {}, id
        shares.append(share)
        losses.append(loss)
        sizes.append(len(client))
    share = sum(a * n for a, n in zip(shares, sizes, strict=True)) / sum(sizes)
    assert experiment.server.figures["generated"] == pytest.approx(share)
    loss = sum(a * n for a, n in zip(losses, sizes, strict=True)) / sum(sizes)
    assert experiment.server.figures["loss"] == pytest.approx(loss, rel=1e-4)
    assert share > 0


def test_batchnorm_counts_above_the_cut_and_not_below(tiny_task, tmp_path):
    """Client 0 has three batches in each of two epochs, and no feature is so likely that it is accepted."""
    method = FedAFA(**QUICK | {"cut": "stage1", "accept": 1.0})
    experiment = run(tiny_task, tmp_path, method, rounds=1)
    w = experiment.server.model.state_dict()
    client = open_client(tiny_task, method, 0, experiment.config)
    client.receive(w)
    client.state["personal"] = own(experiment)[0]
    judged = method.client_model(client).state_dict()
    counters = {name: int(judged[name] - w[name]) for name in w if name.endswith("num_batches_tracked")}
    assert counters == {"encoder.stage1.1.num_batches_tracked": 0, "encoder.stage2.1.num_batches_tracked": 6}
    assert not torch.equal(judged["encoder.stage2.1.running_mean"], w["encoder.stage2.1.running_mean"])


def test_features_are_generated_by_the_global_model_in_evaluation_mode(tiny_task, tmp_path, monkeypatch):
    modes, generate = [], FedAFA.generate

    def watched(self, client, glob, a, y):
        modes.extend(layer.training for layer in glob.modules())
        return generate(self, client, glob, a, y)

    monkeypatch.setattr(FedAFA, "generate", watched)
    run(tiny_task, tmp_path, FedAFA(**QUICK, cut="stage1"), rounds=1)
    assert modes
    assert not any(modes)


def test_features_descend_on_the_loss_of_their_class_in_steps_of_one_length():
    upper = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    a, target = torch.full((2, 1, 2, 2), 2.0), tensor([0, 2])
    a[0, 0, 0, 0] = 9.0  # leaves room above the other values
    still = torch.full_like(a, 5.5)  # the middle of [2, 9], which means zero noise
    start, before = adversarial(upper, a + 0.0, target, still - 1.0, 0, 0.1)
    noise = start - a
    assert noise.norm().item() == pytest.approx(1.0, rel=1e-5)  # one channel: its length over the batch is 1
    made, after = adversarial(upper, a, target, still - 1.0, 1, 0.1)
    for i in range(2):
        assert (made[i] - start[i]).norm().item() == pytest.approx(0.1, rel=1e-4)
        (gradient,) = torch.autograd.grad(
            F.cross_entropy(upper(leaf := start[i : i + 1].clone().requires_grad_()), target[i : i + 1]), leaf
        )
        assert torch.allclose(made[i] - start[i], -0.1 * gradient[0] / gradient.norm(), atol=1e-5)
    assert (after > before).all()
    far, _ = adversarial(upper, a, target, still, 200, 1.0)
    assert far.min() >= 0
    assert far.max() <= 9


def test_the_head_class_is_never_stood_in_for_and_rarer_ones_are_the_more_often(tiny_task):
    client = open_client(tiny_task, FedAFA(), 0)  # class counts 12, 6, 4, 2
    method, y = FedAFA(accept=0.0, steps=0), torch.arange(4).repeat_interleave(500)
    _, upper = method.lower_and_upper(client.model.eval())
    rows, made = method.generate(client, upper, torch.rand(2000, 64, 2, 2), y)
    assert made.shape == (len(rows), 64, 2, 2)
    shares = torch.bincount(y[rows], minlength=4) / 500
    assert torch.allclose(shares, tensor([0, 1 / 2, 2 / 3, 5 / 6]), atol=0.07)


def test_layers_below_the_cut_stay_and_those_above_are_each_clients_own(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FedAFA(**QUICK, cut="stage1", tune_lr=0.05), rounds=1)
    states = own(experiment)
    assert states.keys() == set(naive.clients_of(tiny_task))
    w = dict(experiment.server.model.state_dict())
    for id in (0, 5):
        client = open_client(tiny_task, experiment.method, id)
        client.receive(w)
        client.state["personal"] = states[id]
        judged = experiment.method.client_model(client).state_dict()
        moved = {
            name.split(".")[0] if name.startswith("cl") else name.split(".")[1]
            for name in w
            if not torch.equal(w[name], judged[name])
        }
        assert moved == {"stage2", "classifier"}
    assert fingerprint(states[0]) != fingerprint(states[5])


def test_nothing_of_it_is_uploaded(tiny_task, tmp_path):
    experiment = make_experiment(configure(), tiny_task, tmp_path, FedAFA(**QUICK), host=Recorder)
    while not experiment.done:
        experiment.step()
    sent = [reply for name, _, _, reply in experiment.fleet._host.replies if name == "personalise"]
    assert sent
    assert all(reply.keys() == {"loss", "generated"} for reply in sent)


def test_client_of_one_class_is_tuned_on_its_samples_as_they_are(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FedAFA(**QUICK, tune_lr=0.05, accept=0.2), rounds=1)
    plain = run(tiny_task, tmp_path, FedAFA(**QUICK, tune_lr=0.05, c=0.0), rounds=1)
    assert fingerprint(own(experiment)[2]) == fingerprint(own(plain)[2])
    assert fingerprint(own(experiment)[0]) != fingerprint(own(plain)[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "fields",
    [
        {"c": 0.3},
        {"accept": 0.99},
        {"steps": 6},
        {"step": 3.0},
        {"tune_epochs": 1},
        {"tune_batch": 4},
        {"tune_lr": 0.01},
        {"tune_momentum": 0.5},
        {"tune_weight_decay": 0.1},
        {"cut": "stage1"},
    ],
    ids=str,
)
def test_every_field_changes_the_personal_models_and_not_the_global_one(tiny_task, tmp_path, fields):
    base = QUICK | {"accept": 0.2, "tune_lr": 0.05}
    ends = [run(tiny_task, tmp_path, FedAFA(**base | given), rounds=1) for given in ({}, fields)]
    assert torch.equal(*(flat(end) for end in ends))
    assert fingerprint(own(ends[0])[0]) != fingerprint(own(ends[1])[0])


def test_a_network_without_such_a_layer_is_refused(tiny_task):
    config = configure()
    model = make_setup(config).new_model(tiny_task.spec)
    FedAFA(cut="stage1").prepare(tiny_task, config, model)
    for cut in ("stage3", "pool"):
        layers = ["stage1", "stage2", "pool"]
        with refused("model.lacks-layer", ConfigError, key="method.cut", value=cut, layers=layers):
            FedAFA(cut=cut).prepare(tiny_task, config, model)
