"""A table of settings that exclude each other, checked once when a run is planned.

A row names a setting, what it excludes, why, and the remedy. `raylt plan`, `raylt run`, searches and studies all
evaluate the same rows, so a conflict is found before a run is set up.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raylt.config import Config, PrivacyConfig
from raylt.core.method import Method
from raylt.core.protection.accounting import epsilon_of, rate_of
from raylt.core.report import FRESH
from raylt.data.augment import moves_pixels, needs_grey_or_colour
from raylt.data.samples import Augmentation
from raylt.data.task import TaskSpec
from raylt.errors import ConfigError, count_of
from raylt.models.image_text import PREFIX, open_tower
from raylt.models.split import SplitModel
from raylt.models.trainable import trains_on_features, whole_model

DEFAULTS = PrivacyConfig()
MAX_STARVING_CHANCE = 0.01  # maximum chance that Poisson sampling leaves some round without enough clients


@dataclass(frozen=True)
class PlannedRun:
    """The properties of a planned run that the exclusion table can test.

    Attributes:
        spec: Properties of the task that a method may know.
        model: A new model of the run.
        augment: Augmentation of training images, or None.
    """

    config: Config
    method: Method
    spec: TaskSpec
    model: SplitModel
    augment: Augmentation | None

    @property
    def training_clients(self) -> int:
        """Return the number of clients that train: all but those that join after training."""
        assert self.config.data.clients is not None, "the configuration of a run has the number of clients"
        return self.config.data.clients - self.config.data.new_clients

    @property
    def on_features(self) -> bool:
        """Return whether clients train on features instead of images, see raylt/core/encoding.py."""
        return trains_on_features(self.config.trainable, self.spec.kind)

    @property
    def shares_nothing_that_learns(self) -> bool:
        """Return whether clients would share only frozen parameters, and upload nothing else."""
        method = self.method
        shares = bool(method.shared(self.model)) or method.uploads_more
        return not shares and bool(method.shared(whole_model(self.model)))

    @property
    def has_tower_of_teacher(self) -> bool:
        """Return whether the model's encoder is the image tower of the method's teacher, so that features are equal."""
        model, teacher = self.config.model, self.method.image_teacher
        return model.startswith(PREFIX) and open_tower(model).name == teacher

    @property
    def encoder_learns(self) -> bool:
        """Return whether any parameter of the encoder is trained."""
        return any(parameter.requires_grad for parameter in self.model.encoder.parameters())

    @property
    def starving_chance(self) -> float:
        """Return the chance that Poisson sampling gives some round too few clients, as an upper bound.

        The bound holds if each client that trains has samples. A plain round needs one client, a secure sum two.
        """
        federation = self.config.federation
        asked = federation.participation
        clients = self.training_clients
        starved = (1 - asked) ** clients
        if federation.secure:
            starved += clients * asked * (1 - asked) ** (clients - 1)
        return 1 - (1 - min(starved, 1.0)) ** federation.rounds

    @property
    def spent_epsilon(self) -> float:
        """Return the epsilon that all rounds spend together under `privacy.update_epsilon`."""
        privacy = self.config.privacy
        return epsilon_of(privacy.noise_multiplier, rate_of(self.config), self.config.federation.rounds, privacy.delta)

    @property
    def early_stages(self) -> list[str]:
        """Return the stages of the method that begin before the end of the run's last round."""
        rounds = self.config.federation.rounds
        return [name for name, after in self.method.stages(rounds).items() if after < rounds]

    def setting(self, key: str) -> Any:
        """Return the value of the setting with this dotted key; the key `method` gives the method's name."""
        if key == "method":
            return self.method.name
        value: Any = self.config
        for name in key.split("."):
            value = getattr(value, name)
        return value


@dataclass(frozen=True)
class Exclusion:
    """A row of the table: two settings, or a setting and a property, that a run must not combine.

    Attributes:
        setting: Key of the setting.
        excludes: The other setting, or a property of the method, the model or the data.
        applies: Returns whether a planned run combines both.
        why: Problem that would occur, as a sentence.
        remedy: Remedy for the user, as an imperative sentence.
        code: Code of the error.
    """

    setting: str
    excludes: str
    applies: Callable[[PlannedRun], bool]
    why: Callable[[PlannedRun], str] | str
    remedy: str
    code: str = "config.conflict"

    def error(self, run: PlannedRun) -> ConfigError:
        """Return the error for a run that combines both settings."""
        value = run.setting(self.setting)
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
        why = self.why if isinstance(self.why, str) else self.why(run)
        return ConfigError(
            f"{self.setting}: {why} ({shown}). {self.remedy}.",
            code=self.code,
            key=self.setting,
            value=value,
            excludes=self.excludes,
        )


def _starving(run: PlannedRun) -> str:
    few = "fewer than two clients" if run.config.federation.secure else "no client"
    return f"the chance that some round has {few} is {run.starving_chance:.2g}"


def _parts_seen(run: PlannedRun) -> str:
    return " and ".join(run.method.sees_each)


def _missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


EXCLUSIONS: tuple[Exclusion, ...] = (
    # problem and data
    Exclusion(
        "method",
        "data.source",
        lambda run: run.spec.kind not in run.method.problems,
        lambda run: (
            f"the method is defined for {' and '.join(run.method.problems)}, and {run.spec.name} is a problem of "
            f"{run.spec.kind}"
        ),
        "Choose a method that `raylt methods` lists for this problem",
    ),
    Exclusion(
        "model",
        "data.source",
        lambda run: run.model.problem != run.spec.kind,
        lambda run: f"the model does not support {run.spec.kind}, the problem of {run.spec.name}",
        "Choose a model that `raylt settings` lists for this problem",
    ),
    Exclusion(
        "data.erased",
        "local.unlabelled",
        lambda run: run.config.data.erased == "unlabelled" and run.config.local.unlabelled == "ignored",
        "a batch that shows none of a client's classes has no label at all",
        "Set local.unlabelled=absent",
    ),
    Exclusion(
        "augment",
        "segmentation",
        lambda run: run.spec.kind == "segmentation" and moves_pixels(run.augment),
        "the augmentation moves pixels without their label maps",
        "Set augment to crop_flip, scale_crop_flip or color_jitter",
    ),
    Exclusion(
        "augment",
        "channels",
        lambda run: run.spec.shape[2] not in (1, 3) and needs_grey_or_colour(run.augment),
        lambda run: (
            f"the augmentation needs images of one or three channels, and those of {run.spec.name} have "
            f"{run.spec.shape[2]}"
        ),
        "Set augment to crop_flip, resized_crop_flip, scale_crop_flip or none",
    ),
    Exclusion(
        "input",
        "data.normalise",
        lambda run: run.config.input is not None and run.config.data.normalise,
        "the encoder that resizes images also normalises them",
        "Leave data.normalise out, or set input=null",
    ),
    Exclusion(
        "model",
        "data.normalise",
        lambda run: run.config.model.startswith(PREFIX) and run.config.data.normalise,
        "an image-text model normalises images itself",
        "Leave data.normalise out",
    ),
    # trained parameters
    Exclusion(
        "trainable",
        "method",
        lambda run: run.shares_nothing_that_learns,
        lambda run: f"{run.method.name} shares only the encoder, which is frozen, so clients send nothing",
        "Set trainable to norm, last:N or lora:R, or choose a method that shares the classifier",
    ),
    Exclusion(
        "trainable",
        "method",
        lambda run: run.method.acts_on_encoder and not run.encoder_learns,
        lambda run: (
            f"{run.method.name} acts on the training of the encoder, and this encoder has no trained parameters"
        ),
        "Set trainable to norm, last:N or lora:R, or choose method=fedavg",
    ),
    Exclusion(
        "trainable",
        "method",
        lambda run: run.on_features and run.method.augments,
        lambda run: f"{run.method.name} changes images itself, and a frozen encoder sees each image once",
        "Set trainable to norm, last:N or lora:R, or the fields of the method so that it does not change images",
    ),
    Exclusion(
        "trainable",
        "method.teacher",
        lambda run: run.on_features and run.method.sees_images and not run.has_tower_of_teacher,
        lambda run: f"the teacher of {run.method.name} needs images, and with a frozen encoder clients hold features",
        "Set model=clip:NAME with the name of the teacher, compute its features before (method.teacher=npz:FILE), or "
        "set trainable to norm, last:N or lora:R",
    ),
    Exclusion(
        "trainable",
        "method",
        lambda run: run.method.learns_prompts and run.config.trainable != "classifier",
        lambda run: f"{run.method.name} learns prompts and does not train the encoder",
        "Set trainable=classifier",
    ),
    Exclusion(
        "federation.rounds",
        "method",
        lambda run: run.config.federation.rounds == 0 and not (run.method.sums_samples and run.method.finishes),
        lambda run: f"{run.method.name} learns in rounds, and there are none",
        "Choose a method that finishes with clients' sums, such as ccvr, or set federation.rounds to at least 1",
    ),
    Exclusion(
        "federation.rounds",
        "trainable",
        lambda run: run.config.federation.rounds == 0 and run.config.trainable != "classifier",
        lambda run: f"without a round nothing trains the encoder, and trainable = {run.config.trainable} lets it learn",
        "Set trainable=classifier, or federation.rounds to at least 1",
    ),
    # early stopping
    Exclusion(
        "federation.patience",
        "data.validation",
        lambda run: run.config.federation.patience is not None and run.config.data.validation == 0,
        "rounds end early by the accuracy on validation samples, and there are none",
        "Set data.validation=0.1",
    ),
    Exclusion(
        "federation.patience",
        "evaluation.personal",
        lambda run: (
            run.config.federation.patience is not None
            and run.config.evaluation.personal == 0
            and (run.method.personal or bool(run.model.local_buffers))
        ),
        "clients' own models are evaluated only after the last round",
        "Set evaluation.personal=1, or another number of rounds between evaluations",
    ),
    Exclusion(
        "federation.patience",
        "method",
        lambda run: run.config.federation.patience is not None and bool(run.early_stages),
        lambda run: (
            f"the stage {run.early_stages[0]} of {run.method.name} begins some rounds before the last, and the last "
            "round is not known in advance"
        ),
        "Set federation.patience to null",
    ),
    Exclusion(
        "evaluation.fresh",
        "method",
        lambda run: run.config.evaluation.fresh and FRESH in run.method.other_models,
        lambda run: f"{run.method.name} has another model of a client named {FRESH}, so their figures would be mixed",
        "Rename that model in other_models, or set evaluation.fresh=false",
    ),
    Exclusion(
        "federation.batchnorm",
        "model",
        lambda run: run.config.federation.batchnorm == "local" and not run.model.local_buffers,
        "the model has no running statistics that training changes, so nothing would stay at the clients",
        "Set federation.batchnorm=average",
    ),
    Exclusion(
        "local.schedule",
        "data.new_clients",
        lambda run: (
            run.config.local.schedule == "cosine"
            and run.config.federation.rounds > 2
            and run.config.data.new_clients > 0
            and run.method.personal
        ),
        "new clients train models of their own at the last round's learning rate, which the cosine has brought near 0",
        "Set local.schedule=step, or data.new_clients=0",
    ),
    Exclusion(
        "local.schedule",
        "evaluation.fresh",
        lambda run: (
            run.config.local.schedule == "cosine"
            and run.config.federation.rounds > 2
            and run.config.evaluation.fresh
            and run.method.personal
        ),
        "clients train once more at the last round's learning rate, which the cosine has brought near 0",
        "Set local.schedule=step, or evaluation.fresh=false",
    ),
    # client sampling
    Exclusion(
        "federation.sampling",
        "federation.over_select",
        lambda run: run.config.federation.sampling == "poisson" and run.config.federation.over_select > 0,
        "Poisson sampling asks no fixed number of clients to which federation.over_select could add",
        "Set federation.over_select=0, or federation.sampling=fixed",
    ),
    Exclusion(
        "federation.sampling",
        "federation.participation",
        lambda run: run.config.federation.sampling == "poisson" and run.starving_chance > MAX_STARVING_CHANCE,
        _starving,
        "Raise federation.participation or data.clients",
    ),
    # secure sums
    Exclusion(
        "federation.secure",
        "cryptography",
        lambda run: run.config.federation.secure and _missing("cryptography"),
        "secure sums need the package cryptography",
        "Run pip install '.[secure]' in the clone",
        "config.missing-package",
    ),
    Exclusion(
        "federation.secure",
        "federation.robust",
        lambda run: run.config.federation.secure and run.config.federation.robust is not None,
        "a robust rule looks at each client's part, and a secure sum shows none",
        "Set federation.robust=null, or federation.secure=false",
    ),
    Exclusion(
        "federation.secure",
        "method",
        lambda run: run.config.federation.secure and bool(run.method.sees_each),
        lambda run: f"{run.method.name} must see each client's {_parts_seen(run)}, and a secure sum shows none",
        "Set federation.secure=false, or the fields of the method so that it only sums",
    ),
    Exclusion(
        "federation.secure",
        "federation.participation",
        lambda run: (
            run.config.federation.secure
            and run.config.federation.sampling == "fixed"
            and run.config.federation.participation * run.training_clients <= 1
        ),
        "a round asks one client, and a sum of one hides nothing",
        "Raise federation.participation",
    ),
    # robust rules
    Exclusion(
        "federation.robust",
        "method",
        lambda run: run.config.federation.robust is not None and not run.method.shared(run.model),
        lambda run: f"{run.method.name} averages no model",
        "Set federation.robust=null",
    ),
    Exclusion(
        "federation.robust",
        "method",
        lambda run: run.config.federation.robust is not None and bool(run.method.sees_each),
        lambda run: f"{run.method.name} combines each client's {_parts_seen(run)} itself",
        "Set federation.robust=null, or the fields of the method so that it averages",
    ),
    # differential privacy of samples
    Exclusion(
        "privacy.epsilon",
        "privacy.update_epsilon",
        lambda run: run.config.privacy.epsilon is not None and run.config.privacy.update_epsilon is not None,
        "privacy.epsilon hides samples and privacy.update_epsilon hides clients; their budgets do not add up",
        "Set one of them to null",
    ),
    Exclusion(
        "privacy.epsilon",
        "method",
        lambda run: (
            run.config.privacy.epsilon is not None
            and (not run.method.sums_samples or not run.method.finishes or bool(run.method.sees_each))
        ),
        lambda run: f"{run.method.name} uploads no sums over samples after the last round",
        "Set privacy.epsilon=null, or choose a method that finishes with clients' sums, such as ccvr",
    ),
    Exclusion(
        "privacy.epsilon",
        "federation.batchnorm",
        lambda run: run.config.privacy.epsilon is not None and bool(run.model.local_buffers),
        "with federation.batchnorm=local a sample changes the features of others through its client's running "
        "statistics, which the noise does not cover",
        "Set federation.batchnorm=average",
    ),
    Exclusion(
        "privacy.epsilon",
        "method",
        lambda run: run.config.privacy.epsilon is not None and run.method.augments,
        lambda run: (
            f"{run.method.name} draws random views of images one after the other, so a sample changes the views of "
            "those behind it, which the noise does not cover"
        ),
        "Set the fields of the method so that it does not change images, for sfd method.statistics_area=1",
    ),
    # settings of the noise without a budget: the user might think that there is noise
    Exclusion(
        "privacy.clip",
        "privacy.epsilon",
        lambda run: run.config.privacy.epsilon is None and run.config.privacy.clip != DEFAULTS.clip,
        "without a budget nothing is clipped and there is no noise",
        "Leave privacy.clip out, or set privacy.epsilon",
    ),
    Exclusion(
        "privacy.noise_multiplier",
        "privacy.update_epsilon",
        lambda run: (
            run.config.privacy.update_epsilon is None
            and run.config.privacy.noise_multiplier != DEFAULTS.noise_multiplier
        ),
        "without a budget there is no noise",
        "Leave privacy.noise_multiplier out, or set privacy.update_epsilon",
    ),
    Exclusion(
        "privacy.update_clip",
        "privacy.update_epsilon",
        lambda run: (
            run.config.privacy.update_epsilon is None and run.config.privacy.update_clip != DEFAULTS.update_clip
        ),
        "without a budget nothing is clipped and there is no noise",
        "Leave privacy.update_clip out, or set privacy.update_epsilon",
    ),
    Exclusion(
        "privacy.delta",
        "privacy.epsilon",
        lambda run: (
            run.config.privacy.epsilon is None
            and run.config.privacy.update_epsilon is None
            and run.config.privacy.delta != DEFAULTS.delta
        ),
        "without a budget there is no noise",
        "Set privacy.epsilon or privacy.update_epsilon",
    ),
    # differential privacy of clients
    Exclusion(
        "privacy.update_epsilon",
        "opacus",
        lambda run: run.config.privacy.update_epsilon is not None and _missing("opacus"),
        "the budget of clients needs the accountant of the package opacus",
        "Run pip install '.[dp]' in the clone",
        "config.missing-package",
    ),
    Exclusion(
        "privacy.update_epsilon",
        "method",
        lambda run: (
            run.config.privacy.update_epsilon is not None
            and (run.method.uploads_more or not run.method.shared(run.model))
        ),
        lambda run: (
            f"{run.method.name} uploads {'more than its model' if run.method.uploads_more else 'no model'}, and the "
            "noise hides clients only in the mean of models"
        ),
        "Choose a method that uploads only its model, such as fedavg; docs/privacy.md lists all of them",
    ),
    Exclusion(
        "privacy.update_epsilon",
        "data.auxiliary",
        lambda run: run.config.privacy.update_epsilon is not None and run.config.data.auxiliary > 0,
        "the server's labelled images can be copies of clients' images, which the noise does not hide",
        "Set data.auxiliary=0 and choose a method without images at the server, or set privacy.update_epsilon=null",
    ),
    Exclusion(
        "privacy.update_epsilon",
        "federation.robust",
        lambda run: run.config.privacy.update_epsilon is not None and run.config.federation.robust is not None,
        lambda run: f"federation.robust = {run.config.federation.robust} computes no sum to which noise could be added",
        "Set one of them to null",
    ),
    Exclusion(
        "privacy.update_epsilon",
        "federation.sampling",
        lambda run: (
            run.config.privacy.update_epsilon is not None
            and run.config.federation.sampling == "fixed"
            and run.config.federation.participation < 1
        ),
        lambda run: (
            f"with federation.sampling=fixed and federation.participation = "
            f"{run.config.federation.participation:g} an additional client displaces another one, which the noise does "
            "not cover"
        ),
        "Set federation.sampling=poisson, or federation.participation=1",
    ),
    Exclusion(
        "privacy.update_epsilon",
        "federation.rounds",
        lambda run: (
            run.config.privacy.update_epsilon is not None and run.spent_epsilon > run.config.privacy.update_epsilon
        ),
        lambda run: (
            f"{count_of(run.config.federation.rounds, 'round')} would spend {run.spent_epsilon:.3g} with "
            "federation.sampling = "
            f"{run.config.federation.sampling}"
        ),
        "Raise privacy.noise_multiplier, or lower federation.rounds",
    ),
)


def allows_robust_rule(run: PlannedRun) -> bool:
    """Return whether a run without `federation.robust` could set it."""
    federation = run.config.federation
    if federation.robust is not None:
        return False
    robust = run.config.model_copy(update={"federation": federation.model_copy(update={"robust": "median"})})
    changed = replace(run, config=robust)
    rows = (row for row in EXCLUSIONS if "federation.robust" in (row.setting, row.excludes))
    return not any(row.applies(changed) for row in rows)


def check_exclusions(run: PlannedRun) -> None:
    """Raise the error of the first exclusion that applies to a planned run.

    Raises:
        ConfigError: Two settings of the run exclude each other.
    """
    for row in EXCLUSIONS:
        if row.applies(run):
            raise row.error(run)
