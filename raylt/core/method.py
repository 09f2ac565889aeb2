"""`Method`: one federated algorithm as a value, with hyper-parameters as fields and the algorithm as functions.

The framework owns the loop over rounds; a method owns one round. A function that takes a `client` runs at that client
and sees only it and the message. A function that takes the `server` runs there and reaches clients with `fleet.ask`.

`train_model` and `train_clients` are the two halves of a usual round, for methods that add something to it.
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
from raylt.core.fleet.aggregation import Replies
from raylt.core.fleet.cohort import Cohort
from raylt.core.fleet.fleet import Fleet
from raylt.core.fleet.reductions import Reduction, mean
from raylt.core.server import Server, ServerOptimiser
from raylt.core.training.loss_terms import shares_figure, shares_part, shares_reduction
from raylt.core.training.sgd import Objective, sgd
from raylt.data.sources.sources import ProblemKind
from raylt.data.task import Task, TaskSpec
from raylt.errors import ConfigError, type_name
from raylt.hyper import not_too_large
from raylt.models.split import SplitModel, StateDict
from raylt.recordability import recordable
from raylt.tree import Tree

Group = Literal["global", "personal", "statistics", "aggregation"]


class Method(BaseModel):
    """Base class of all methods: one federated algorithm. The defaults are FedAvg (McMahan et al., AISTATS 2017).

    Attributes:
        name: The name in configurations.
        paper: Authors, venue and year.
        link: Address of the paper or its code.
        personal: True if each client is evaluated with its own model.
        problems: Kinds of problems that the algorithm is defined for; other problems are rejected.
        later: For each stage, the fields that take effect only from that stage on; see `stages`. Fields of the stage
            "judging" only affect evaluations of clients' own models: the last one and those of evaluation.personal.
        encoder_fields: Fields that act only on the training of the encoder; they have no effect if the encoder is
            frozen.
        trains_as: Name of the method whose rounds this one shares, if the two differ only in the last phase.
        group: The part of the algorithm that the method changes: training of the global model (global), what clients
            keep (personal), the aggregation after training (statistics) or in a round (aggregation). None: global or
            personal.
        privileged: Resource that the method needs and a federation does not have, as a text; None for most methods.
        sums_samples: True if clients upload, after the last round, only sums to which each sample adds no more than a
            declared length (`Reduction.bounded`), so that noise can hide the sample.
        learns_prompts: True if the method learns only the words before class names. The model must then be an
            image-text model, whose encoder is frozen (trainable = classifier).
        stackable: True if small clients can train as one stack (`local.stacked`). Such a method does not override
            `train`. Its objective draws no random numbers, keeps nothing between steps, and applies `client.model`, its
            encoder and its classifier only to the batch. It may use the model's parameters.
        other_models: Names of further models of a client, evaluated after the last step in addition to `client_model`,
            for papers that do not say which model's accuracy they report.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    _not_too_large = field_validator("*")(not_too_large)

    name: ClassVar[str]
    paper: ClassVar[str]
    link: ClassVar[str | None] = None
    personal: ClassVar[bool] = False
    problems: ClassVar[tuple[ProblemKind, ...]] = ("classification",)
    later: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    encoder_fields: ClassVar[tuple[str, ...]] = ()
    trains_as: ClassVar[str | None] = None
    group: ClassVar[Group | None] = None
    privileged: ClassVar[str | None] = None
    sums_samples: ClassVar[bool] = False
    learns_prompts: ClassVar[bool] = False
    stackable: ClassVar[bool] = False
    other_models: ClassVar[tuple[str, ...]] = ()

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def _as_typed(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        return as_typed(cls.model_fields[info.field_name].annotation, value)

    # declarations that depend on the fields

    @property
    def finishes(self) -> bool:
        """Return whether the run has a phase after the last round, which `finish` implements."""
        return type(self).finish is not Method.finish

    def stages(self, rounds: int) -> dict[str, int]:
        """Map each stage of a run to the step after which the stage begins.

        A run can be branched at these steps.

        Args:
            rounds: The number of rounds, R.
        """
        return {"finish": rounds, "judging": rounds + self.finishes}

    @property
    def sees_each(self) -> tuple[str, ...]:
        """Return the names of the reply parts that the server sees for every single client (`each`)."""
        return ()

    @property
    def augments(self) -> bool:
        """Return whether the method changes images itself, so that it cannot train on precomputed features."""
        return False

    @property
    def sees_images(self) -> bool:
        """Return whether the method feeds the images to a frozen model, besides the model that it trains."""
        return False

    @property
    def image_teacher(self) -> str | None:
        """Return the name of the image-text teacher, if the method needs only the teacher's features of the images.

        If the trained model's encoder is the teacher's image tower, frozen, clients already have these features.
        """
        return None

    @property
    def acts_on_encoder(self) -> bool:
        """Return whether the method differs from FedAvg only in how the encoder is trained.

        With an encoder that learns nothing it would be FedAvg, or train nothing.
        """
        return False

    @property
    def uploads_more(self) -> bool:
        """Return whether clients upload more than a model and its loss.

        Noise on the model would not hide such other uploads.
        """
        return bool(self.finishes or self.sees_each or self.terms)

    @property
    def terms(self) -> tuple[str, ...]:
        """Return the names of the loss terms in a `Terms` objective.

        Each round logs the terms' shares of the gradient. The names are declared because the schema of replies is fixed
        before any client trains.
        """
        return ()

    def prepare(self, task: Task, config: Config, model: SplitModel) -> None:
        """Fetch missing files and reject unusable settings, before any other process starts.

        Args:
            task: The data.
            config: The run's configuration.
            model: A new model of the run.

        Raises:
            ConfigError: A field does not fit the other fields, the task or the model, or a resource is not available.
        """

    # the model

    def build(self, spec: TaskSpec, base: SplitModel) -> SplitModel:
        """Return the model that this method trains, derived from the base model (for example with added heads)."""
        return base

    def shared(self, model: SplitModel) -> StateDict:
        """Return the model's state-dict entries that are sent. The other entries are private to each client."""
        return model.entries()

    # functions that run at a client

    def join(self, client: Client, message: Message) -> Reply:
        """Fill `client.state` once per client, before the first round."""
        return client.reply()

    def objective(self, client: Client, message: Message) -> Objective:
        """Return the loss as a function of a batch, or a `Terms` for a loss with several terms.

        The function is made once per call of a client, so its closure can hold the round's constants.
        """
        return recordable(lambda batch: client.cross_entropy(client.model(batch.x), batch.y))

    def train(self, client: Client, message: Message) -> Reply:
        """Load the model in the message and train it on the client's samples."""
        client.receive(message["model"])
        parts = train_model(self, client, message)
        return client.reply(model=self.shared(client.model), **parts)

    def settle(self, client: Client, message: Message) -> None:
        """Prepare a client that joins after training, once, before its evaluation.

        The client receives the message of a round. It joins and trains its private entries on its samples, as long as
        in a round, with the final shared entries. If it keeps only running statistics (federation.batchnorm = local),
        there is nothing to train: they are computed with the model that is evaluated. A method that keeps personal
        models in the clients' states overrides this function to create them.
        """
        client.receive(message["model"])
        shared, model = self.shared(client.model), client.model
        own = [value for name, value in model.named_parameters() if name not in shared and value.requires_grad]
        if own:
            self.join(client, {})
            sgd(client, self.objective(client, message), own)

    # functions that run at the server

    def start(self, server: Server, fleet: Fleet) -> None:
        """Let all clients join, before the first round.

        The default `join` does nothing and is not sent: for ten thousand clients that would take half a minute.
        """
        if type(self).join is not Method.join:
            fleet.ask(self.join, fleet.everyone, {})

    def sample(self, server: Server, fleet: Fleet) -> Cohort | list[int]:
        """Return the clients of this round.

        Of the K clients that train, ceil(participation * K) are drawn uniformly without replacement, and more with
        federation.over_select. With federation.sampling = poisson, each client is drawn with probability
        `participation`. The draw is seeded by the round, unless privacy requires that it is secret.
        """
        federation, clients = server.config.federation, server.config.data.clients
        if federation.sampling == "poisson":
            secret = server.config.privacy.update_epsilon is not None
            rng = np.random.default_rng(secrets.randbits(256) if secret else server.seed("sample"))
            return Cohort([id for id in fleet.ids if rng.random() < federation.participation], drawn=True)
        assert clients is not None, "the configuration of a run has the number of clients"
        training = clients - len(fleet.new_clients)
        wanted = min(len(fleet.ids), math.ceil(federation.participation * training - 1e-9))
        asked = min(len(fleet.ids), math.ceil(wanted * (1 + federation.over_select) - 1e-9))
        rng = np.random.default_rng(server.seed("sample"))
        return Cohort(rng.choice(fleet.ids, asked, replace=False), wanted, drawn=True)

    def message(self, server: Server) -> Message:
        """Return the message that the server sends to every client of the round."""
        return {"model": tree.snapshot(self.shared(server.model))}

    def round(self, server: Server, fleet: Fleet) -> None:
        """Run one round."""
        train_clients(self, server, fleet)

    def server_optimiser(self) -> ServerOptimiser | None:
        """Return the optimiser of `server.step`, or None to take the clients' mean as the global model."""
        return None

    def finish(self, server: Server, fleet: Fleet) -> None:
        """Run the phase after the last round; only called if `finishes` is true."""

    def last_phase(self, spec: TaskSpec, model: SplitModel) -> str:
        """Describe the work and time of `finish`, or return an empty text if it takes no longer than a round."""
        return ""

    def last_phase_seconds(self, spec: TaskSpec, model: SplitModel) -> float | None:
        """Return the expected seconds of `finish` on one core, or None if they cannot be predicted."""
        return None

    # evaluated models

    def global_model(self, server: Server) -> SplitModel:
        """Return the global model, which is evaluated and exported."""
        return server.model

    def client_model(self, client: Client) -> SplitModel:
        """Return the model that a client of a personal method uses, after it received the shared entries."""
        return client.model

    def other_model(self, client: Client, name: str) -> SplitModel:
        """Return the client's model of this name in `other_models`, after the client received the shared entries.

        Raises:
            NotImplementedError: The method lists the name and does not override this function.
        """
        raise NotImplementedError(f"{type(self).__name__} lists {name!r} in other_models. Implement other_model.")

    def predict(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the logits of images [B, channels, H, W]: [B, C], or [B, C, H, W] for segmentation."""
        return model(x)


def check_last_rate(method: Method, config: Config, remedy: str = "") -> None:
    """Check that the learning rate is not almost 0 in a last phase of local training.

    Args:
        method: The method.
        config: The run's configuration.
        remedy: A setting that skips the phase, such as "method.tune_epochs=0".

    Raises:
        ConfigError: The learning rate follows a cosine, which is almost 0 in the last round.
    """
    if method.finishes and config.local.schedule == "cosine":
        raise ConfigError(
            f"local.schedule: the last phase of {method.name} uses the last round's learning rate, which is almost 0 "
            f"(cosine). Set local.schedule=step{', or ' + remedy if remedy else ''}.",
            code="config.conflict",
            key="local.schedule",
            value="cosine",
            excludes="method",
        )


def train_model(method: Method, client: Client, message: Message, epochs: float | None = None) -> Tree:
    """Train a client's model on the method's objective; return the reply parts that report on the training.

    Args:
        method: The method.
        client: The client, whose model is trained.
        message: The message of the round.
        epochs: Number of epochs; by default `local.epochs` or `local.steps`.

    Returns:
        `loss`, the mean loss per sample, and for an objective with several terms their `shares` of the gradient.
    """
    objective = method.objective(client, message)
    loss = sgd(client, objective, epochs=epochs)
    return {"loss": loss} | shares_part(objective, method.terms)


def train_clients(
    method: Method,
    server: Server,
    fleet: Fleet,
    cohort: Cohort | list[int] | None = None,
    message: Message | None = None,
    weights: Mapping[int, float] | None = None,
    **parts: Reduction,
) -> Replies:
    """Ask clients to train, average their models into the next global model, and log their loss.

    Args:
        method: The method.
        server: The server, whose model takes the step.
        fleet: The clients.
        cohort: The clients to ask; by default the method's `sample`.
        message: The message to the clients; by default the method's `message`.
        weights: The weight of each client's reply in the means, by id; by default its number of samples.
        parts: Further parts of the replies.
    """
    message = _with_model(method, method.message(server) if message is None else message)
    got = fleet.ask(
        method.train,
        method.sample(server, fleet) if cohort is None else cohort,
        message,
        weights,
        model=mean.like(message["model"]),
        loss=mean.like(0.0),
        **shares_reduction(method.terms),
        **parts,
    )
    server.step(got["model"])
    server.log(loss=got["loss"], **shares_figure(got))
    return got


def _with_model(method: Method, message: object) -> Message:
    """Return a message after a check that it has the entries of the model, which clients train and send back."""
    if isinstance(message, dict) and isinstance(message.get("model"), dict):
        return message
    problem = type_name(message) if not isinstance(message, dict) else ", ".join(map(str, message)) or "an empty dict"
    raise ConfigError(
        f"method: the message of {method.name} has no entries of a model ({problem}). Return "
        "super().message(server) | {...}, or override round.",
        code="method.wrong-argument",
        key="method",
        value=method.name,
    )
