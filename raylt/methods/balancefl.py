"""BalanceFL: clients train as if they had all classes in equal numbers (Shuai et al., IPSN 2022).

Sections are the paper's. For details that it does not state, the authors' code decides (sxontheway/BalanceFL at
d6dd21e). Departures from both:
[1] Owned and missing classes are the client's; the code takes the classes of the batch.
[2] The covariance is of features of the received model in evaluation mode, without augmentation. The code computes
    them, and its teacher's predictions, in training mode. As in the code, classes are pooled by their samples.
[3] Perturbations are drawn from a pool of 500, as in the code, at random instead of in turn.
[4] The entropy is a mean over the batch, so that its weight does not depend on the batch size. The code's sum over 64
    samples at 0.002 corresponds to 0.128 here.
[5] `missing=kept` leaves the missing classes in the softmax of the cross-entropy, which is then FedAvg's loss on
    balanced batches. Distillation and entropy do not change.
[6] Logits are not scaled. The code's configuration for CIFAR-10 has `scale: 2`, which doubles the logits of student
    and teacher.
With all switches off and all classes owned this is FedAvg of a network whose classifier has no bias.
"""

import copy
import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.core.training.features import features
from raylt.core.training.sgd import Objective, balanced, sgd, take_statistics
from raylt.data.samples import Batch
from raylt.data.task import TaskSpec
from raylt.hyper import Choice, LogUniform, hp
from raylt.models.split import SplitModel
from raylt.ops.moments import class_residuals, perturb_along
from raylt.recordability import not_recordable

POOL = 500


class BalanceFL(Method):
    """FedAvg with balanced batches, perturbed rare-class features, and distillation on a client's missing classes."""

    name: ClassVar[str] = "balancefl"
    paper: ClassVar[str] = "Shuai et al., IPSN 2022"
    link: ClassVar[str | None] = "https://github.com/sxontheway/BalanceFL"

    resample: bool = hp(
        True, Choice(True, False), "batches in which each owned class is equally likely, inter-class balancing"
    )
    fa: bool = hp(True, Choice(True, False), "feature-level augmentation of rarer classes")
    kd: float = hp(1.0, LogUniform(0.1, 10), "lambda, weight of the distillation on missing classes", ge=0)
    temperature: float = hp(2.0, Choice(1.0, 2.0, 4.0), "distillation temperature; from the code", gt=0)
    entropy: float = hp(0.128, LogUniform(1e-3, 0.2), "weight of the predictions' entropy; from the code [4]", ge=0)
    missing: Literal["mask", "kept"] = hp(
        "mask",
        Choice("mask", "kept"),
        "treatment of a client's missing classes: left out of the cross-entropy's softmax, or kept in it [5]",
    )

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        base.classifier.register_parameter("bias", None)
        return base

    def train(self, client: Client, message: Message) -> Reply:
        client.receive(message["model"])
        loss = sgd(client, self.objective(client, message), rows=balanced(client) if self.resample else None)
        return client.reply(model=self.shared(client.model), loss=loss)

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the training loss of a client.

        It is the cross-entropy on owned classes (on all with `missing=kept`), plus distillation on missing classes,
        minus the entropy of predictions.
        """
        model = client.model
        is_owned = client.counts > 0  # [1]
        # indices instead of masks, because indexing by a mask waits for the GPU to count the classes
        owned = is_owned.nonzero().flatten()
        missing = (~is_owned).nonzero().flatten()
        excluded = ~is_owned if self.missing == "mask" else torch.zeros_like(is_owned)
        augment = self.augmentation(client) if self.fa else lambda z, y: z
        distil = self.kd > 0 and len(missing) > 1  # a softmax over one class is always 1
        if distil:
            take_statistics(client)
        teacher = copy.deepcopy(model).requires_grad_(False).eval() if distil else model

        def loss(batch: Batch) -> Tensor:
            z = model.encoder(batch.x)  # [B, d]
            logits = model.classifier(z)  # [6]
            distilled = torch.zeros((), device=client.device)
            perturbed = model.classifier(augment(z, batch.y)) if self.fa else logits
            own = F.cross_entropy(perturbed.masked_fill(excluded, -torch.inf), batch.y)
            if distil:
                with torch.no_grad():
                    target = (teacher(batch.x)[:, missing] / self.temperature).softmax(1)
                distilled = F.cross_entropy(logits[:, missing] / self.temperature, target)
            return own + self.kd * distilled - self.entropy * mean_entropy(logits[:, owned])

        return not_recordable(loss) if self.fa else loss  # the augmentation draws on the host

    def augmentation(self, client: Client) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function that adds Gaussian noise to features, more often to features of a rare class.

        A feature of class c receives N(0, M_k) with probability 1 - n_c / n_max. M_k is the within-class covariance at
        the client.
        """
        z, y = features(client)  # [n, d], [n], of the received model [2]
        rows, n = class_residuals(z, y)
        pool = perturb_along(rows / math.sqrt(n), POOL, client.order).float()  # [3]
        chance = 1 - client.counts / client.counts.max()  # [C]

        def augment(z: Tensor, y: Tensor) -> Tensor:
            draw = torch.rand(len(y), generator=client.order).to(z.device, non_blocking=True)
            rows = torch.randint(POOL, (len(y),), generator=client.order).to(z.device, non_blocking=True)
            return z + pool[rows] * (draw < chance[y])[:, None]

        return augment


def mean_entropy(logits: Tensor) -> Tensor:
    """Return the mean entropy of the softmax over logits [B, C], in nats."""
    log_p = logits.float().log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()
