"""APFL: each client mixes its personal model with the global model and learns the mixing weight (Deng et al., 2020).

Symbols follow Algorithm 1 (from memory). Decisions, some of which follow the authors' code (MLOPTPSU/FedTorch at
1edcfbf):
[1] After each step of w_i the client steps v_i on the same batch, along the gradient of the loss at the mixture of
    weights alpha v_i + (1 - alpha) w_i, with respect to v_i, as in the text. As in the code, w_i is the weight after
    its step, where the text uses the one before the step. The code mixes the two models' logits.
[2] alpha takes one step a round, after the first batch as in the code, at the learning rate of the weights, and is
    clipped to [0, 1]. Its gradient is the text's, <v_i - w_i, grad f_i>; the code adds 0.02 alpha.
[3] v_i starts from the first model that the client receives. A client that never took a step uses the global model.
[4] The mixture has the BatchNorm statistics of its own forward passes.
The global model equals FedAvg's, bit by bit, if the network draws no random numbers (dropout).
"""

import copy
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training.optimisers import make_optimiser
from raylt.core.training.sgd import autocast, learning_rate
from raylt.data.sources.sources import ProblemKind
from raylt.hyper import Choice, Uniform, hp
from raylt.models.split import SplitModel, StateDict, load_entries


class APFL(Method):
    """FedAvg in which each client also trains a personal model, as part of a mixture with the global model."""

    name: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "Deng et al., arXiv 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2003.13461"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True

    alpha: float = hp(0.5, Uniform(0.0, 1.0), "initial share of v_i in the mixture", ge=0, le=1)
    adaptive: bool = hp(True, Choice(True, False), "learning of alpha by the clients [2]")

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        model = client.model.train()
        own = copy.deepcopy(model)  # v_i
        load_entries(own, client.state.get("own", {}))  # [3]
        alpha = self.share(client)
        local, lr = client.config.local, learning_rate(client)
        global_step = make_optimiser(local, model.parameters(), lr).step
        own_step = make_optimiser(local, own.parameters(), lr).step
        total = torch.zeros((), device=client.device)  # read only once, because reading synchronises with the GPU
        seen = 0
        for number, batch in enumerate(client.batches(None, local.batch)):
            with autocast(client):
                loss = client.cross_entropy(model(batch.x), batch.y)
            global_step(loss)
            learns = self.adaptive and number == 0  # [2]
            share = alpha.clone().requires_grad_(learns)
            with autocast(client):
                mixed_loss = client.cross_entropy(functional_call(own, mixed(own, model, share), (batch.x,)), batch.y)
            if learns:
                (gradient,) = torch.autograd.grad(mixed_loss, share, retain_graph=True)
                alpha = (alpha - lr * gradient).clamp(0, 1)
            own_step(mixed_loss)  # [1]
            total.add_(loss.detach() * len(batch.y))
            seen += len(batch.y)
        if seen:  # a client with one sample takes no step, and keeps using the global model
            client.state["own"] = tree.snapshot(own.state_dict())
            client.state["alpha"] = alpha
        return client.reply(model=self.shared(model), loss=total.item() / max(seen, 1))

    def share(self, client: Client) -> Tensor:
        """Return the client's mixing weight alpha, a scalar on the client's device."""
        return client.state.get("alpha", torch.tensor(self.alpha)).to(client.device)

    def settle(self, client: Client, message: Message) -> None:
        """Train a new client's personal model v_i and mixing weight alpha, as in a client's first round."""
        self.train(client, message)

    def client_model(self, client: Client) -> SplitModel:
        """Return the mixture of the client's personal model v_i with the received global model."""
        if "own" not in client.state:
            return client.model
        own = copy.deepcopy(client.model)
        load_entries(own, client.state["own"])  # with its own BatchNorm statistics [4]
        load_entries(own, mixed(own, client.model, self.share(client)))
        return own


def mixed(own: SplitModel, model: SplitModel, alpha: Tensor) -> StateDict:
    """Return the mixture of a personal model v and the global model w: alpha v + (1 - alpha) w per trained parameter.

    Only v and alpha receive gradients.

    Args:
        own: The personal model v.
        model: The global model w.
        alpha: The mixing weight, a scalar.
    """
    w = dict(model.named_parameters())
    return {
        name: alpha * v + (1 - alpha) * w[name].detach() for name, v in own.named_parameters() if w[name].requires_grad
    }
