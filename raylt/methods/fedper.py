"""FedPer: a shared encoder and a private classifier for each client (Arivazhagan et al., 2019, Algorithms 1 and 2).

Departures from the text: only the last layer is personal, as in the papers that compare with it; the original may keep
more layers. All classifiers start from the same random weights; in the text each starts from its own (from memory).
`method=bpfed alpha=0 crt=false lws=false` is FedPer with that start (docs/results/bpfed.md compares the two).
"""

from typing import ClassVar

from raylt.core.method import Method
from raylt.data.sources.sources import ProblemKind
from raylt.models.split import SplitModel, StateDict


class FedPer(Method):
    """FedAvg of the encoder, including its running statistics. Encoder and classifier are trained jointly."""

    name: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al., arXiv 2019"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1912.00818"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    personal: ClassVar[bool] = True
    stackable: ClassVar[bool] = True

    def shared(self, model: SplitModel) -> StateDict:
        return model.entries("encoder.")
