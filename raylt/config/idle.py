"""Notices about settings that have no effect because of other settings, which may be a mistake."""

from collections.abc import Callable
from typing import Any

from raylt.config.sections import Config, DataConfig, settings

# Built-in partitions that do not read a setting. A user's own partition may read all settings.
_WITHOUT_CLASSES = (
    "iid",
    "by_id",
    "creff",
    "dirichlet",
    "dirichlet_min",
    "exdir",
    "hsu",
    "pathological",
    "quantity",
    "shards",
)
_WITHOUT = {
    "data.alpha": ("iid", "by_id", "classes", "pathological", "shards"),
    "data.per_client": ("iid", "by_id", "classes", "creff", "dirichlet", "dirichlet_min", "hsu", "quantity"),
    "data.beta": _WITHOUT_CLASSES,
    "data.erased": _WITHOUT_CLASSES,
}
# Built-in sources that read a setting. A user's own source may read all settings.
_TREES = ("folder", "hf", "ray")
_DECODED = (*_TREES, "cinic10", "imagenet_lt")
_READ_BY = {
    "data.download": ("cifar10", "cifar100", "fashion_mnist", "hf"),
    "data.channels": _TREES,
    "data.fit": _DECODED,
    "data.depth": (*_DECODED, "camvid", "cityscapes", "npz"),
    "data.bad": _TREES,
    "data.image_column": ("hf", "ray"),
    "data.label_column": ("hf", "ray"),
    "data.client_column": ("hf", "ray"),
    "data.test_part": _TREES,
    "local.unlabelled": ("shapes", "camvid", "cityscapes", "npz"),
}
_SOURCES = (
    *("digits", "cifar10", "cifar100", "fashion_mnist", "cinic10", "imagenet_lt"),
    *("shapes", "camvid", "cityscapes", "folder", "npz", "hf", "ray"),
)
_IDLE: dict[str, Callable[[Config], str | None]] = {
    **{key: lambda config, key=key: _partition_without(config, key) for key in _WITHOUT},
    **{key: lambda config, key=key: _source_without(config, key) for key in _READ_BY},
    "data.tail": lambda config: "data.imbalance = 1 keeps all samples" if config.data.imbalance == 1 else None,
    "federation.over_select": lambda config: (
        "federation.participation = 1 asks all clients" if config.federation.participation == 1 else None
    ),
    "local.epochs": lambda config: (
        f"local.steps = {config.local.steps} sets the number of steps" if config.local.steps is not None else None
    ),
    "local.momentum": lambda config: (
        f"local.optimiser = {config.local.optimiser} does not use it" if config.local.optimiser != "sgd" else None
    ),
    "local.lr_decay": lambda config: (
        "local.schedule = cosine sets the learning rate" if config.local.schedule == "cosine" else None
    ),
    "local.lr_decay_every": lambda config: (
        "local.lr_decay = 0" if config.local.schedule in ("step", "cosine") and not config.local.lr_decay else None
    ),
    "resources.clients_per_actor": lambda config: (
        f"resources.actors = {config.resources.actors} sets the number" if config.resources.actors != "auto" else None
    ),
    "resources.gpus_per_client": lambda config: (
        "resources.device = cpu uses no GPU" if config.resources.device == "cpu" else None
    ),
}


def idle_settings(config: Config) -> list[str]:
    """Return a notice for each setting that differs from its default but has no effect."""
    defaults = dict(settings())
    notices = []
    for key, reason_of in _IDLE.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        reason = reason_of(config)
        if reason is not None and value != defaults[key].default:
            notices.append(f"{key} = {_as_yaml(value)} has no effect, because {reason}")
    return notices


def idle_data_settings(data: DataConfig) -> list[str]:
    """Return the notices of `idle_settings` about the section `data`."""
    return idle_settings(Config(method={"name": ""}, data=data))


def _as_yaml(value: Any) -> str:
    """Return a value as a user writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _source_without(config: Config, key: str) -> str | None:
    kind = config.data.source.partition(":")[0]
    if kind not in _SOURCES or kind in _READ_BY[key]:
        return None
    return f"data.source = {kind} does not use it"


def _partition_without(config: Config, key: str) -> str | None:
    partition = config.data.partition
    return f"data.partition = {partition} does not use it" if partition in _WITHOUT[key] else None
