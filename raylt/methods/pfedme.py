"""pFedMe: personal models as solutions of a proximal problem around the client's copy of the global model (Dinh et al.,
NeurIPS 2020).

Symbols follow Algorithm 1 (from memory). Decisions, some of which follow the authors' code (CharlieDinh/pFedMe at
7e52b22):
[1] One local round is one batch of the `local.epochs` passes over the data; the text draws a batch for each of R local
    rounds. The K steps on a batch use the client's optimiser, reset for each batch, at local.lr. The code's steps also
    decay theta, by mu = 0.001: here that is `local.weight_decay`.
[2] theta continues from the previous batch, as in the code, and starts from the received model in each round.
[3] Clients that are not sampled do not train; in the code all clients train in each round.
[4] BatchNorm's statistics come from theta's forward passes, in w as well.
[5] Clients are evaluated with the theta of their last training, or with the global model if they never took a step.
"""

from typing import ClassVar

import torch

from raylt import tree
from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.server import ServerMomentum
from raylt.core.training.optimisers import make_optimiser
from raylt.core.training.sgd import autocast, learning_rate
from raylt.data.sources.sources import ProblemKind
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.split import SplitModel, with_entries
from raylt.ops.proximal import squared_distance


class PFedMe(Method):
    """FedAvg of local models w_i, which each client moves towards its personal model theta_i."""

    name: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "Dinh et al., NeurIPS 2020"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2006.08848"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True

    lam: float = hp(15.0, LogUniform(1.0, 50), "lambda, pull of theta_i towards w_i (15 from memory)", gt=0)
    steps: int = hp(5, Choice(1, 3, 5, 7), "K, steps on a batch", ge=1)
    eta: float = hp(
        0.005, LogUniform(0.001, 0.05), "learning rate of w_i towards theta_i, times lambda (from memory)", ge=0
    )
    beta: float = hp(1.0, Uniform(0.5, 2.0), "step size of the server towards the mean of w_i", gt=0)

    def train(self, client: Client, message: Message) -> Reply:
        """Compute theta_i and w_i of a client that was sampled [3]."""
        client.receive(message["model"])
        model = client.model.train()
        local, lr = client.config.local, learning_rate(client)
        theta = [p for p in model.parameters() if p.requires_grad]  # [2]
        w = [p.detach().clone() for p in theta]
        total = torch.zeros((), device=client.device)  # read only once, because reading synchronises with the GPU
        seen = 0
        for batch in client.batches(None, local.batch):
            optimiser = make_optimiser(local, theta, lr)  # [1]
            loss = torch.zeros((), device=client.device)
            for _ in range(self.steps):
                with autocast(client):
                    loss = client.cross_entropy(model(batch.x), batch.y)  # [4]
                    value = loss + self.lam / 2 * squared_distance(theta, w)
                optimiser.step(value)
            with torch.no_grad():
                for own, p in zip(w, theta, strict=True):
                    own -= self.eta * self.lam * (own - p)
            total.add_(loss.detach() * len(batch.y))
            seen += len(batch.y)
        if seen:  # a client of one sample takes no step, and keeps the final global model
            client.state["personal"] = tree.snapshot(model.state_dict())
        with torch.no_grad():
            for p, own in zip(theta, w, strict=True):
                p.copy_(own)
        return client.reply(model=self.shared(model), loss=total.item() / max(seen, 1))

    def settle(self, client: Client, message: Message) -> None:
        """Compute the personal model theta_i of a new client as in a client's first round."""
        self.train(client, message)

    def server_optimiser(self) -> ServerMomentum | None:
        return None if self.beta == 1 else ServerMomentum(beta=0.0, lr=self.beta)

    def client_model(self, client: Client) -> SplitModel:
        return with_entries(client.model, client.state.get("personal", {}))  # [5]
