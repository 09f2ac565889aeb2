"""Each client alone: SGD on its own samples, nothing is shared. What federation is worth is measured against it.

A client that is not sampled in a round does not train in it. The global model stays what it was at the start.
"""

from typing import ClassVar

from raylt.core.method import Method
from raylt.data.sources import Kind
from raylt.models.split import Params, SplitModel


class Local(Method):
    """FedAvg in which no entry travels."""

    name: ClassVar[str] = "local"
    paper: ClassVar[str] = "no federation"
    problems: ClassVar[tuple[Kind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True

    def shared(self, model: SplitModel) -> Params:
        return {}
