"""`Setup`: what an experiment is made of, as values. They travel to every process; nothing is looked up there."""

from dataclasses import dataclass

import torch

from raylt.config import Config
from raylt.core.method import Method
from raylt.data.samples import Augmentation
from raylt.data.task import Facts
from raylt.errors import ConfigError
from raylt.models import ModelFactory
from raylt.models.split import Params, SplitModel, running_statistics
from raylt.seeds import seeded


@dataclass(frozen=True)
class Setup:
    """A configuration and what it names.

    Attributes:
        model: number of classes and shape of an image (height, width, channels) to a new model, with random weights
            from torch's global generator.
        augment: of training images; None leaves them as they are.
    """

    config: Config
    method: Method
    model: ModelFactory
    augment: Augmentation | None

    def new_model(self, facts: Facts) -> SplitModel:
        """The model that every participant starts from, the same everywhere."""
        with seeded(self.config.seed, "model"):
            model = self.method.build(facts, self.model(facts.classes, facts.shape))
        if self.config.federation.batchnorm == "local":
            model.stays = running_statistics(model)
        # images come as channels-last views of their bytes; convolutions are 1.1 to 1.3 times as fast on them
        return model.to(memory_format=torch.channels_last)      # pyright: ignore[reportCallIssue]

    def check(self, facts: Facts) -> SplitModel:
        """Before anything starts: whether method and model are made for this kind of problem.

        Returns:
            A new model.

        Raises:
            ConfigError: they are not.
        """
        method = self.method
        if facts.kind not in method.problems:
            raise ConfigError(f"method = {method.name}: is for {' and '.join(method.problems)}, and {facts.name} is a "
                              f"problem of {facts.kind}; raylt methods shows which methods can do it")
        if self.config.data.erased == "unlabelled" and self.config.local.unlabelled == "ignored":
            raise ConfigError("data.erased = unlabelled: a batch that shows none of a client's classes has no label at "
                              "all; set local.unlabelled=absent")
        model = self.new_model(facts)
        if model.problem != facts.kind:
            raise ConfigError(f"model = {self.config.model}: does not do {facts.kind}, which {facts.name} is a problem "
                              f"of; raylt settings lists the models that do")
        return model


def private_entries(method: Method, model: SplitModel) -> Params:
    """The entries of the model that do not travel."""
    shared = method.shared(model).keys()
    return {name: value for name, value in model.state_dict().items() if name not in shared}
