"""FedRS: FedAvg with a restricted softmax, which limits updates to the weights of a client's missing classes (Li and
Zhan, KDD 2021).

Checked against the authors' repository, lxcnju/FedRepo at 18eeb6d. Departures:
[1] The whole logit is scaled. The authors' classifier has no bias.
[2] Owned classes keep their logits, as in the text. The code scales a class by alpha + (1 - alpha) n_c / max n, and
    applies this again to its own result at each step, so that all scales soon are 1 (`algorithms/fedrs.py`; an older
    file, `fedrs.py`, keeps the scales).
[3] Gradients are not clipped, and a client takes the steps of its epochs. The code clips gradients to a norm that is an
    option of its runs, and takes at least five steps.
`missing=mask` leaves the missing classes out of the softmax. This equals FedLC with tau = 0, the mask without a margin.
alpha = 1 with `missing=scale` is FedAvg.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client, Message
from raylt.core.method import Method
from raylt.core.training.sgd import Objective
from raylt.hyper import Choice, Uniform, hp


class FedRS(Method):
    """FedAvg whose clients scale down or mask the logits of their missing classes."""

    name: ClassVar[str] = "fedrs"
    paper: ClassVar[str] = "Li and Zhan, KDD 2021"
    link: ClassVar[str | None] = "https://github.com/lxcnju/FedRepo"
    stackable: ClassVar[bool] = True

    alpha: float = hp(0.5, Uniform(0.0, 1.0), "scale of a missing class's logit (0.5 from memory)", ge=0, le=1)
    missing: Literal["scale", "mask"] = hp(
        "scale", Choice("scale", "mask"), "treatment of a client's missing classes: logit scaled by alpha, or left out"
    )

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the cross-entropy of the restricted logits [3]."""
        owned = client.counts > 0
        return lambda batch: F.cross_entropy(self.restricted(client.model(batch.x), owned), batch.y)

    def restricted(self, logits: Tensor, owned: Tensor) -> Tensor:
        """Scale the logits [B, C] of classes outside `owned` (bool [C]) by alpha, or set them to -inf [1] [2]."""
        if self.missing == "mask":
            return logits.masked_fill(~owned, -torch.inf)
        return torch.where(owned, logits, self.alpha * logits)
