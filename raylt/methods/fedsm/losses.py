"""FedSM's losses: student features against teacher features, and projected teacher features against text features.

`Projection` is the trainable projection of a frozen image-text teacher.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.models.clip import open_teacher


def hint(z: Tensor, u: Tensor) -> Tensor:
    """Return the distillation loss 1/2 ||z - u||^2 of FitNets (Romero et al., ICLR 2015, Eq. 3), a batch mean.

    A mean over the dimensions would have 1/d of the gradient, which is negligible compared with the cross-entropy's.

    Args:
        z: The student's features, [B, d].
        u: The teacher's features, [B, d].
    """
    return 0.5 * (z.float() - u).square().sum(1).mean()


def margin_softmax(u: Tensor, y: Tensor, text: Tensor, margin: float, scale: float) -> Tensor:
    """Return the Margin Metric Softmax loss CE(s (u - m t_y) T^T, y) averaged over a batch (CLIPood, ICML 2023).

    It lowers the true class's logit by s m (1 - cos(t_y, t_j)) more than that of class j.

    Args:
        u: Unit image features, [B, d].
        y: Labels, int64 [B].
        text: Unit text features T, [C, d].
        margin: The margin m.
        scale: The scale s.
    """
    return F.cross_entropy(scale * (u - margin * text[y]) @ text.T, y)


def projection_of(client: Client, teacher: str) -> Tensor:
    """Return the client's copy of the projection [w, d] of the teacher's image tower, on the client's device.

    If the client has not trained a projection, it is the teacher's.
    """
    matrix = client.state.get("projection")
    if matrix is None:
        matrix = open_teacher(teacher).projection(client.device)
        assert matrix is not None, "Teacher.check rejects teachers without a projection"
    return matrix.to(client.device)


class Projection:
    """Trainable projection [w, d] of an image tower: one AdamW step on the Margin Metric Softmax loss per batch.

    Weight decay is 0.1, as in CLIPood. The projection starts as the teacher's. Between rounds it is private to the
    client, in `client.state["projection"]`.

    Args:
        client: The client that trains it.
        teacher: Name of the teacher.
        lr: Learning rate of AdamW.
        unit: Whether to return features of length 1.
    """

    def __init__(self, client: Client, teacher: str, lr: float, unit: bool):
        self.matrix = projection_of(client, teacher).clone().requires_grad_()
        self._client = client
        self._unit = unit
        self._optimiser = torch.optim.AdamW([self.matrix], lr, weight_decay=0.1)

    def step(self, h: Tensor, y: Tensor, text: Tensor, margin: float, scale: float) -> Tensor:
        """Train the projection by one step; return the projected features [B, d] from before the step.

        Args:
            h: Features of the image tower, [B, w].
            y, text, margin, scale: As for `margin_softmax`.
        """
        with torch.autocast(h.device.type, enabled=False):
            raw = h.float() @ self.matrix
            u = F.normalize(raw, dim=1)
            self._optimiser.zero_grad()
            margin_softmax(u, y, text, margin, scale).backward()
            self._optimiser.step()
        self._client.state["projection"] = self.matrix.detach()  # the next step changes it in place
        return (u if self._unit else raw).detach()
