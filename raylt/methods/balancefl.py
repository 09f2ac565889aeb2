"""BalanceFL: clients train as if they held all classes alike (Shuai et al., IPSN 2022).

Sections are the paper's; what it leaves open follows the authors' code. Departures from both:
[1] Owned and missing classes are the client's; the code takes those of the batch.
[2] The covariance is of features in evaluation mode, not augmented, of the model that was received; the code computes
    them, and what its teacher says, in training mode. As there, classes are pooled by their samples.
[3] Perturbations are drawn from a pool of 500, as in the code, at random instead of in turns.
[4] The entropy is a mean over the batch, so that its weight does not depend on the batch; the code's sum of 64 samples
    at 0.002 is our 0.128.
All switches off and all classes owned is FedAvg of a network whose classifier has no bias.
"""

import copy
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.features import features
from raylt.core.method import Method
from raylt.core.training import Objective, balanced, sgd
from raylt.data.samples import Batch
from raylt.data.task import Facts
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.split import SplitModel
from raylt.ops.moments import class_scatter, perturb
from raylt.recordable import recordable

POOL = 500


class BalanceFL(Method):
    """Balanced batches, perturbed features of rarer classes, and the received model's word on classes it lacks."""

    name: ClassVar[str] = "balancefl"
    paper: ClassVar[str] = "Shuai et al., IPSN 2022"
    link: ClassVar[str | None] = "https://github.com/sxontheway/BalanceFL"

    resample: bool = hp(True, Choice(True, False), "batches in which each owned class is equally likely, inter-class "
                        "balancing")
    fa: bool = hp(True, Choice(True, False), "feature-level augmentation of rarer classes")
    kd: float = hp(1.0, LogUniform(0.1, 10), "lambda, weight of what is distilled on missing classes", ge=0)
    temperature: float = hp(2.0, Choice(1.0, 2.0, 4.0), "of the distillation; from the code", gt=0)
    entropy: float = hp(0.128, LogUniform(1e-3, 0.2), "weight of the predictions' entropy; from the code [4]", ge=0)

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        base.classifier.register_parameter("bias", None)
        return base

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        loss = sgd(client, self.objective(client, message), rows=balanced(client) if self.resample else None)
        return client.reply(model=self.shared(client.model), loss=loss)

    def objective(self, client: Client, message: Message) -> Objective:
        """Cross-entropy over owned classes, distillation on the others, minus the entropy of predictions."""
        model, held = client.model, client.counts > 0                           # [1]
        # places of classes: indexing by a mask would make each step wait for how many there are
        owned, missing = held.nonzero().flatten(), (~held).nonzero().flatten()
        augment = self.augmentation(client) if self.fa else lambda z, y: z
        distil = self.kd > 0 and len(missing) > 1               # a softmax over one class says nothing
        teacher = copy.deepcopy(model).requires_grad_(False).eval() if distil else model

        def loss(batch: Batch) -> Tensor:
            z = model.encoder(batch.x)                                          # [B, d]
            logits, others = model.classifier(z), torch.zeros((), device=client.device)
            perturbed = model.classifier(augment(z, batch.y)) if self.fa else logits
            own = F.cross_entropy(perturbed.masked_fill(~held, -torch.inf), batch.y)
            if distil:
                with torch.no_grad():
                    told = (teacher(batch.x)[:, missing] / self.temperature).softmax(1)
                others = F.cross_entropy(logits[:, missing] / self.temperature, told)
            return own + self.kd * others - self.entropy * mean_entropy(logits[:, owned])

        return loss if self.fa else recordable(loss)                            # it draws on the host

    def augmentation(self, client: Client) -> Callable[[Tensor, Tensor], Tensor]:
        """Adds N(0, M_k) to a feature of class c with probability 1 - n_c / n_max."""
        z, y = features(client)                                 # [n, d], [n], of the model that was received [2]
        scatter, weights = class_scatter(z, y)
        pool = perturb(scatter / max(weights, 1), POOL, client.order).float()                       # [3]
        chance = 1 - client.counts / client.counts.max()        # [C]

        def augment(z: Tensor, y: Tensor) -> Tensor:
            draw = torch.rand(len(y), generator=client.order).to(z.device, non_blocking=True)
            rows = torch.randint(POOL, (len(y),), generator=client.order).to(z.device, non_blocking=True)
            return z + pool[rows] * (draw < chance[y])[:, None]

        return augment


def mean_entropy(logits: Tensor) -> Tensor:
    """Of the softmax over logits [B, C], in nats."""
    log_p = logits.float().log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()
