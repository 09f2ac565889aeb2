"""Local training: each client trains alone on its own samples, without federation.

It is the baseline that shows the benefit of federation. A client that is not sampled in a round does not train in it.
The global model keeps its initial weights.
"""

from typing import ClassVar

from raylt.core.method import Method
from raylt.data.sources.sources import ProblemKind
from raylt.models.split import SplitModel, StateDict


class Local(Method):
    """FedAvg in which clients share no entry of the model."""

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "no federation"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True
    stackable: ClassVar[bool] = True

    def shared(self, model: SplitModel) -> StateDict:
        return {}
