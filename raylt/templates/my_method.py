"""A method of your own, with FedProx as a starting point. Change the loss, or add an upload (docs/write-a-method.md).

raylt check my_method.py
raylt run --plugin my_method.py method=my_method federation.rounds=5
"""

from typing import ClassVar

from torch.nn import functional as F

import raylt


class MyMethod(raylt.Method):
    """FedAvg with a proximal term."""

    name: ClassVar[str] = "my_method"
    paper: ClassVar[str] = "Li et al., MLSys 2020"

    mu: float = raylt.hp(0.01, raylt.LogUniform(1e-4, 1.0), "weight of the proximal term, Eq. 2", ge=0)

    def objective(self, client: raylt.Client, message: raylt.Message) -> raylt.Objective:
        """Return the loss function for batches. It is called once per local training."""
        start = {name: value.detach().clone() for name, value in client.model.named_parameters()}

        def distance():
            return sum((value - start[name]).square().sum() for name, value in client.model.named_parameters())

        return lambda batch: F.cross_entropy(client.model(batch.x), batch.y) + self.mu / 2 * distance()
