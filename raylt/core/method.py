"""`Method`: one federated algorithm as a value. Its fields are the hyper-parameters, its functions are the algorithm.

The framework owns the loop over rounds; a method owns what happens in one. Functions that take a `client` run at that
client and see it and the message, nothing else; those that take the `server` run there and reach clients through
`fleet.ask`.
"""

import math
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from torch import Tensor, nn

from raylt import tree
from raylt.config import Config
from raylt.config.typed import as_typed
from raylt.core.client import Client, Message, Reply
from raylt.core.cohort import Cohort
from raylt.core.fleet import Fleet
from raylt.core.reductions import mean
from raylt.core.server import Server
from raylt.core.server_optimisers import ServerOptimiser
from raylt.core.terms import asked_for, figure_of, reply_of
from raylt.core.training import Objective, sgd, take_statistics
from raylt.data.sources import Kind
from raylt.data.task import Facts, Task
from raylt.models.split import Params, SplitModel
from raylt.recordable import recordable

Group = Literal["global", "personal", "statistics", "aggregation"]


class Method(BaseModel):
    """One federated algorithm. The defaults are FedAvg (McMahan et al., AISTATS 2017).

    Attributes:
        name: what a configuration calls it.
        paper: authors, venue and year; `link`: where it can be read.
        personal: whether clients are judged by their own models.
        problems: what the paper's algorithm is defined for; others are refused.
        later: by stage, the fields that act from it on and not before, see `stages`.
        trains_as: the method whose rounds these are, where only what follows them is another.
        group: what it changes: the one model's training (global), what clients keep (personal), what is put together
            after training (statistics) or in a round (aggregation); None: global or personal.
        privileged: what it takes for granted that a federation does not have, in words; None for most.
        sums_samples: whether what clients upload after the last round are sums over samples of which each adds no more
            than is declared (`Reduction.bounded`), so that noise can hide it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    paper: ClassVar[str]
    personal: ClassVar[bool] = False
    problems: ClassVar[tuple[Kind, ...]] = ("classification",)
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    trains_as: ClassVar[str | None] = None
    privileged: ClassVar[str | None] = None
    link: ClassVar[str | None] = None
    group: ClassVar[Group | None] = None
    sums_samples: ClassVar[bool] = False

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def _as_typed(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return as_typed(cls.model_fields[info.field_name].annotation, value)

    @property
    def finishes(self) -> bool:
        """Whether there is something to do after the last round."""
        return False

    def stages(self, rounds: int) -> dict[str, int]:
        """The stages of a run, by name, and the step after which each begins; a run can be branched there.

        Args:
            rounds: R.
        """
        return {"finish": rounds, "judging": rounds + self.finishes}

    @classmethod
    def stage_of(cls, field: str) -> str | None:
        """The stage that a field acts from; None: from the first round."""
        return next((stage for stage, names in cls.later.items() if field in names), None)

    @property
    def sees_each(self) -> tuple[str, ...]:
        """The parts that it asks for as `each`: what the server must see of every client by itself."""
        return ()

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the objective's terms, where it has several: each round reports their shares in its gradient."""
        return ()

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        """Before any process starts, where the run is started: fetches what is missing, refuses what cannot work.

        Args:
            model: a new one.

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
        """The loss of a batch. Called once a round, so the closure holds what the round fixes.

        One of several terms is a `Terms`. One whose calls launch the same every time says so, `raylt.recordable`.
        """
        return recordable(lambda batch: client.cross_entropy(client.model(batch.x), batch.y))

    def train(self, client: Client, message: Message) -> Reply:
        """Local training, on the model that the message brought."""
        client.receive(message["model"])
        objective = self.objective(client, message)
        loss = sgd(client, objective)
        return client.reply(model=self.shared(client.model), loss=loss, **reply_of(objective, self.terms))

    def settle(self, client: Client, message: Message) -> None:
        """What a client does that joins after training, once, before it is judged; the message is a round's.

        It joins, and the entries that it keeps for itself are trained on its samples, as long as in a round, under the
        shared ones as they are in the end. Where it keeps but running statistics (federation.batchnorm = local), these
        are taken. A method whose personal models are in the clients' states says here how they come to be.
        """
        client.receive(message["model"])
        shared, model = self.shared(client.model), client.model
        own = [value for name, value in model.named_parameters() if name not in shared and value.requires_grad]
        if own:
            self.join(client, {})
            sgd(client, self.objective(client, message), own)
        else:
            take_statistics(client)

    # at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        """Before the first round. The empty `join` is not sent: ten thousand calls for nothing take half a minute."""
        if type(self).join is not Method.join:
            fleet.ask(self.join, fleet.everyone, {})

    def sample(self, server: Server, fleet: Fleet) -> Cohort | list[int]:
        """The clients of this round: ceil(participation * K), uniformly without replacement, or each with the chance
        `participation`; seeded by the round, unless privacy rests on nobody's knowing who was drawn."""
        federation, clients = server.config.federation, server.config.data.clients
        if federation.sampling == "poisson":
            hidden = server.config.privacy.update_epsilon is not None
            rng = np.random.default_rng(secrets.randbits(256) if hidden else server.seed("sample"))
            return Cohort([id for id in fleet.ids if rng.random() < federation.participation])
        assert clients is not None, "a run's configuration says how many there are"
        there = clients - len(fleet.newcomers)
        wanted = min(len(fleet.ids), math.ceil(federation.participation * there - 1e-9))
        asked = min(len(fleet.ids), math.ceil(wanted * (1 + federation.over_select) - 1e-9))
        rng = np.random.default_rng(server.seed("sample"))
        return Cohort(rng.choice(fleet.ids, asked, replace=False), wanted)

    def message(self, server: Server) -> Message:
        """What every client of the round gets."""
        return {"model": tree.snapshot(self.shared(server.model))}

    def reply_weights(self, server: Server, fleet: Fleet) -> Mapping[int, float] | None:
        """What each client's reply counts in the means of a round, by id, and what it must say; None: its samples."""
        return None

    def round(self, server: Server, fleet: Fleet) -> None:
        """One round, in straight-line code."""
        message = self.message(server)
        got = fleet.ask(self.train, self.sample(server, fleet), message, self.reply_weights(server, fleet),
                        model=mean.like(message["model"]), loss=mean.like(0.0), **asked_for(self.terms))
        server.step(got["model"])
        server.log(loss=got["loss"], **figure_of(got))

    def server_optimiser(self) -> ServerOptimiser | None:
        """The rule of `server.step`; None: the clients' mean is the new global model."""
        return None

    def finish(self, server: Server, fleet: Fleet) -> None:
        """After the last round, of a method that `finishes`."""

    # what is judged

    def global_model(self, server: Server) -> SplitModel:
        """The global model that users get."""
        return server.model

    def client_model(self, client: Client) -> SplitModel:
        """Of a personal method: the model that this client uses; its shared entries have just been received."""
        return client.model

    @property
    def other_models(self) -> tuple[str, ...]:
        """Of a personal method: names of models of a client that are judged beside `client_model` after the last step,
        where a paper leaves open whose accuracy it reports."""
        return ()

    def other_model(self, client: Client, name: str) -> SplitModel:
        """One of `other_models`; the shared entries have just been received."""
        raise NotImplementedError

    def predict(self, model: nn.Module, x: Tensor) -> Tensor:
        """Logits [B, C], or [B, C, H, W] where labels are maps, of images [B, channels, H, W]."""
        return model(x)
