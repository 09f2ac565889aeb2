"""FedPer: the encoder is everybody's, the classifier each client's own (Arivazhagan et al., 2019, Algorithms 1 and 2).

Departure from the text: the last layer alone is personal, as in the papers that compare against it; theirs may keep
more. All classifiers start from the same random weights.
"""

from typing import ClassVar

from raylt.core.method import Method
from raylt.data.sources import Kind
from raylt.models.split import Params, SplitModel


class FedPer(Method):
    """FedAvg of the encoder, its running statistics included; both halves are trained jointly."""

    name: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al., arXiv 2019"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1912.00818"
    problems: ClassVar[tuple[Kind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True

    def shared(self, model: SplitModel) -> Params:
        return model.entries("encoder.")
