"""Notices about settings that have no effect because of other settings, which may be a mistake."""

from collections.abc import Callable

from raylt.config.sections import Config, settings

# Built-in partitions that do not read a setting. A user's own partition may read all settings.
_WITHOUT = {
    "data.alpha": ("iid", "by_id", "classes", "pathological", "shards"),
    "data.per_client": ("iid", "by_id", "classes", "creff", "dirichlet", "dirichlet_min", "hsu", "quantity"),
}
_IDLE: dict[str, Callable[[Config], str | None]] = {
    **{key: lambda config, key=key: _partition_without(config, key) for key in _WITHOUT},
    "data.tail": lambda config: "data.imbalance = 1 keeps all samples" if config.data.imbalance == 1 else None,
    "local.lr_decay": lambda config: (
        "local.schedule = cosine sets the learning rate" if config.local.schedule == "cosine" else None
    ),
    "local.lr_decay_every": lambda config: (
        "local.lr_decay = 0" if config.local.schedule in ("step", "cosine") and not config.local.lr_decay else None
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
            notices.append(f"{key} = {value} has no effect, because {reason}")
    return notices


def _partition_without(config: Config, key: str) -> str | None:
    partition = config.data.partition
    return f"data.partition = {partition} does not use it" if partition in _WITHOUT[key] else None
