"""Checks, before a run starts, that a run can send and save all entries of its model."""

from torch import Tensor, nn

from raylt.config import Config
from raylt.core.client import Reply
from raylt.core.fleet.reductions import mean
from raylt.core.fleet.schema import Schema
from raylt.core.fleet.wire import DTYPES
from raylt.errors import ConfigError, Overflow
from raylt.models.split import StateDict


def check_exchange(config: Config, model: nn.Module, shared: StateDict, trained: StateDict) -> None:
    """Raise ConfigError if entries of a new model cannot be sent or saved.

    Args:
        config: The run's configuration.
        model: The new model.
        shared: The entries that the method sends.
        trained: Entries after a training step, as far as a trial gave them: buffers may have changed.

    Raises:
        ConfigError: An entry has a type that cannot be sent, is not finite, or is beyond the limits of a reply.
    """
    constants = {name for name, _ in model.named_buffers()}
    for entry, value in model.state_dict().items():
        if value.dtype not in DTYPES:
            kind = str(value.dtype).removeprefix("torch.")
            raise _error(config, entry, f"is {kind}, a type that raylt cannot send", "model.wrong-dtype", constants)
        if not value.isfinite().all():
            text = "holds a value that is infinite or not a number, and such a model counts as diverged"
            raise _error(config, entry, text, "model.not-finite", constants)
    for entry, value in shared.items():
        text = _fault_of_reply(entry, trained.get(entry, value), config.federation.secure)
        if text is not None:
            raise _error(config, entry, f"{text}, so no client could send it", "model.out-of-range", constants)


def _fault_of_reply(entry: str, value: Tensor, secure: bool) -> str | None:
    """Return the fault of a client's reply with this value of an entry, as a text, or None."""
    model = {entry: value}
    parts = {"model": mean.like(model)}
    fault = Schema(parts, {0: 1}).fault(0, Reply(1.0, {"model": model}))
    if fault is not None:
        return str(fault).removeprefix(f"model.{entry} ")
    if secure:
        from raylt.core.protection.secure_sum import FixedPoint  # imported lazily, since few runs need its library

        try:
            FixedPoint(parts, 1, 1.0).encode({"model": model}, 1.0)
        except Overflow as error:
            return f"holds {error.details['value']:.3g}, which does not fit into a secure sum"
    return None


def _error(config: Config, entry: str, problem: str, code: str, constants: set[str]) -> ConfigError:
    remedy = (
        "If it is a constant, register it with register_buffer(..., persistent=False)."
        if entry in constants
        else "Correct its initial values."
    )
    return ConfigError(
        f"model: {entry} of {config.model} {problem}. {remedy}",
        code=code,
        key="model",
        value=config.model,
        entry=entry,
    )
