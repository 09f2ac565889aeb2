"""Post-hoc logit adjustment: subtract tau log pi from the logits after training (Menon et al., ICLR 2021, section 4.1).

Departures from the text:
[1] pi is the prior of all clients together, from their counts; `la` uses margins in training instead.
[2] A class without samples at any client would always be predicted; instead, it is never predicted.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import total
from raylt.core.server import Server
from raylt.data.task import Task
from raylt.hyper import Uniform, hp
from raylt.methods.classifiers.family import AfterTraining
from raylt.models.layers import check_linear_classifier
from raylt.models.split import SplitModel
from raylt.ops.moments import NEVER


class PostHoc(AfterTraining):
    """FedAvg, then predictions by argmax f_y(x) - tau log pi_y with the logits f and the class priors pi.

    tau = 0 is FedAvg, except that a class without samples at any client is never predicted [2].
    """

    name: ClassVar[str] = "posthoc"
    paper: ClassVar[str] = "Menon et al., ICLR 2021"
    link: ClassVar[str | None] = "https://arxiv.org/abs/2007.07314"
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {"finish": ("tau",)}

    tau: float = hp(1.0, Uniform(0.0, 3.0), "strength tau of the adjustment, Eq. 9", ge=0)

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        check_linear_classifier(self.name, config, model)

    def statistics(self, client: Client, message: Message) -> Reply:
        return client.reply(counts=client.counts)

    def finish(self, server: Server, fleet: Fleet) -> None:
        like = torch.empty(server.model.classes, dtype=torch.int64, device="meta")
        asked = fleet.ask(self.statistics, fleet.everyone, {}, counts=total.like(like).counting())
        counts = asked["counts"]  # [1]
        own = tree.snapshot(server.model.classifier.state_dict())
        shift = self.tau * (counts / counts.sum()).clamp(min=1e-12).log().float()
        server.state["classifier"] = own | {"bias": torch.where(counts > 0, own["bias"] - shift, NEVER)}  # [2]
