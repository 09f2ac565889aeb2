"""BPFed: train a shared encoder with private classifiers, then re-train the classifiers on balanced features (Balanced
Personalized Federated Learning).

Equation and algorithm numbers are the paper's. Departures from the text, each marked at its line:
[1] alpha = 0 trains on D_k itself: the paper equates it with no Mixup, while Beta(0, 0) would draw a bootstrap of D_k.
[2] Clients upload sum_c n_c M_c and its weight, in float32, not M_k, because Eq. 16 needs only sums of these.
[3] A class with one sample has no covariance: it counts as zero (`cov_weight=n`), or not at all.
[4] N(0, M_glo) is sampled with eigenvectors, which also exist for a covariance without full rank.
[5] Perturbations are added to copies of the samples, taken in turn, and originals stay unchanged: Eq. 17 gives the
    number of copies.
[6] g = 0 for a client with one class: Eq. 19 would divide by zero.
[7] p is a softmax over all classes, as in Eq. 3; `softmax=owned` leaves out classes that the client does not own.
[8] E epochs, not the E + 1 that Algorithm 2 counts; its batch size and learning-rate schedule are not stated.
[9] The features of Eq. 12 stay in the client's private state from one call to the next, so the encoder is sent once.
[10] Clients report the loss of re-training, and the number of their smoothed labels that do not favour their own class.
    With delta = 0.5 and two classes, the label of the larger class is (1/2, 1/2) (`halved_clients`). If both classes
    have the same size, both labels are, and Eq. 18 trains the classifier to predict nothing (`blind_clients`).
    delta below 0.5 avoids it. `raylt plot clients` also shows every metric without clients of at most two classes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import total
from raylt.core.method import Method
from raylt.core.server import Server
from raylt.core.training.estimates import fit_time
from raylt.core.training.features import features
from raylt.core.training.fit_classifier import fit_classifier
from raylt.core.training.sgd import sgd
from raylt.data.samples import Batch
from raylt.data.task import Task, TaskSpec
from raylt.errors import ConfigError
from raylt.hyper import Choice, LogUniform, Uniform, hp
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel, StateDict, with_classifier
from raylt.ops.moments import class_scatter, pack, perturb, scatter_fault, unpack
from raylt.recordability import not_recordable
from raylt.seeds import seed_for


class BPFed(Method):
    """Mixup training with private classifiers, then re-training of the classifiers on balanced, perturbed features.

    Table 4 from its first row on: `alpha=0 fa=false loss=ce`, `fa=false loss=ce`, `loss=ce`, `loss=ls_all`, defaults.
    `alpha=0 crt=false lws=false initial=common` is FedPer.
    """

    name: ClassVar[str] = "bpfed"
    paper: ClassVar[str] = "Wu et al., Computer Science 52(9), 2025"
    personal: ClassVar[bool] = True
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "finish": (
            "fa",
            "cov_weight",
            "loss",
            "delta",
            "gamma",
            "softmax",
            "crt",
            "lws",
            "restart",
            "retrain_epochs",
            "retrain_batch",
            "retrain_lr",
            "retrain_momentum",
            "retrain_weight_decay",
        ),
        "judging": ("argmax",),
    }

    alpha: float = hp(
        1.0, Choice(0.0, 0.2, 0.5, 1.0, 2.0), "lambda ~ Beta(alpha, alpha), Eq. 7, Fig. 3; 0: no Mixup", ge=0
    )
    mixup: Literal["round", "batch"] = hp(
        "round",
        Choice("round", "batch"),
        "draws of pairs and lambdas: once per round, Algorithm 1; or one lambda per batch, which is mixed with a "
        "permutation of itself (MiSLAS)",
    )
    initial: Literal["own", "common"] = hp(
        "own", Choice("own", "common"), "initial classifiers: different weights at each client, 3.2.1, or the same"
    )
    fa: bool = hp(True, Choice(True, False), "feature augmentation, Eq. 12-17, Table 4")
    cov_weight: Literal["n", "n-1"] = hp("n", Choice("n", "n-1"), "weight of a class's covariance, Eq. 15; n-1: pooled")
    loss: Literal["ls", "ls_all", "ce"] = hp(
        "ls",
        Choice("ls", "ls_all", "ce"),
        "smoothing over owned classes, Eq. 18, over all classes, or cross-entropy, Table 4",
    )
    delta: float = hp(0.5, Uniform(0.0, 0.5), "smoothing of the largest class, Eq. 20, Fig. 4", ge=0, le=1)
    gamma: float = hp(0.4, Uniform(0.1, 2.0), "exponent by which smoothing falls with class size, Eq. 20, Fig. 4", ge=0)
    softmax: Literal["all", "owned"] = hp(
        "all", Choice("all", "owned"), "classes in the softmax p of Eq. 18; ls_all needs all"
    )
    crt: bool = hp(True, Choice(True, False), "re-training of classifiers, 3.2.2")
    lws: bool = hp(True, Choice(True, False), "learnable scale per class, 3.2.2")
    restart: bool = hp(False, Choice(True, False), "new weights at the start of re-training, instead of stage 1's")
    retrain_epochs: int = hp(5, Choice(5, 10, 20), "re-training epochs E, 4.1", ge=0)
    retrain_batch: int = hp(32, Choice(32, 64, 128), "re-training batch size; not stated", ge=1)
    retrain_lr: float = hp(0.01, LogUniform(1e-3, 0.1), "re-training learning rate, 4.1", gt=0)
    retrain_momentum: float = hp(0.9, Uniform(0, 0.99), "re-training momentum, 4.1", ge=0, lt=1)
    retrain_weight_decay: float = hp(5e-4, LogUniform(1e-5, 1e-2), "re-training weight decay, 4.1", ge=0)
    argmax: Literal["all", "owned"] = hp("all", Choice("all", "owned"), "classes that a personal model may predict")

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_linear_classifier(self.name, config, model)
        if self.softmax == "owned" and self.loss == "ls_all":
            raise ConfigError(
                "method.softmax: method.loss=ls_all gives classes that a client does not own a share of the label, so "
                "the softmax must have all classes (owned). Set method.softmax=all.",
                code="config.conflict",
                key="method.softmax",
                value="owned",
            )
        if self.restart and not self.crt:
            raise ConfigError(
                "method.restart: with method.crt=false, new weights of the classifier would never be trained (true). "
                "Set method.restart=false, or method.crt=true.",
                code="config.conflict",
                key="method.restart",
                value=True,
            )

    def shared(self, model: SplitModel) -> StateDict:
        return model.entries("encoder.")

    # stage 1 (3.2.1, Algorithm 1)

    def join(self, client: Client, message: Message) -> Reply:
        """Draw the private classifier V_k^0; a client that is lost in this call trains from the common classifier."""
        if self.initial == "own":
            _linear(client.model).reset_parameters()  # V_k^0; the call is seeded by the client
        return client.reply()

    def train(self, client: Client, message: Message) -> Reply:
        """Train the encoder and the private classifier V_k, Eq. 9 and 10; upload only the encoder."""
        client.receive(message["model"])
        mixed = self.mixed(client) if self.alpha > 0 else None  # [1]
        loss = sgd(client, self.objective(client, message), make=mixed)
        return client.reply(model=self.shared(client.model), loss=loss)

    def mixed(self, client: Client) -> Callable[[Tensor], Batch]:
        """Return a function that makes batches of the mixup set, Eq. 7 and 8.

        Images are mixed when their batch is made, after each was augmented separately.
        """
        n, classes = len(client), client.model.classes
        rng = np.random.default_rng(seed_for(client.config.seed, "mixup", client.round, client.id))
        i, j = torch.from_numpy(rng.integers(n, size=(2, n))).to(client.device)  # [n] each
        lam = torch.from_numpy(rng.beta(self.alpha, self.alpha, n)).float().to(client.device)  # [n]

        def pairs(rows: Tensor) -> Batch:
            return mix(client.batch(i[rows]), client.batch(j[rows]), lam[rows], classes)

        @not_recordable  # it draws on the host
        def permuted(rows: Tensor) -> Batch:
            batch = client.batch(rows)
            order = torch.from_numpy(rng.permutation(len(rows))).to(client.device)
            batch_lam = torch.full_like(batch.y, rng.beta(self.alpha, self.alpha), dtype=torch.float32)
            return mix(batch, Batch(*(part[order] for part in batch)), batch_lam, classes)

        return pairs if self.mixup == "round" else permuted

    # stage 2 (3.2.2, Algorithm 2)

    @property
    def finishes(self) -> bool:
        return self.crt or self.lws

    def finish(self, server: Server, fleet: Fleet) -> None:
        message: Message = {"model": tree.snapshot(self.shared(server.model))}
        if self.fa:
            d = server.model.dim
            scatter = torch.empty(d * (d + 1) // 2, device="meta")
            fault = partial(
                scatter_fault,
                classes=server.model.classes,
                weight=self.cov_weight,
                longest=server.config.privacy.longest,
            )
            got = fleet.ask(
                self.covariance,
                fleet.everyone,
                message,
                scatter=total.like(scatter).over_samples(fault),
                n=total.like(0),
            )
            covariance = got["scatter"] / max(got["n"], 1)  # M_glo, Eq. 16
            message = {"covariance": covariance.float()}  # [9]
        got = fleet.ask(
            self.retrain,
            fleet.everyone,
            message,
            loss=total.like(0.0),
            undecided=total.like(0).where(at_most(server.model.classes)),
            halved=total.like(0).where(at_most(1)),
            blind=total.like(0).where(at_most(1)),
        )
        replies = len(got.weights)
        server.log(
            retrain_loss=got["loss"] / replies,
            undecided=got["undecided"] / replies,  # [10]
            halved_clients=got["halved"],
            blind_clients=got["blind"],
        )

    def last_phase(self, spec: TaskSpec, model: SplitModel) -> str:
        if not self.finishes:
            return ""
        duration = fit_time(model.dim, spec.classes, 1000, self.retrain_epochs, self.retrain_batch)
        return f"stage 2 at every client in {self.retrain_epochs} epochs, {duration} for 1,000 balanced features"

    def covariance(self, client: Client, message: Message) -> Reply:
        """Report the feature scatter n_k M_k, packed as float32 [d (d + 1) / 2], and its weight n_k, Eq. 12-15 [2]."""
        client.receive(message["model"])
        z, y = features(client)  # [n, d], [n]
        client.state["z"] = z  # [9]
        scatter, n = class_scatter(z, y, self.cov_weight)  # [3]
        return client.reply(scatter=pack(scatter).float(), n=n)

    def retrain(self, client: Client, message: Message) -> Reply:
        """Re-train the private classifier V_k on balanced features with smoothed labels, Eq. 17-20.

        The classifier's scale is then folded into its weights.
        """
        if "model" in message:  # without feature augmentation, no features were computed before
            client.receive(message["model"])
            z = features(client)[0]
        elif "z" in client.state:
            z = client.state.pop("z").to(client.device)
        else:
            raise RuntimeError("this client did not take part in BPFed.covariance, so it has no features to train on")
        y, owned = client.samples.y, client.counts > 0
        if self.fa:
            z, y = balance(z, y, unpack(message["covariance"], z.shape[1]), client.order)  # [4]
        delta = 0.0 if self.loss == "ce" else self.delta
        labels = smooth_labels(client.counts, delta, self.gamma, self.loss == "ls_all")  # [C, C] [6]
        # [7]; indices instead of a mask, because indexing by a mask waits for the GPU to count the classes
        classes = (owned if self.softmax == "owned" else torch.ones_like(owned)).nonzero().flatten()
        head = ScaledLinear(_linear(client.model), self.crt, self.lws, self.restart).to(client.device)
        loss = 0.0
        if len(classes) > 1:  # a softmax over one class is always 1
            loss = fit_classifier(
                head,
                z,
                labels[y],
                epochs=self.retrain_epochs,
                batch=self.retrain_batch,
                lr=self.retrain_lr,
                momentum=self.retrain_momentum,
                weight_decay=self.retrain_weight_decay,
                schedule="constant",  # [8]
                seed=seed_for(client.config.seed, "retrain", client.round, client.id),
                loss=lambda logits, q: F.cross_entropy(logits[:, classes], q[:, classes]),
            )  # Eq. 18
        client.receive(head.folded())
        vague = undecided(labels, owned)
        return client.reply(loss=loss, undecided=vague, halved=int(vague > 0), blind=int(vague == owned.sum()))

    def settle(self, client: Client, message: Message) -> None:
        """Train a classifier for a new client on the final encoder, then re-train it on balanced features.

        Stage 2 uses the client's covariance M_k instead of the global M_glo.
        """
        client.receive(message["model"])
        self.join(client, {})
        mixed = self.mixed(client) if self.alpha > 0 else None  # [1]
        sgd(client, self.objective(client, message), _linear(client.model).parameters(), make=mixed)
        if self.finishes and self.fa:
            moments = self.covariance(client, message).tree
            self.retrain(client, {"covariance": moments["scatter"] / max(moments["n"], 1)})
        elif self.finishes:
            self.retrain(client, message)

    # evaluated models

    def client_model(self, client: Client) -> SplitModel:
        if self.argmax == "all":
            return client.model
        own = _linear(client.model)
        return with_classifier(
            client.model, own.weight.detach(), own.bias.detach().masked_fill(client.counts == 0, -torch.inf)
        )


class ScaledLinear(nn.Module):
    """Classifier s * (W z + b). The scale s multiplies the bias too, as in MiSLAS.

    It copies the weights, so that a failed call changes nothing.

    Args:
        start: The classifier to start from.
        crt: Whether to train W and b.
        lws: Whether to train s.
        restart: Whether to start from new random W and b.
    """

    def __init__(self, start: nn.Linear, crt: bool, lws: bool, restart: bool):
        super().__init__()
        self.linear = nn.Linear(start.in_features, start.out_features)  # new weights
        if not restart:
            self.linear.load_state_dict(start.state_dict())
        self.linear.requires_grad_(crt)
        self.scale = nn.Parameter(torch.ones(start.out_features), requires_grad=lws)

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * self.linear(z)

    def folded(self) -> StateDict:
        """Return the weight and bias of a plain linear classifier with the same logits as this scaled classifier."""
        return {
            "classifier.weight": self.scale[:, None] * self.linear.weight,
            "classifier.bias": self.scale * self.linear.bias,
        }


def smooth_labels(counts: Tensor, delta: float, gamma: float, everywhere: bool = False) -> Tensor:
    """Return the soft label of each owned class as a row of a float32 matrix [C, C], Eq. 19 and 20 of BPFed.

    Rows of classes that the client does not own are zero.

    Args:
        counts: Number of samples per class, int64 [C], before balancing.
        delta: Smoothing of the largest class.
        gamma: Exponent of the class size.
        everywhere: Whether to spread the removed share over all other classes, instead of only the owned ones.
    """
    owned = counts > 0
    g = delta * (counts / counts.max()).pow(gamma)  # [C]
    receivers = torch.ones_like(owned) if everywhere else owned
    n_others = int(receivers.sum()) - 1
    g = g if n_others else torch.zeros_like(g)  # with a single class, no other class can receive a share
    q = receivers * (g / max(n_others, 1))[:, None]
    q.diagonal().copy_(1 - g)
    return q * owned[:, None]


def undecided(labels: Tensor, owned: Tensor) -> int:
    """Count the client's classes whose smoothed label gives another class at least as much weight as the true class.

    Args:
        labels: Labels from `smooth_labels`, [C, C].
        owned: True for the client's classes, bool [C].
    """
    own = labels.diagonal()
    return int((own <= (labels - own.diag()).amax(1))[owned].sum())


def at_most(most: int) -> Callable[[int], str | None]:
    """Return a function that returns a message if a count exceeds `most`, otherwise None."""
    return lambda count: None if count <= most else f"counts {count}, more than {most}"


def mix(a: Batch, b: Batch, lam: Tensor, classes: int) -> Batch:
    """Mix images, or features [B, d], and labels of two batches, Eq. 7 and 8 of BPFed. Labels become float32 [B, C].

    Args:
        a: The first batch, with the shares `lam`.
        b: The second batch, with the shares 1 - `lam`.
        lam: Share of the first batch in each sample, float32 [B].
        classes: Number of classes, C.
    """
    y_a = F.one_hot(a.y, classes).float()
    y_b = F.one_hot(b.y, classes).float()
    weight = lam.view(-1, *[1] * (a.x.ndim - 1))
    return Batch(weight * a.x + (1 - weight) * b.x, lam[:, None] * y_a + (1 - lam[:, None]) * y_b, a.rows)


def balance(z: Tensor, y: Tensor, covariance: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Add perturbed copies of features until all classes are as large as the largest class, Eq. 17 [5].

    Args:
        z: Features, [n, d].
        y: Classes, int64 [n].
        covariance: M_glo, [d, d].
        generator: Generator of the perturbations.

    Returns:
        Features and classes of the balanced set.
    """
    most = int(torch.bincount(y).max())
    rows = []
    for c in y.unique():
        own = torch.nonzero(y == c).flatten()
        rows.append(own[torch.arange(most - len(own), device=y.device) % len(own)])
    extra = torch.cat(rows)
    if not len(extra):
        return z, y
    return torch.cat([z, (z[extra] + perturb(covariance, len(extra), generator)).to(z.dtype)]), torch.cat([y, y[extra]])


def _linear(model: SplitModel) -> nn.Linear:
    assert isinstance(model.classifier, nn.Linear)
    return model.classifier
