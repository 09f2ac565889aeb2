import naive
import pytest
import torch
from rounds import flat, run
from tiny import fingerprint, open_client
from torch import tensor
from torch.nn import functional as F

from raylt.methods.fedavg import FedAvg
from raylt.methods.fedlc import FedLC
from raylt.methods.fedrs import FedRS


def test_missing_classes_are_scaled_by_hand():
    logits, owned = tensor([[2.0, -4.0, 6.0]]), tensor([True, False, True])
    assert FedRS(alpha=0.25).restricted(logits, owned).tolist() == [[2.0, -1.0, 6.0]]
    assert FedRS(missing="mask").restricted(logits, owned).tolist() == [[2.0, -torch.inf, 6.0]]
    # softmax over e^2, e^-1, e^6
    expected = -(6 - tensor([2.0, -1.0, 6.0]).exp().sum().log())
    loss = F.cross_entropy(FedRS(alpha=0.25).restricted(logits, owned), tensor([2]))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("missing", ["scale", "mask"])
def test_two_rounds_equal_naive_code(tiny_task, tmp_path, missing):
    model = naive.new_model(tiny_task)
    for t in (1, 2):
        models, sizes = [], []
        for id in naive.clients_of(tiny_task):
            x, y = naive.client_data(tiny_task, id)
            local = naive.new_model(tiny_task)
            local.load_state_dict(naive.entries(model))
            owned = sorted(set(y.tolist()))

            def loss(rows, local=local, x=x, y=y, owned=owned):
                total = torch.zeros(())
                for logits, c in zip(local(x[rows]), y[rows].tolist(), strict=True):
                    kept = {j: z if j in owned else 0.3 * z for j, z in enumerate(logits)}
                    kept = {j: z for j, z in kept.items() if missing == "scale" or j in owned}
                    total = total - kept[c] + torch.stack(list(kept.values())).logsumexp(0)
                return total / len(rows)

            naive.train(local, naive.epochs_of(len(y), naive.generator("order", "train", t, id)), loss)
            models.append(naive.entries(local))
            sizes.append(len(y))
        model.load_state_dict(naive.average(models, sizes))
    ours = run(tiny_task, tmp_path, FedRS(alpha=0.3, missing=missing), rounds=2).server.model.state_dict()
    assert not naive.differences(dict(ours), naive.entries(model), 1e-4)


def test_the_mask_is_fedlc_without_its_margin(tiny_task, tmp_path):
    ends = [flat(run(tiny_task, tmp_path, method)) for method in (FedRS(missing="mask"), FedLC(tau=0.0))]
    assert torch.allclose(*ends, atol=1e-6)


def test_alpha_of_one_is_fedavg_to_the_bit(tiny_task, tmp_path):
    ends = [run(tiny_task, tmp_path, method) for method in (FedAvg(), FedRS(alpha=1.0))]
    assert fingerprint(ends[0].server.model.state_dict()) == fingerprint(ends[1].server.model.state_dict())


def test_missing_classes_get_a_smaller_gradient_or_none(tiny_task):
    client = open_client(tiny_task, FedRS(), 1)  # class counts 8, 3, 3, 0
    batch, weight = client.samples.batch(torch.arange(14)), client.model.classifier.weight
    gradients = {}
    for method in (FedRS(alpha=1.0), FedRS(alpha=0.1), FedRS(missing="mask")):
        (g,) = torch.autograd.grad(method.objective(client, {})(batch), weight)
        gradients[method.missing, method.alpha] = g[3].norm().item()
    assert gradients["mask", 0.5] == 0
    assert 0 < gradients["scale", 0.1] < 0.2 * gradients["scale", 1.0]


def test_every_field_changes_the_model(tiny_task, tmp_path):
    fields = ({}, {"alpha": 0.0}, {"alpha": 0.9}, {"missing": "mask"})
    ends = [flat(run(tiny_task, tmp_path, FedRS(**given), rounds=1)) for given in fields]
    assert all(not torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])
