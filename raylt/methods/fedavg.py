"""FedAvg: local SGD, then the sample-weighted mean (McMahan et al., AISTATS 2017, Algorithm 1)."""

from typing import ClassVar

from raylt.core.method import Method
from raylt.data.sources import Kind


class FedAvg(Method):
    """The defaults of `Method`."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    link: ClassVar[str | None] = "https://arxiv.org/abs/1602.05629"
    problems: ClassVar[tuple[Kind, ...]] = ("classification", "segmentation")
