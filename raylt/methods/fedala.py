"""FedALA: each client learns, weight by weight, how to mix its model with the global model (Zhang et al., AAAI 2023).

Symbols are the paper's (from memory). For details that it does not state, the authors' code decides (TsingZ0/PFLlib at
2b077c1):
[1] All layers of the received model but the last are used unchanged (p = 1). `scope=all` mixes every trained weight.
[2] The mixing weights W start at 1 and are learned on a part of the client's samples, drawn in each round; the code
    takes a block of consecutive samples, and drops the last batch if it is smaller than the others. In a client's
    second round, W is learned for epochs until the losses of the last ten vary by less than 0.1, but at most 100 epochs
    (the code has no limit); in later rounds, for one epoch.
[3] In a client's first round the received model is used.
[4] Clients are evaluated with their model after their last training, or with the global model if they never took a
    step. In the code they are evaluated after mixing.
"""

import copy
from typing import ClassVar, Literal

import torch
from torch import Tensor

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method, train_model
from raylt.core.training.sgd import autocast
from raylt.data.sources.sources import ProblemKind
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import SplitModel, StateDict, with_entries

WINDOW, MAX_SPREAD, MAX_EPOCHS = 10, 0.1, 100  # [2]


class FedALA(Method):
    """FedAvg whose clients start each training from a mixture of the global model and their own last model."""

    name: ClassVar[str] = "fedala"
    paper: ClassVar[str] = "Zhang et al., AAAI 2023"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2212.01197"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True
    encoder_fields: ClassVar[tuple[str, ...]] = ("scope",)

    eta: float = hp(1.0, LogUniform(0.1, 10), "learning rate of W; from the code", gt=0)
    share: float = hp(0.8, Uniform(0.05, 1.0), "s, share of a client's samples on which W is learned", gt=0, le=1)
    scope: Literal["classifier", "all"] = hp(
        "classifier", Choice("classifier", "all"), "layers whose weights are mixed [1]"
    )

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        if "personal" in client.state:  # [3]
            client.receive(self.mix(client))
        parts = train_model(self, client, message)
        if client.steps():  # a client of one sample takes no step, and keeps the final global model
            client.state["personal"] = tree.snapshot(client.model.state_dict())
        return client.reply(model=self.shared(client.model), **parts)

    def mix(self, client: Client) -> StateDict:
        """Learn mixing weights W in [0, 1]; return the mixture of the client's last model and the received model.

        The mixture is theta_i + (theta - theta_i) W. `scope` selects the weights that are mixed.
        """
        model = copy.deepcopy(client.model).train()
        params = dict(model.named_parameters())
        prefix = "" if self.scope == "all" else "classifier."
        names = [name for name, p in params.items() if p.requires_grad and name.startswith(prefix)]
        mixed: StateDict = {name: params[name] for name in names}
        own = {name: client.state["personal"][name].to(client.device) for name in names}
        gap = {name: mixed[name].detach() - own[name] for name in names}  # theta - theta_i
        first = "weights" not in client.state
        before = client.state.get("weights", {name: torch.ones_like(gap[name]) for name in names})
        weights = tree.map_tensors(lambda w: w.to(client.device).clone(), before)
        size = max(int(self.share * len(client)), min(len(client), 2))
        drawn = torch.randperm(len(client), generator=client.order)[:size].to(client.device)
        batches = [rows for rows in drawn.split(client.config.local.batch) if len(rows) > 1]
        set_mixture(mixed, own, gap, weights)
        losses: list[float] = []
        while batches and not weights_settled(losses, first):
            loss = torch.zeros(())
            for rows in batches:
                batch = client.batch(rows)
                with autocast(client):
                    loss = client.cross_entropy(model(batch.x), batch.y)
                gradients = torch.autograd.grad(loss, list(mixed.values()))
                for name, gradient in zip(names, gradients, strict=True):
                    weights[name] = (weights[name] - self.eta * gradient * gap[name]).clamp(0, 1)
                set_mixture(mixed, own, gap, weights)
            losses.append(loss.item())
        client.state["weights"] = weights
        return {name: p.detach() for name, p in mixed.items()}

    def settle(self, client: Client, message: Message) -> None:
        """Train the received model, as in a client's first round."""
        self.train(client, message)

    def client_model(self, client: Client) -> SplitModel:
        return with_entries(client.model, client.state.get("personal", {}))  # [4]


@torch.no_grad()
def set_mixture(params: StateDict, own: StateDict, gap: StateDict, weights: StateDict) -> None:
    """Set each parameter to the mixture theta_i + (theta - theta_i) W of the client's and the global value.

    Args:
        params: Parameters to set, by name.
        own: The client's values, theta_i.
        gap: Global values minus the client's values, theta - theta_i.
        weights: Mixing weights, W.
    """
    for name, p in params.items():
        p.copy_(own[name] + gap[name] * weights[name])


def weights_settled(losses: list[float], first: bool) -> bool:
    """Return whether the learning of mixing weights ends, given the losses of the epochs so far [2]."""
    if not first or not losses:
        return len(losses) > 0
    settled = len(losses) > WINDOW and Tensor(losses[-WINDOW:]).std(correction=0).item() < MAX_SPREAD
    return settled or len(losses) >= MAX_EPOCHS
