import pytest
import torch
from rounds import run
from tiny import configure, fingerprint, open_client
from torch import tensor
from torch.nn import functional as F

from raylt.core.training.loss_terms import Terms, gradient_norm, shares_figure, shares_part
from raylt.core.training.sgd import sgd
from raylt.methods.fedavg import FedAvg
from raylt.methods.feddecorr import FedDecorr
from raylt.methods.fedprox import FedProx
from raylt.methods.moon import MOON


def test_norm_is_the_length_of_the_whole_gradient():
    a, b, unused = tensor([1.0, 2.0]).requires_grad_(), tensor(3.0).requires_grad_(), tensor(1.0).requires_grad_()
    # d/da (a_1^2 + a_1 b) = (2 + 3, 0), d/db = 1: sqrt(25 + 1)
    assert gradient_norm(a[0] ** 2 + a[0] * b, [a, b, unused]) == pytest.approx(26**0.5)
    assert gradient_norm(tensor(5.0), [a]) == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_shares_are_those_of_the_last_batch_and_the_training_is_that_of_the_plain_sum(tiny_task, precision):
    config = configure(local={"epochs": 2, "batch": 8, "precision": precision})
    ours, plain = (open_client(tiny_task, FedAvg(), 0, config) for _ in range(2))
    seen = []

    def terms_of(client, batch):
        return {
            "fit": F.cross_entropy(client.model(batch.x), batch.y),
            "decay": 0.5 * sum(p.square().sum() for p in client.model.parameters()),
        }

    def watched(batch):
        terms, lengths = terms_of(plain, batch), []
        for term in terms.values():
            gradients = torch.autograd.grad(term, list(plain.model.parameters()), retain_graph=True, allow_unused=True)
            lengths.append(torch.cat([g.flatten() for g in gradients if g is not None]).norm().item())
        seen.append(lengths)
        return terms["fit"] + terms["decay"]

    objective = Terms(ours, lambda batch: terms_of(ours, batch))
    sgd(plain, watched)
    sgd(ours, objective)
    assert len(seen) == 6
    assert list(objective.norms.values()) == pytest.approx(seen[-1], rel=1e-4)
    shares = shares_part(objective, ("fit", "decay"))["shares"]
    assert shares == pytest.approx({"fit": seen[-1][0] / sum(seen[-1]), "decay": seen[-1][1] / sum(seen[-1])}, rel=1e-4)
    assert fingerprint(ours.model.state_dict()) == fingerprint(plain.model.state_dict())


def test_client_without_a_step_counts_for_nothing(tiny_task):
    client = open_client(tiny_task, FedProx(), 3)  # client 3 has one sample
    objective = FedProx().objective(client, {})
    sgd(client, objective)
    assert shares_part(objective, ("a", "b")) == {"shares": {"a": 0, "b": 0}}
    assert shares_part(objective, ()) == {}
    # one of two clients took no step: means of (0.75, 0.25) and (0, 0)
    assert shares_figure({"shares": {"a": 0.375, "b": 0.125}}) == {"shares": {"a": 0.75, "b": 0.25}}
    assert shares_figure({"shares": {"a": 0, "b": 0}}) == {"shares": {"a": 0, "b": 0}}
    assert shares_figure({"loss": 1.0}) == {}


@pytest.mark.parametrize(
    ("method", "strength", "term", "values"),
    [
        (FedProx, "mu", "proximal", (0.0, 0.01, 1.0)),
        (FedDecorr, "beta", "decorrelation", (0.05, 0.3)),
        (MOON, "mu", "contrastive", (0.1, 10.0)),
    ],
)
def test_share_of_a_term_grows_with_its_weight(tiny_task, tmp_path, method, strength, term, values):
    seen = []
    for value in values:
        shares = run(tiny_task, tmp_path, method(**{strength: value}), 1).server.figures["shares"]
        assert sum(shares.values()) == pytest.approx(1)
        seen.append(shares[term])
    assert seen == sorted(set(seen))
    assert (seen[0] == 0) == (values[0] == 0)


def test_methods_of_one_term_report_no_shares(tiny_task, tmp_path):
    for method in (FedAvg(), FedDecorr(beta=0), MOON(mu=0)):
        assert "shares" not in run(tiny_task, tmp_path, method, 1).server.figures
