"""Layers that a method needs: checks of encoder and classifier, and an encoder cut after a layer."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from raylt.config import Config
from raylt.errors import ConfigError
from raylt.models.split import CosineClassifier, SplitModel
from raylt.models.trainable import FrozenEncoder


def check_cut(setting: str, layer: str, config: Config, model: SplitModel) -> None:
    """Check that the encoder can be cut after a layer: it runs its layers in turn, and the layer is not the last.

    Args:
        setting: Key of the setting that names the layer, such as "method.cut".
        layer: Name of the layer.
        config: The run's configuration.
        model: A new model of the run.

    Raises:
        ConfigError: The encoder cannot be cut after the layer.
    """
    encoder = model.encoder
    layers = list(encoder._modules)  # `named_children` would leave out a layer that occurs a second time
    usable = layers[:-1] if _runs_in_turn(encoder) else []
    if layer not in usable:
        problem = (
            f"computes more than its layers one after the other, so it cannot be cut ({layer})"
            if layer in layers[:-1]
            else f"has no layer {layer} before its last one"
        )
        raise ConfigError(
            f"{setting}: the encoder of model = {config.model} {problem}. {layer_remedy(encoder, usable)}",
            code="model.lacks-layer",
            key=setting,
            value=layer,
            layers=layers,
        )


def halves(model: SplitModel, layer: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the encoder's layers up to and including `layer`, and the remaining layers.

    Both share the memory of the model, whose encoder `check_cut` accepts.
    """
    assert isinstance(model.encoder, nn.Sequential)
    layers = [(name, model.encoder.get_submodule(name)) for name in model.encoder._modules]
    end = [name for name, _ in layers].index(layer) + 1
    return nn.Sequential(OrderedDict(layers[:end])), nn.Sequential(OrderedDict(layers[end:]))


def check_linear_classifier(method: str, config: Config, model: SplitModel, bias: bool = True) -> None:
    """Check that a model's classifier is a linear layer, for methods that compute with its weight and bias.

    Args:
        method: Name of the method.
        config: The run's configuration.
        model: A new model of the run.
        bias: Whether the method needs a bias.

    Raises:
        ConfigError: The classifier is another module, or lacks the bias.
    """
    classifier = model.classifier
    needed = {"weight", "bias"} if bias else {"weight"}
    kind = f"a linear classifier{' with a bias' if bias else ''}"
    if isinstance(classifier, CosineClassifier):
        raise ConfigError(
            f"classifier: method = {method} needs {kind} ({config.classifier}). Set classifier=text, or choose another "
            "method.",
            code="model.wrong-classifier",
            key="classifier",
            value=config.classifier,
            method=method,
        )
    if type(classifier) is not model.head or not needed <= classifier.state_dict().keys() <= {"weight", "bias"}:
        raise ConfigError(
            f"model: method = {method} needs {kind}, and {config.model} has another one ("
            f"{' '.join(str(classifier).split())}). Use the classifier that raylt.SplitModel makes, or another method.",
            code="model.wrong-classifier",
            key="model",
            value=config.model,
            method=method,
        )


def layer_remedy(encoder: nn.Module, layers: Sequence[str], give: str = "Give one of") -> str:
    """Return the remedy, as a sentence, for a setting that names a layer which the encoder does not have.

    Args:
        encoder: The encoder.
        layers: Names of the available layers.
        give: First words of the sentence before the names.
    """
    if isinstance(encoder, FrozenEncoder) and hasattr(encoder.body, "stage1"):  # as in all built-in models
        return "A frozen encoder runs as a whole: set trainable to norm, last:N or lora:R."
    of_a_library = isinstance(encoder, FrozenEncoder)  # without freezing, it would not have the layer either
    if of_a_library or not layers:
        return "Use a built-in model, such as small or resnet8."
    return f"{give}: {', '.join(layers)}."


def _runs_in_turn(encoder: nn.Module) -> bool:
    """Return whether an encoder only calls its layers one after the other."""
    return isinstance(encoder, nn.Sequential) and type(encoder).forward is nn.Sequential.forward
