"""The projection behind a frozen image-text teacher that a client may train."""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.methods.fedsm.losses import margin_softmax
from raylt.models.clip import open_teacher


def projection_of(client: Client, teacher: str) -> Tensor:
    """The matrix [w, d] behind the teacher's image tower as this client has it, on its device; the teacher's own where
    it has trained none."""
    matrix = client.state.get("projection")
    if matrix is None:
        matrix = open_teacher(teacher).projection(client.device)
        assert matrix is not None, "Teacher.check refuses those without one"
    return matrix.to(client.device)


class Projection:
    """The matrix [w, d] behind an image tower, trained by Margin Metric Softmax and AdamW, a step for each batch.

    Weight decay 0.1 as in CLIPood. It starts as the teacher's, and from one round to the next it is private to the
    client: `client.state["projection"]`.

    Args:
        unit: whether the features that it gives are of length 1.
    """

    def __init__(self, client: Client, teacher: str, lr: float, unit: bool):
        self.matrix = projection_of(client, teacher).clone().requires_grad_()
        self._client, self._unit = client, unit
        self._optimiser = torch.optim.AdamW([self.matrix], lr, weight_decay=0.1)

    def step(self, h: Tensor, y: Tensor, text: Tensor, margin: float, scale: float) -> Tensor:
        """The features [B, d] that the step started from; the arguments are those of `margin_softmax`."""
        with torch.autocast(h.device.type, enabled=False):
            raw = h.float() @ self.matrix
            u = F.normalize(raw, dim=1)
            self._optimiser.zero_grad()
            margin_softmax(u, y, text, margin, scale).backward()
            self._optimiser.step()
        self._client.state["projection"] = self.matrix.detach()     # as it is from now until the next step
        return (u if self._unit else raw).detach()
