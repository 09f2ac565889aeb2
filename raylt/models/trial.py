"""A trial of a model of the user's own code before a run starts: one training step and one prediction."""

from itertools import chain

import torch
from torch import Tensor, nn

from raylt.errors import ConfigError, type_name, user_fault
from raylt.models.split import SplitModel, load_entries
from raylt.seeds import seeded

IMAGES = 2  # BatchNorm needs two values per channel in training mode


def try_model(name: str, model: SplitModel, shape: tuple[int, int, int], setting: str = "model") -> None:
    """Raise ConfigError if a model cannot be trained, exchanged or saved.

    The trial changes the model's gradients and running statistics.

    Args:
        name: Name of the model, or of the method that built it, for messages.
        model: The model.
        shape: Height, width and channels of an image.
        setting: Key of the setting that names it.

    Raises:
        ConfigError: A weight is not float32, an entry is not a tensor, entries share memory, a pass fails, or features
            or logits have another shape than the model declares.
    """
    _check_types(setting, name, model)
    _check_memory(setting, name, model)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(IMAGES, shape[2], *shape[:2], generator=generator).to(memory_format=torch.channels_last)
    try:
        features = model.train().encoder(x)
        _check_features(setting, name, model, features)
        logits = model(x)
        _check_logits(setting, name, model, logits, x)
        logits.sum().backward()
        with torch.no_grad():
            _check_logits(setting, name, model, model.eval()(x), x)
            _check_repetition(setting, name, model, x)
    except ConfigError:
        raise
    except Exception as error:  # from the user's code
        height, width, channels = shape
        raise ConfigError(
            f"{setting}: {name} cannot be trained on {IMAGES} images [{IMAGES}, {channels}, {height}, {width}] "
            f"({user_fault(error)}). Correct its layers.",
            code="model.failed",
            key=setting,
            value=name,
        ) from error


def check_weights(name: str, model: SplitModel, again: SplitModel, setting: str = "model") -> None:
    """Raise ConfigError if a model would not start with the same entries in every process.

    Args:
        name: Name of the model, or of the method that builds it, for messages.
        model: The model.
        again: The model, built once more with the same seed.
        setting: Key of the setting that names it.

    Raises:
        ConfigError: An entry of the two differs.
    """
    others = again.state_dict()
    for entry, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.isnan().any():
            continue  # other checks refuse it
        if entry not in others or not torch.equal(value, others[entry]):
            raise ConfigError(
                f"{setting}: {entry} of {name} is different when the model is built again, and every process builds "
                "it. Draw weights from torch's global generator.",
                code="model.not-repeatable",
                key=setting,
                value=name,
                entry=entry,
            )


def materialise(model: SplitModel, shape: tuple[int, int, int]) -> None:
    """Initialise the shapes and weights of lazy layers by a forward pass of blank images.

    Weights come from torch's global generator, like those of other layers.
    """
    entries = chain(model.parameters(), model.buffers())
    if not any(nn.parameter.is_lazy(entry) for entry in entries):
        return
    training = model.training
    with torch.no_grad():
        model.eval()(torch.zeros(IMAGES, shape[2], *shape[:2]))
    model.train(training)


def _check_types(setting: str, name: str, model: SplitModel) -> None:
    for entry, value in model.named_parameters():
        if value.dtype != torch.float32:
            raise ConfigError(
                f"{setting}: {entry} of {name} is {_shown(value.dtype)}, and weights are exchanged and summed as "
                "float32. Leave the model in float32; local.precision=bfloat16 computes in bfloat16.",
                code="model.wrong-dtype",
                key=setting,
                value=name,
                entry=entry,
                dtype=_shown(value.dtype),
            )
    for entry, value in model.state_dict().items():
        if not isinstance(value, Tensor):  # from get_extra_state
            raise ConfigError(
                f"{setting}: {entry} of {name} is {type_name(value)}, and raylt exchanges and saves tensors. Register "
                "a buffer, or leave get_extra_state out.",
                code="model.wrong-dtype",
                key=setting,
                value=name,
                entry=entry,
                dtype=type(value).__name__,
            )


def _check_memory(setting: str, name: str, model: SplitModel) -> None:
    """Raise an error if parameters or buffers of a model share memory, since each is sent and saved separately."""
    owners: dict[int, str] = {}
    for entry, value in model.state_dict().items():
        memory = value.untyped_storage()
        other = owners.setdefault(memory.data_ptr(), entry) if value.numel() else entry
        if other == entry and memory.nbytes() >= value.numel() * value.itemsize:
            continue
        problem = f"{other} and {entry} of {name} share" if other != entry else f"elements of {entry} of {name} share"
        raise ConfigError(
            f"{setting}: {problem} memory, and raylt exchanges and saves each entry separately. Give each layer its "
            "own weight, or call one layer twice.",
            code="model.shared-memory",
            key=setting,
            value=name,
            entries=[other, entry],
        )


def _check_features(setting: str, name: str, model: SplitModel, features: object) -> None:
    maps = model.problem == "segmentation"
    expected = f"[{IMAGES}, {model.dim}{', h, w' if maps else ''}]"
    fits = isinstance(features, Tensor) and features.shape[:2] == (IMAGES, model.dim)
    if not fits or len(features.shape) != (4 if maps else 2):  # pyright: ignore[reportAttributeAccessIssue]
        remedy = "Give SplitModel(encoder, dim, classes) the dim that the encoder has"
        raise _wrong_output(setting, name, "encoder", features, expected, remedy)


def _check_logits(setting: str, name: str, model: SplitModel, logits: object, x: Tensor) -> None:
    expected = [IMAGES, model.classes, *(x.shape[2:] if model.problem == "segmentation" else ())]
    if not isinstance(logits, Tensor) or list(logits.shape) != expected:
        raise _wrong_output(setting, name, "classifier", logits, str(expected), "Return one logit for each class")
    if not logits.isfinite().all():
        raise ConfigError(
            f"{setting}: {name} returns logits that are not finite for pixels in [0, 1). Correct its layers or its "
            "initial weights.",
            code="model.wrong-output",
            key=setting,
            value=name,
            part="classifier",
        )


def _check_repetition(setting: str, name: str, model: SplitModel, x: Tensor) -> None:
    """Raise an error if a training pass depends on more than the entries, the images and torch's random state."""
    entries = {entry: value.clone() for entry, value in model.state_dict().items()}
    results = []
    for _ in range(2):
        load_entries(model, entries)
        with seeded(0, "trial"):
            results.append(model.train()(x))
    if not torch.allclose(*results):
        raise ConfigError(
            f"{setting}: {name} returns different logits for the same images, entries and state of torch's random "
            "generator, so no run is repeatable. Keep changing numbers in buffers, and draw random numbers with torch.",
            code="model.not-repeatable",
            key=setting,
            value=name,
        )


def _wrong_output(setting: str, name: str, part: str, output: object, expected: str, remedy: str) -> ConfigError:
    shown = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    return ConfigError(
        f"{setting}: the {part} of {name} returns {shown} for {IMAGES} images, expected {expected}. {remedy}.",
        code="model.wrong-output",
        key=setting,
        value=name,
        part=part,
        shape=shown,
    )


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
