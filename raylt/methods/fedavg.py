"""FedAvg: local SGD, then the mean of the models, weighted by samples (McMahan et al., AISTATS 2017, Algorithm 1)."""

from typing import ClassVar

from raylt.core.method import Method
from raylt.data.sources.sources import ProblemKind


class FedAvg(Method):
    """Local SGD, then a weighted average of the models. Both are the defaults of `Method`."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1602.05629"
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification", "segmentation")
    stackable: ClassVar[bool] = True
