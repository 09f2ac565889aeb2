import naive
import pytest
import torch
from refusals import refused
from rounds import run, start
from tiny import configure, fingerprint, make_setup, open_client, private_states
from torch.nn import functional as F

from raylt.errors import ConfigError
from raylt.methods.fedloge import FedLoGe
from raylt.models.split import SplitModel
from raylt.ops.moments import NEVER

QUICK = {"steps": 30}


def scramble(client) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in client.model.state_dict().values():
            if value.is_floating_point():
                value += 0.2 * torch.randn(value.shape, generator=generator)


def test_frame_is_sparse_sent_once_and_everybodys(tiny_task, tmp_path):
    experiment = start(tiny_task, tmp_path, FedLoGe(beta=0.5, **QUICK))
    frame = experiment.server.model.frame.weight
    assert int((frame == 0).sum()) == frame.numel() // 2
    own = private_states(experiment)
    assert all(torch.equal(own[id]["model"]["frame.weight"], frame) for id in experiment.fleet.ids)
    assert not [name for name in experiment.method.message(experiment.server)["model"] if name.startswith("frame.")]


def test_each_loss_moves_its_own_part(tiny_task):
    client = open_client(tiny_task, FedLoGe(), 1)
    scramble(client)
    client.model.eval()
    batch = client.samples.batch(torch.arange(14))
    z = client.model.encoder(batch.x)
    losses = {
        "encoder.": F.cross_entropy(z @ client.model.frame.weight.T, batch.y),
        "classifier.": F.cross_entropy(client.model.classifier(z.detach()), batch.y),
        "personal.": F.cross_entropy(client.model.personal(z.detach()), batch.y),
    }
    loss = FedLoGe().objective(client, {})(batch)
    assert loss.item() == pytest.approx(sum(losses.values()).item(), rel=1e-6)
    params = dict(client.model.named_parameters())
    assert "frame.weight" not in params
    whole = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    for prefix, part in losses.items():
        names = [name for name in params if name.startswith(prefix)]
        for name, g in zip(names, torch.autograd.grad(part, [params[name] for name in names]), strict=True):
            assert torch.allclose(whole[name], g, atol=1e-7), name
            assert g.any()


def test_round_is_that_of_naive_code(tiny_task, tmp_path):
    """Compare the encoder against the frame, both classifiers on its features, and the means of encoder and global
    classifier."""
    method = FedLoGe(**QUICK)
    experiment = run(tiny_task, tmp_path, method, rounds=1)
    frame = experiment.server.model.frame.weight
    own, ends, weights = private_states(experiment), [], []
    for id in naive.clients_of(tiny_task):
        model, (x, y) = open_client(tiny_task, method, id).model, naive.client_data(tiny_task, id)

        def loss(rows, model=model, x=x, y=y):
            z = model.encoder(x[rows])
            heads = [F.linear(z.detach(), head.weight, head.bias) for head in (model.classifier, model.personal)]
            return sum(F.cross_entropy(logits, y[rows]) for logits in (z @ frame.T, *heads))

        naive.train(model, naive.epochs_of(len(y), naive.generator("order", "train", 1, id)), loss)
        made = naive.entries(model)
        personal = {name: made.pop(name) for name in list(made) if name.startswith(("frame.", "personal."))}
        kept = {name: value for name, value in own[id]["model"].items() if name.startswith("personal.")}
        assert naive.differences(kept, {name: personal[name] for name in kept}) == {}
        ends.append(made)
        weights.append(len(y))
    shared = method.shared(experiment.server.model)
    assert naive.differences(dict(shared), naive.average(ends, weights)) == {}


def test_global_classifier_has_rows_of_one_length(tiny_task, tmp_path):
    server = run(tiny_task, tmp_path, FedLoGe(length=2.0, **QUICK), rounds=1).server
    judged = FedLoGe(length=2.0).global_model(server)
    assert judged.classifier.weight.norm(dim=1).tolist() == pytest.approx([2.0] * 4)
    assert torch.equal(judged.classifier.bias, server.model.classifier.bias)
    assert torch.allclose(F.cosine_similarity(judged.classifier.weight, server.model.classifier.weight), torch.ones(4))


def test_client_uses_its_own_classifier_plus_the_realigned_global_one_and_never_a_class_it_lacks(tiny_task):
    client = open_client(tiny_task, FedLoGe(), 1)  # the client lacks class 3
    scramble(client)
    used = FedLoGe().client_model(client).classifier
    for c in range(4):
        g, own = client.model.classifier.weight[c], client.model.personal.weight[c]
        assert torch.allclose(used.weight[c], g * own.norm() + own, atol=1e-6)
    assert torch.equal(used.bias[:3], client.model.classifier.bias[:3] + client.model.personal.bias[:3])
    assert used.bias[3].item() == pytest.approx(NEVER)


def test_clients_personal_classifiers_differ_and_stay(tiny_task, tmp_path):
    experiment = run(tiny_task, tmp_path, FedLoGe(**QUICK), rounds=1)
    own = private_states(experiment)
    assert fingerprint(own[0]["model"]) != fingerprint(own[1]["model"])
    assert not [name for name in experiment.method.message(experiment.server)["model"] if name.startswith("personal.")]


def test_client_that_joins_late_trains_its_own_classifier_alone(tiny_task):
    client, fresh = (open_client(tiny_task, FedLoGe(), 1) for _ in range(2))
    scramble(client)
    message = {"model": {name: value.clone() for name, value in FedLoGe().shared(client.model).items()}}
    FedLoGe().settle(fresh, message)
    before = open_client(tiny_task, FedLoGe(), 1).model.state_dict()
    after = fresh.model.state_dict()
    assert not torch.equal(after["personal.weight"], before["personal.weight"])
    for name, value in message["model"].items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(after[name], value), name


def test_client_that_joins_late_trains_it_by_plain_cross_entropy(tiny_task):
    client, settled = (open_client(tiny_task, FedLoGe(), 1, configure(local={"epochs": 2})) for _ in range(2))
    message = {"model": {name: value.clone() for name, value in FedLoGe().shared(client.model).items()}}
    FedLoGe().settle(settled, message)
    model, personal = client.model, client.model.get_submodule("personal")
    model.train()
    optimiser = torch.optim.SGD(personal.parameters(), client.config.local.lr, client.config.local.momentum)
    for batch in client.batches(None, 8):
        optimiser.zero_grad()
        F.cross_entropy(personal(model.encoder(batch.x).detach()), batch.y).backward()
        optimiser.step()
    for name, value in personal.state_dict().items():
        assert torch.allclose(settled.model.get_submodule("personal").state_dict()[name], value, atol=1e-6)


def test_model_too_narrow_for_its_classes_is_refused(tiny_task):
    narrow = SplitModel(torch.nn.Identity(), 3, 4)
    with refused("model.too-narrow", ConfigError, key="model", dim=3, needed=4):
        FedLoGe().prepare(tiny_task, make_setup(configure()).config, narrow)


def test_fields_change_the_model(tiny_task, tmp_path):
    ends = {
        fingerprint(method.global_model(run(tiny_task, tmp_path, method, rounds=1).server).state_dict())
        for method in (FedLoGe(**QUICK), FedLoGe(beta=0.4, **QUICK), FedLoGe(steps=10), FedLoGe(length=1.0, **QUICK))
    }
    assert len(ends) == 4
