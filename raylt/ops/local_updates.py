"""Quantities of a client's local training, computed from the model before and after it."""

from torch import nn

from raylt.config import Config
from raylt.errors import ConfigError
from raylt.models.split import StateDict, trained_names


def check_sgd(method: str, config: Config) -> None:
    """Raise ConfigError if the optimiser is not SGD, for methods that rely on SGD's sum of gradients.

    Raises:
        ConfigError: The optimiser is not SGD.
    """
    if config.local.optimiser != "sgd":
        raise ConfigError(
            f"local.optimiser: method = {method} needs updates that are sums of gradients times local.lr, as SGD makes "
            f"them ({config.local.optimiser}). Set local.optimiser=sgd, or use another method.",
            code="config.conflict",
            key="local.optimiser",
            value=config.local.optimiser,
            method=method,
        )


def check_averaged_statistics(method: str, config: Config) -> None:
    """Raise ConfigError if running statistics stay at clients, for methods whose server evaluates models.

    Raises:
        ConfigError: Running statistics stay at clients.
    """
    if config.federation.batchnorm == "local":
        raise ConfigError(
            f"federation.batchnorm: the server of method = {method} evaluates networks, and it has no running "
            "statistics (local). Set federation.batchnorm=average.",
            code="config.conflict",
            key="federation.batchnorm",
            value="local",
            method=method,
        )


def gradient_mass(steps: int, momentum: float) -> float:
    """Return the sum of the gradients' coefficients in a local update, |a|_1 of FedNova (section 4).

    SGD moves the weights by -lr sum_j a_j g_j over its steps j = 1..tau, a_j = (1 - rho^(tau - j + 1)) / (1 - rho): tau
    in all without momentum rho, (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with it.
    """
    mass = 0.0
    velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        mass += velocity
    return mass


def trained_and_rest(model: nn.Module, entries: StateDict) -> tuple[StateDict, StateDict]:
    """Split the entries of a model into trained parameters and the rest: buffers and frozen parameters."""
    trained = trained_names(model)
    return (
        {name: value for name, value in entries.items() if name in trained},
        {name: value for name, value in entries.items() if name not in trained},
    )
