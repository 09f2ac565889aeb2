"""`Method`: one federated algorithm as a value. Its fields are the hyper-parameters, its functions are the algorithm.

The framework owns the loop over rounds; a method owns what happens in one. Functions that take a `client` run at that
client and see it and the message, nothing else; those that take the `server` run there and reach clients through the
three verbs of the fleet.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from raylt import tree
from raylt.config import Config
from raylt.core.client import Client, Message, Reply
from raylt.core.cohort import Cohort
from raylt.core.evaluation import confusion_of
from raylt.core.fleet import Fleet
from raylt.core.server import Server
from raylt.core.training import Objective, sgd
from raylt.data.sources import Kind
from raylt.data.task import Facts, Task
from raylt.errors import ConfigError
from raylt.metrics import confusion
from raylt.models import MODELS, SEGMENTERS, build_model
from raylt.models.split import Params, SplitModel, running_statistics
from raylt.seeds import seeded
from raylt.tree import nbytes


class Method(BaseModel):
    """One federated algorithm. The defaults are FedAvg (McMahan et al., AISTATS 2017).

    Attributes:
        name: what a configuration calls it.
        paper: authors, venue and year.
        personal: whether clients are judged by their own models.
        one_encoder: whether these differ in their classifiers alone; each process then encodes the test set once, not
            once per client, and `predict` is not asked.
        tasks: the kinds of tasks that the paper's algorithm is defined for; others are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    paper: ClassVar[str]
    personal: ClassVar[bool] = False
    one_encoder: ClassVar[bool] = False
    tasks: ClassVar[tuple[Kind, ...]] = ("classification",)

    def prepare(self, task: Task, config: Config) -> None:
        """Before any process starts, where the run is started: fetches what is missing, refuses what cannot work.

        Raises:
            ConfigError: a field does not fit the others, the task or the model, or something cannot be had.
        """

    # the model

    def build(self, task: Facts, base: SplitModel) -> SplitModel:
        """The model that this method trains, from a plain one: add heads, swap layers."""
        return base

    def shared(self, model: SplitModel) -> Params:
        """The entries of the model that travel; the rest is private to each client."""
        return model.entries()

    # at a client

    def join(self, client: Client, message: Message) -> Reply:
        """Once, before the first round: fill `client.state`."""
        return client.reply()

    def objective(self, client: Client, message: Message) -> Objective:
        """The loss of a batch. Called once a round, so the closure holds what the round fixes."""
        return lambda batch: F.cross_entropy(client.model(batch.x), batch.y)

    def train(self, client: Client, message: Message) -> Reply:
        """Local training, on the model that the message brought."""
        client.receive(message["model"])
        loss = sgd(client, self.objective(client, message))
        return client.reply(model=self.shared(client.model), loss=loss)

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        """Before the first round."""
        fleet.call(self.join, fleet.ids, {})

    def sample(self, server: Server, fleet: Fleet) -> Cohort:
        """The clients of this round: ceil(participation * K), uniformly without replacement, seeded by the round."""
        federation = server.config.federation
        wanted = min(len(fleet.ids), math.ceil(federation.participation * server.config.data.clients - 1e-9))
        asked = min(len(fleet.ids), math.ceil(wanted * (1 + federation.over_select) - 1e-9))
        rng = np.random.default_rng(server.seed("sample"))
        return Cohort(sorted(int(id) for id in rng.choice(fleet.ids, asked, replace=False)), wanted)

    def message(self, server: Server) -> Message:
        """What every client of the round gets."""
        return {"model": tree.snapshot(self.shared(server.model))}

    def round(self, server: Server, fleet: Fleet) -> None:
        """One round, in straight-line code."""
        mean = fleet.mean(self.train, self.sample(server, fleet), self.message(server))
        server.receive(mean["model"])
        server.log(loss=mean["loss"])

    def finish(self, server: Server, fleet: Fleet) -> None:
        """After the last round."""

    # what is judged

    def deployed(self, server: Server) -> nn.Module:
        """The global model that users get."""
        return server.model

    def personal_model(self, client: Client) -> SplitModel:
        """The model that this client uses; its shared entries have just been received."""
        return client.model

    def predict(self, model: nn.Module, x: Tensor) -> Tensor:
        """Logits [B, C], or [B, C, H, W] where labels are maps, of images [B, channels, H, W]."""
        return model(x)

    def judge(self, client: Client, message: Message) -> Reply:
        """Counts [C, C] of (true, predicted) classes of this client's own model on the test set."""
        client.receive(message["model"])
        model = self.personal_model(client).eval()
        test, classes, size = client.test, client.model.classes, client.config.evaluation.batch
        if self.one_encoder and test.y.ndim == 1:       # features of every pixel would not fit into memory
            with torch.no_grad():
                found = torch.cat([model.classifier(z).argmax(1) for z in client.test_features().split(size)])
            return client.reply(confusion=confusion(found, test.y, classes).cpu())
        return client.reply(confusion=confusion_of(lambda x: self.predict(model, x), test, classes, size))

    # what is counted

    def traffic(self, model: SplitModel, counts: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Bytes down to and up from one client, for each client function that a run calls.

        Args:
            counts: the client's samples per class, [C].
        """
        size = nbytes(self.shared(model))
        return {"join": (0, 0), "train": (size, size + 8)}      # 8: the loss

    # used by the framework

    def check(self, facts: Facts, config: Config) -> None:
        """Before anything starts: whether method and model are made for this kind of task.

        Raises:
            ConfigError: they are not.
        """
        if facts.kind not in self.tasks:
            raise ConfigError(f"method = {self.name}: is for {' and '.join(self.tasks)}, and {facts.name} is a task of "
                              f"{facts.kind}; raylt methods shows which methods can do it")
        maps = facts.kind == "segmentation"
        if (config.model in SEGMENTERS) != maps:
            fitting = ", ".join(name for name in MODELS if (name in SEGMENTERS) == maps)
            raise ConfigError(f"model = {config.model}: does not do {facts.kind}, which {facts.name} is a task of; "
                              f"there are: {fitting}")

    def new_model(self, facts: Facts, config: Config) -> SplitModel:
        """The model that every participant starts from, the same everywhere."""
        with seeded(config.seed, "model"):
            model = self.build(facts, build_model(config.model, facts.classes, facts.shape, config.weights))
        if config.federation.batchnorm == "local":
            model.stays = running_statistics(model)
        # images come as channels-last views of their bytes; convolutions are 1.1 to 1.3 times as fast on them
        return model.to(memory_format=torch.channels_last)      # pyright: ignore[reportCallIssue]

    def private(self, model: SplitModel) -> Params:
        """The entries of the model that do not travel."""
        shared = self.shared(model).keys()
        return {name: value for name, value in model.state_dict().items() if name not in shared}
