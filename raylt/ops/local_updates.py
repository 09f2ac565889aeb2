"""What the entries of a model went through in one local training."""

from torch import nn

from raylt.config import Config
from raylt.errors import ConfigError
from raylt.models.split import Params, trained_names


def check_sgd(method: str, config: Config) -> None:
    """Raises a ConfigError where clients do not train by SGD, of whose steps the method counts the gradients."""
    if config.local.optimiser != "sgd":
        raise ConfigError(f"local.optimiser = {config.local.optimiser}: method = {method} takes an update for a sum of "
                          "gradients times local.lr, as SGD makes it; set local.optimiser=sgd, or take another method")


def gradient_mass(steps: int, momentum: float) -> float:
    """How much the gradients of a local training count in it all together: |a|_1 of FedNova, section 4.

    SGD moves the weights by -lr sum_j a_j g_j over its steps j = 1..tau, a_j = (1 - rho^(tau - j + 1)) / (1 - rho): tau
    in all without momentum rho, (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with it.
    """
    mass = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        mass += velocity
    return mass


def trained_and_rest(model: nn.Module, entries: Params) -> tuple[Params, Params]:
    """The entries that gradients move, and the others: BatchNorm's statistics and counters, what is frozen."""
    trained = trained_names(model)
    return ({name: value for name, value in entries.items() if name in trained},
            {name: value for name, value in entries.items() if name not in trained})
