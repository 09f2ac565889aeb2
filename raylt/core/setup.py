"""`Setup`: what an experiment is made of, as values. They travel to every process; nothing is looked up there."""

import importlib.util
from dataclasses import dataclass

import torch

from raylt.config import Config
from raylt.core.client_noise import check_budget
from raylt.core.method import Method
from raylt.data.samples import Augmentation
from raylt.data.task import Facts
from raylt.data.transforms import moves_pixels, needs_grey_or_colour
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
        # images come as channels-last views of their bytes; steps are 1.1 to 2 times as fast on them
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
        if facts.kind == "segmentation" and moves_pixels(self.augment):
            raise ConfigError(f"augment = {self.config.augment}: moves pixels without their label maps; take "
                              "crop_flip, scale_crop_flip or color_jitter")
        if facts.shape[2] not in (1, 3) and needs_grey_or_colour(self.augment):
            raise ConfigError(f"augment = {self.config.augment}: is for images of one channel or three, those of "
                              f"{facts.name} have {facts.shape[2]}; take crop_flip, "
                              "resized_crop_flip, scale_crop_flip or none")
        model = self.new_model(facts)
        self._check_federation(model)
        if model.problem != facts.kind:
            raise ConfigError(f"model = {self.config.model}: does not do {facts.kind}, which {facts.name} is a problem "
                              f"of; raylt settings lists the models that do")
        return model

    def _check_federation(self, model: SplitModel) -> None:
        """Whether what the server is to see of replies is what the method needs of them."""
        method, robust = self.method, self.config.federation.robust
        if self.config.federation.secure:
            if importlib.util.find_spec("cryptography") is None:
                raise ConfigError("federation.secure = true: needs cryptography; pip install 'raylt[secure]'")
            if method.sees_each:
                raise ConfigError(f"federation.secure = true: {method.name} must see each client's "
                                  f"{' and '.join(method.sees_each)}, and a secure sum shows none; set it to false, or "
                                  "the fields of the method so that it only sums")
        if self.config.privacy.epsilon is not None and (
                not method.sums_samples or not method.finishes or method.sees_each):
            raise ConfigError(f"privacy.epsilon = {self.config.privacy.epsilon:g}: {method.name} uploads no sums over "
                              "samples after the last round; leave it out, or take sfd, ccvr, fedncm or fed3r")
        if self.config.privacy.epsilon is not None and model.stays:
            raise ConfigError("privacy.epsilon: with federation.batchnorm = local a sample moves the features of the "
                              "others by its client's running statistics, which the noise does not cover; set "
                              "federation.batchnorm=average")
        if self.config.privacy.update_epsilon is not None and (
                method.finishes or method.sees_each or method.terms or not method.shared(model)):
            raise ConfigError(f"privacy.update_epsilon = {self.config.privacy.update_epsilon:g}: {method.name} uploads "
                              "more than a model, or none, and noise hides clients in the mean of models alone; take a "
                              "method that uploads nothing else, such as fedavg")
        check_budget(self.config)
        federation = self.config.federation
        clients = (self.config.data.clients or 1) - self.config.data.new_clients        # those that train
        asked = federation.participation
        short = (1 - asked)**clients                            # of no client in a round
        if federation.secure:                                   # a sum of one hides nothing: nor may there be one
            short += clients * asked * (1 - asked)**(clients - 1)
        if federation.sampling == "poisson" and federation.rounds * short > 0.01:
            raise ConfigError(f"federation.sampling = poisson: the chance that some round has "
                              f"{'fewer than two clients' if federation.secure else 'no client'} is "
                              f"{federation.rounds * short:.2g}; raise federation.participation or data.clients")
        if federation.secure and federation.sampling == "fixed" and asked * clients <= 1:
            raise ConfigError("federation.secure = true: a round asks one client, whose sum would hide nothing; raise "
                              "federation.participation")
        if robust is not None and not method.shared(model):
            raise ConfigError(f"federation.robust = {robust}: {method.name} averages no model; leave it out")
        if robust is not None and method.sees_each:
            raise ConfigError(f"federation.robust = {robust}: {method.name} puts clients together itself, from each "
                              f"one's {' and '.join(method.sees_each)}; leave it out, or set the fields of the method "
                              "so that it averages")


def private_entries(method: Method, model: SplitModel) -> Params:
    """The entries of the model that do not travel."""
    shared = method.shared(model).keys()
    return {name: value for name, value in model.state_dict().items() if name not in shared}
