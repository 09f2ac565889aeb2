"""The image tower of FedSM's teacher as a network that a client trains, Table IV."""

import torch
from torch import Tensor
from torch.nn import functional as F

from raylt.core.client import Client
from raylt.methods.fedsm.losses import margin_softmax
from raylt.models.clip import OpenClip, open_teacher


class ImageTower:
    """The client's own copy of the image tower: one AdamW step on the Margin Metric Softmax loss per batch.

    Weight decay is 0.1, as in CLIPood. The tower starts as the teacher's and stays in evaluation mode, so running
    statistics do not change. Between rounds its parameters are private to the client, in `client.state["tower"]`.

    Args:
        client: The client that trains it.
        teacher: Name of the teacher, a model of open_clip.
        lr: Learning rate of AdamW.
        unit: Whether to return features of length 1.
    """

    def __init__(self, client: Client, teacher: str, lr: float, unit: bool):
        source = open_teacher(teacher)
        assert isinstance(source, OpenClip), "Teacher.check rejects files of features"
        self._source = source
        self._encoder = source.image_encoder(client.device)
        with torch.no_grad():
            for name, value in client.state.get("tower", {}).items():
                self._encoder.get_parameter(name).copy_(value)
        self._client = client
        self._unit = unit
        self._optimiser = torch.optim.AdamW(self._encoder.parameters(), lr, weight_decay=0.1)

    def features(self, rows: Tensor) -> Tensor:
        """Return the features [B, d] of some of the client's images, without augmentation.

        Args:
            rows: Indices of the images among the client's samples, int64 [B].
        """
        images = self._source.preprocessed(self._client.samples.x[rows])
        with torch.autocast(images.device.type, enabled=False):
            features = self._encoder(images)
        return features[0] if isinstance(features, tuple) else features

    def step(self, rows: Tensor, y: Tensor, text: Tensor, margin: float, scale: float) -> Tensor:
        """Train the tower by one step; return the features [B, d] from before the step.

        Args:
            rows: As for `features`.
            y, text, margin, scale: As for `margin_softmax`.
        """
        raw = self.features(rows)
        u = F.normalize(raw, dim=1)
        self._optimiser.zero_grad()
        with torch.autocast(u.device.type, enabled=False):
            margin_softmax(u, y, text, margin, scale).backward()
        self._optimiser.step()
        # the next step changes these tensors in place
        self._client.state["tower"] = {name: value.detach() for name, value in self._encoder.named_parameters()}
        return (u if self._unit else raw).detach()
