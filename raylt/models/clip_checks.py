"""Checks of an image-text model in a file: its description, and the features that its towers compute.

open_clip builds whatever a description says, and passes some of its entries on to other libraries. So raylt checks the
description before open_clip reads it. A loaded image tower must compute finite features of an image, since no client
could train on other features.
"""

import copy
import json
import math
from typing import Any

import torch
from torch import Tensor

from raylt.typed_json import unique_keys

MAX_LAYERS = 1000  # layers of a tower; open_clip's own models have up to 56
MAX_NUMBER = 2**20  # maximum of other numbers in a description; open_clip's vocabularies have up to 901,629 words
MAX_SIDE = 4096  # side of a tower's input images in pixels
MAX_DEPTH = 8  # nested dicts and lists
# Settings of tokenizers in open_clip's own descriptions. open_clip passes other settings to libraries; some of these
# would run code that is stored with the weights (trust_remote_code) or wait for a file (bpe_path).
TOKENIZER_SETTINGS = frozenset({"clean", "strip_sep_token"})


def checked_description(content: bytes) -> dict[str, Any]:
    """Return the description of a model, `model_cfg`, in the content of an `open_clip_config.json`.

    Raises:
        ValueError: The content is not JSON, has a key twice, or no model can have this description.
    """
    try:
        tree = json.loads(content, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    described = tree.get("model_cfg") if isinstance(tree, dict) else None
    if not isinstance(described, dict):
        raise ValueError("it has no object model_cfg")
    for tower in ("vision_cfg", "text_cfg"):
        if not isinstance(described.get(tower), dict):
            raise ValueError(f"model_cfg has no object {tower}")
    check_numbers("model_cfg", described)
    dim = described.get("embed_dim")
    if type(dim) is not int or dim < 1:
        raise ValueError("model_cfg.embed_dim is not a positive integer")
    settings = described["text_cfg"].get("tokenizer_kwargs", {})
    if not isinstance(settings, dict) or not settings.keys() <= TOKENIZER_SETTINGS:
        raise ValueError(f"model_cfg.text_cfg.tokenizer_kwargs has settings besides {_listed(TOKENIZER_SETTINGS)}")
    return described


def check_numbers(path: str, value: Any, depth: int = MAX_DEPTH) -> None:
    """Raise ValueError if a number is not finite or too large, or if the values are nested too deeply.

    Args:
        path: Dotted path of the value, for error messages.
        value: A value of a description.
        depth: Maximum number of nested dicts and lists.
    """
    if isinstance(value, dict | list):
        if not depth:
            raise ValueError("it is nested too deeply")
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            check_numbers(f"{path}.{name}", inner, depth - 1)
    elif isinstance(value, int | float):
        limit = MAX_LAYERS if ".layers" in path else MAX_NUMBER
        if not abs(value) <= limit:  # also true for NaN
            raise ValueError(f"{path[-60:]} is not a number up to {limit:,}")


def check_number_of_parameters(described: dict[str, Any], size: int) -> None:
    """Raise ValueError if a described model has more parameters than its file of weights has bytes.

    The model is built like in `open_clip.create_model`, but without memory for its parameters.

    Args:
        described: The result of `checked_description`.
        size: Size of the file in bytes.
    """
    from open_clip import CLIP, CoCa, CustomTextCLIP

    described = copy.deepcopy(described)
    described["vision_cfg"]["timm_model_pretrained"] = False
    described["text_cfg"]["hf_model_pretrained"] = False
    custom = described.pop("custom_text", False) or "hf_model_name" in described["text_cfg"]
    kind = CLIP if not custom else CoCa if "multimodal_cfg" in described else CustomTextCLIP
    with torch.device("meta"):
        model = kind(**described)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > size:
        raise ValueError(f"the model has {parameters:,} parameters, more than the {size:,} bytes of its weights")


def check_image_tower(tower: Any, dim: int) -> None:
    """Check the preprocessing of a loaded image tower, and the features of one black image.

    Args:
        tower: The image tower of an open_clip model.
        dim: Length of a feature, d, according to the description.

    Raises:
        ValueError: raylt does not support the preprocessing, or the features are not d finite numbers.
    """
    settings = tower.preprocess_cfg
    check_preprocessing(settings)
    size = settings["size"]
    sides = (size, size) if type(size) is int else size
    mean, std = (torch.tensor(settings[name], dtype=torch.float32)[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        features = tower((torch.zeros(1, 3, *sides) - mean) / std)
    check_features("an image", features[0] if isinstance(features, tuple) else features, (1, dim))


def check_preprocessing(settings: dict[str, Any]) -> None:
    """Raise ValueError if raylt does not support this preprocessing.

    Args:
        settings: open_clip's `preprocess_cfg`.
    """
    for name, choices in (
        ("interpolation", ("bilinear", "bicubic")),
        ("resize_mode", ("shortest", "longest", "squash")),
    ):
        if settings.get(name) not in choices:
            raise ValueError(f"preprocess_cfg.{name} is not one of {_listed(choices)}")
    size = settings.get("size")
    sides = (size, size) if type(size) is int else size
    if (
        not isinstance(sides, list | tuple)
        or len(sides) != 2
        or not all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides)
    ):
        raise ValueError(f"preprocess_cfg.size is neither a number of pixels up to {MAX_SIDE} nor a pair of these")
    for name, least in (("mean", -math.inf), ("std", 0.0)):
        if not _is_list(settings.get(name), 3) or not all(
            type(value) in (int, float) and math.isfinite(value) and value > least for value in settings[name]
        ):
            raise ValueError(f"preprocess_cfg.{name} is not three finite numbers{' above 0' if least == 0 else ''}")


def check_features(what: str, features: Tensor, shape: tuple[int, int]) -> None:
    """Raise ValueError if features have another shape, or are not finite.

    Args:
        what: The origin of the features, for error messages.
        features: The features.
        shape: The expected shape, [n, d].
    """
    if features.shape != shape:
        raise ValueError(f"the features of {what} are {list(features.shape)}, expected {list(shape)}")
    if not torch.isfinite(features).all():
        raise ValueError(f"the features of {what} are not finite")


def check_finite_weights(model: Any) -> None:
    """Raise ValueError if a parameter or the scale of the logits of an open_clip model is not finite."""
    for name, value in model.named_parameters():
        if not torch.isfinite(value).all():
            raise ValueError(f"{name} is not finite")
    if not torch.isfinite(model.logit_scale.exp()).all():
        raise ValueError("logit_scale is too large")


def _is_list(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
