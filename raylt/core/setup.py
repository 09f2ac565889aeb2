"""`Setup`: the values that make up an experiment, in a form that can be sent to every process."""

from dataclasses import dataclass

import torch

from raylt.config import Config
from raylt.core.device import one_thread
from raylt.core.exclusions import PlannedRun, allows_robust_rule, check_exclusions
from raylt.core.method import Method
from raylt.core.training.schedules import Schedule
from raylt.data.samples import Augmentation
from raylt.data.task import TaskSpec
from raylt.errors import ConfigError, type_name
from raylt.models import ModelFactory
from raylt.models.image_text import PREFIX, start_from_texts
from raylt.models.split import SplitModel, StateDict, running_statistics
from raylt.models.trainable import limit
from raylt.seeds import seeded


@dataclass(frozen=True)
class Setup:
    """A configuration whose names (method, model and so on) are resolved to values.

    Attributes:
        model: Function from the number of classes and the shape of an image (height, width, channels) to a new model,
            with random weights from torch's global generator.
        augment: Augmentation of training images, or None.
        schedule: Learning rate over the rounds; None for the built-in schedule that the configuration names.
    """

    config: Config
    method: Method
    model: ModelFactory
    augment: Augmentation | None
    schedule: Schedule | None = None

    @property
    def has_random_frozen_parts(self) -> bool:
        """Return whether frozen parts of the model have random weights."""
        config = self.config
        return config.trainable != "all" and config.weights is None and not config.model.startswith(PREFIX)

    def new_model(self, spec: TaskSpec) -> SplitModel:
        """Return the initial model, which is the same in every process."""
        with one_thread(), seeded(self.config.seed, "model"):
            base = self._base(spec)
            parts = {name for name, _ in base.named_children()}
            model = check_model(self.method, "build", self.method.build(spec, base), "the given one")
        model.method_heads = frozenset(name for name, _ in model.named_children() if name not in parts)
        if self.config.federation.batchnorm == "local":
            # the state dict does not contain frozen statistics
            model.local_buffers = running_statistics(model) & model.state_dict().keys()
        # images are channels-last views of their bytes, with which steps are 1.1 to 2 times as fast
        return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def zero_shot_model(self, spec: TaskSpec) -> SplitModel | None:
        """Return the model that classifies by texts, before any training; None if the run does not start from texts."""
        if self.config.classifier == "random":
            return None
        with one_thread():
            return self._base(spec)

    def _base(self, spec: TaskSpec) -> SplitModel:
        model = limit(self.model(spec.classes, spec.shape), self.config.trainable)
        if self.method.learns_prompts and model.prompts is None:
            raise ConfigError(
                f"model: {self.method.name} learns prompts for a text tower, and this model has none "
                f"({self.config.model}). Set model=clip:NAME, or choose another method.",
                code="config.conflict",
                key="model",
                value=self.config.model,
                method=self.method.name,
            )
        if self.config.classifier != "random":
            start_from_texts(model, self.config.model, spec.class_names, self.config.classifier)
        return model

    def check(self, spec: TaskSpec, model: SplitModel) -> None:
        """Raise ConfigError if settings exclude each other, before anything starts.

        Args:
            spec: Properties of the task that a method may know.
            model: A new model, from `new_model`.

        Raises:
            ConfigError: Method, model, data and settings do not fit together.
        """
        check_exclusions(self._planned(spec, model))

    def allows_robust_rule(self, spec: TaskSpec, model: SplitModel) -> bool:
        """Return whether `federation.robust` is not set and could be, for the arguments of `check`."""
        return allows_robust_rule(self._planned(spec, model))

    def _planned(self, spec: TaskSpec, model: SplitModel) -> PlannedRun:
        return PlannedRun(self.config, self.method, spec, model, self.augment)


def check_model(method: Method, function: str, model: object, example: str) -> SplitModel:
    """Return the result of a method's function, after a check that it is a model.

    Args:
        method: The method.
        function: Name of its function.
        model: The result of the function.
        example: A model that the function could return, in words.

    Raises:
        ConfigError: The function returned something else.
    """
    if isinstance(model, SplitModel):
        return model
    raise ConfigError(
        f"method: {function} of {method.name} returned {type_name(model)}. Return a raylt.SplitModel, such as "
        f"{example}.",
        code="model.wrong-type",
        key="method",
        value=method.name,
    )


def shared_entries(method: Method, model: SplitModel) -> StateDict:
    """Return the model's state-dict entries that are sent.

    Raises:
        ConfigError: `Method.shared` does not return entries of the model by name.
    """
    shared: object = method.shared(model)
    if not isinstance(shared, dict):
        problem = f"returned {type_name(shared)}"
    elif unknown := shared.keys() - model.state_dict().keys():
        problem = f"returned an entry that the model does not have ({min(map(str, unknown))})"
    else:
        return shared
    raise ConfigError(
        f"method: shared of {method.name} {problem}. Return a dict of the model's entries by name, such as "
        'model.entries("encoder.").',
        code="model.wrong-type",
        key="method",
        value=method.name,
    )


def private_entries(method: Method, model: SplitModel) -> StateDict:
    """Return the model's state-dict entries that are never sent."""
    shared = shared_entries(method, model).keys()
    return {name: value for name, value in model.state_dict().items() if name not in shared}
