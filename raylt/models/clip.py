"""Image-text teachers by name: an open_clip model with two towers, or a file of precomputed features.

    MODEL/TAG           open_clip's names, such as ViT-B-32/openai; the weights are fetched into the user's cache
    MODEL/TAG:FILE      the weights of that tag, in a file
    local-dir:FOLDER    the user's own model: open_clip_config.json and the weights, as open_clip saves them
    npz:FILE            features that were computed elsewhere, see `FeatureFile`

The weights always determine preprocessing and activation. open_clip itself only warns if OpenAI's weights are loaded
with another GELU. open_clip takes seconds to import, so only the functions that need it import it.
"""

import copy
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from raylt import store
from raylt.data.samples import Samples
from raylt.data.task import Task
from raylt.disk import file_errors
from raylt.errors import ConfigError, RayltError, as_cause
from raylt.models.clip_checks import (
    check_features,
    check_finite_weights,
    check_image_tower,
    check_number_of_parameters,
    check_numbers,
    check_preprocessing,
    checked_description,
)
from raylt.models.pretrained import hub_errors_only
from raylt.models.teacher import FeatureFile, Teacher, TrainedPart, Wording, describe, teacher_error
from raylt.seeds import seeded
from raylt.store import Folder
from raylt.typed_json import closed

BATCH = 64  # fixed, because it affects the last bits of a feature
ENDINGS = (".safetensors", ".bin", ".pth")  # suffixes of weight files that open_clip finds in a folder


@closed
class TowerDescription(TypedDict):
    """An image tower without its weights: its architecture and preprocessing.

    `dim` is d. `vision` and `preprocessing` are open_clip's `vision_cfg` and `preprocess_cfg`. `length` is the length
    of the tower's features in a raylt model.
    """

    dim: int
    vision: dict[str, Any]
    quick_gelu: bool
    preprocessing: dict[str, Any]
    length: float


def open_teacher(name: str, otherwise: str = "") -> Teacher:
    """Return the teacher with this name, without reading any file.

    Paths in its name become absolute, so that processes with another working directory can open it too.

    Args:
        name: The teacher's name.
        otherwise: Other allowed values, at the end of an error's sentence.

    Raises:
        ConfigError: The name has not one of the forms in this module's docstring.
    """
    kind, _, address = name.partition(":")
    if kind == "npz" and address:
        return FeatureFile(Path(address).expanduser().absolute())
    teacher = open_clip_named(name)
    if teacher is None:
        raise ConfigError(
            f"method.teacher: not the name of a teacher ({name!r}). Give MODEL/TAG such as ViT-B-32/openai, "
            f"MODEL/TAG:FILE, local-dir:FOLDER or npz:FILE{otherwise}.",
            code="config.unknown-name",
            key="method.teacher",
            value=name,
        )
    return teacher


def open_clip_named(name: str, setting: str = "method.teacher") -> "OpenClip | None":
    """Return the open_clip model with this name, without reading any file; None if it is not the name of a model.

    Args:
        name: The model's name.
        setting: The setting with the name, for error messages.
    """
    kind, _, address = name.partition(":")
    if kind == "local-dir" and address:
        return OpenClip(f"local-dir:{Path(address).expanduser().absolute()}", None, None, setting)
    match = re.fullmatch(r"([^/:]+)/([^/:]+)(?::(.+))?", name)
    if match is None:
        return None
    model, tag, file = match.groups()
    return OpenClip(model, tag, Path(file).expanduser().absolute() if file else None, setting)


class OpenClip(Teacher):
    """An image-text teacher from open_clip.

    Args:
        model: Architecture, or local-dir:FOLDER.
        tag: Tag of the weights; None for a folder.
        file: File of the weights; None to fetch them.
        setting: The setting that names the model, for error messages.
    """

    def __init__(self, model: str, tag: str | None, file: Path | None, setting: str = "method.teacher"):
        super().__init__(model + (f"/{tag}" if tag else "") + (f":{file}" if file else ""))
        self.setting = setting
        self.model = model
        self.tag = tag
        self.file = file

    @property
    def dim(self) -> int:
        return self._config()["embed_dim"]

    def _check(self, task: Task, wordings: Set[Wording], trained: TrainedPart | None) -> None:
        vision = self._config().get("vision_cfg", {})
        if trained == "projection" and ("timm_model_name" in vision or not isinstance(vision.get("layers", 12), int)):
            raise self._error(
                "the image tower has no projection matrix that could be trained",
                "Give open_clip's own vision transformer, such as ViT-B-32/openai, or method.teacher_trains=encoder.",
                code="model.teacher-mismatch",
            )
        describe(task.class_names, "phrase", self.setting)
        self._weight_files()

    def text(self, names: Sequence[str], wording: Wording, device: torch.device) -> Tensor:
        model = self.load().to(device)
        texts = describe(names, wording, self.setting)
        shape = (len(texts), self.dim)
        try:
            with torch.device("cpu"), torch.no_grad():  # the caller's default device may be "meta"
                tokens = self.tokenizer()(texts)
                features = torch.cat([model.encode_text(part.to(device)).cpu() for part in tokens.split(BATCH)])
            check_features("the class names", features, shape)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # towers, tokenizers and the hub of Hugging Face raise many types
            raise self._error(
                f"the text tower cannot read the class names ({as_cause(error)})",
                "Use another model.",
                code="model.teacher-mismatch",
            ) from None
        return features

    def tokenizer(self) -> Any:
        """Return the function from texts to tokens, int64 [n, L]."""
        from open_clip import get_tokenizer

        return get_tokenizer(self.model)

    def images(self, samples: Samples) -> Tensor:
        encode = _tower(self.name, samples.x.device).encode
        return torch.cat([encode(self.preprocessed(part)) for part in samples.x.split(BATCH)])

    def projection(self, device: torch.device) -> Tensor | None:
        return _tower(self.name, device).projection

    def preprocessed(self, images: Tensor) -> Tensor:
        """Return preprocessed images for the image tower, float32 [B, 3, S, S], on their device.

        Args:
            images: The images, uint8 [B, H, W, channels].
        """
        preprocess = _tower(self.name, images.device).preprocess
        return torch.stack([preprocess(image) for image in images.cpu().numpy()]).to(images.device)

    def image_encoder(self, device: torch.device) -> nn.Module:
        """Return a copy of the image tower with its projection, in evaluation mode; its parameters can be trained."""
        tower = _tower(self.name, device)
        encoder: Any = copy.deepcopy(tower.visual)
        if tower.projection is not None:
            encoder.proj = nn.Parameter(tower.projection.clone())
        return encoder.requires_grad_()

    def _config(self) -> dict[str, Any]:
        import open_clip

        if self.tag is None:
            try:
                return checked_description(store.read(self._folder / "open_clip_config.json", store.MIB))
            except (ValueError, RayltError) as error:
                raise self._error(
                    f"open_clip_config.json cannot be used: {as_cause(error)}",
                    "Give a folder with open_clip_config.json and weights, as open_clip saves them.",
                    code="model.teacher-unavailable",
                ) from None
        config = open_clip.get_model_config(self.model)
        if config is None:
            raise self._error(
                f"open_clip has no model {self.model}",
                f"There are: {', '.join(open_clip.list_models())}.",
                code="config.unknown-name",
            )
        return config

    def _source(self) -> dict[str, Any]:
        """Return open_clip's description of the weights: address, preprocessing and activation."""
        import open_clip

        assert self.tag is not None
        source = open_clip.get_pretrained_cfg(self.model, self.tag)
        if not source:
            tags = open_clip.list_pretrained_tags_by_model(self.model)
            raise self._error(
                f"{self.model} has no weights called {self.tag}",
                f"There are: {', '.join(tags) or 'none'}.",
                code="config.unknown-name",
            )
        return source

    @property
    def _folder(self) -> Path:
        return Path(self.model.removeprefix("local-dir:"))

    def _weight_files(self) -> list[Path]:
        """Return the paths of the weight files, one of which open_clip reads; see `_weights`."""
        if self.tag is not None:
            return [self._weights()]
        with file_errors(self._folder):
            files = [file for file in sorted(self._folder.iterdir()) if file.suffix in ENDINGS]
        if not files:  # open_clip would use random weights
            raise self._error(
                f"no weights in {self._folder}",
                "Put open_clip_model.safetensors there.",
                code="model.teacher-unavailable",
            )
        return files

    def _weights(self) -> Path:
        """Return the path of the weight file of a tag; download it if it is missing, once per node."""
        source = self._source()
        if self.file is None:
            return self._fetch(source)
        if not self.file.is_file():
            raise self._error(
                f"no file {self.file}",
                f"Give the weights of {self.model}/{self.tag}, or leave the file out to fetch them.",
                code="model.teacher-unavailable",
            )
        return self.file

    def load(self) -> Any:
        """Load the image tower and the text tower with their weights, on the CPU."""
        import open_clip

        source: dict[str, Any] = {} if self.tag is None else self._source()
        dim = self.dim
        files = self._weight_files()
        file = files[0] if len(files) == 1 else self._folder
        try:
            with torch.device("cpu"):  # the caller's default device may be "meta"
                for each in files:
                    store.check_archive(store.plain_file(each))
                if self.tag is None:
                    check_number_of_parameters(self._config(), max(each.stat().st_size for each in files))
                # open_clip draws initial weights before it loads the file, which must not affect the caller's draws
                with seeded(0, "teacher"):
                    model = open_clip.create_model(
                        self.model,
                        None if self.tag is None else str(file),
                        require_pretrained=True,
                        force_quick_gelu=source.get("quick_gelu", False),
                        force_preprocess_cfg=source,
                    )
                model.eval().requires_grad_(False)
                check_finite_weights(model)
                check_image_tower(model.visual, dim)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # torch and open_clip raise many types for a damaged or wrong file
            raise self._error(
                f"{file} does not hold its weights ({as_cause(error)})",
                "Fetch them again.",
                code="model.teacher-mismatch",
            ) from None
        return model

    def describe_tower(self, network: Any) -> TowerDescription:
        """Return the description of the image tower, from which `new_tower` builds it.

        Args:
            network: The result of `load`.
        """
        config = self._config()
        source = {} if self.tag is None else self._source()
        return TowerDescription(
            dim=self.dim,
            vision=dict(config["vision_cfg"]),
            quick_gelu=bool(config.get("quick_gelu", False) or source.get("quick_gelu", False)),
            preprocessing=dict(network.visual.preprocess_cfg),
            length=network.logit_scale.detach().exp().sqrt().item(),
        )

    def _fetch(self, source: dict[str, Any]) -> Path:
        """Return the path of the weight file, from the cache or after a download."""
        from huggingface_hub import constants, try_to_load_from_cache
        from open_clip import download_pretrained
        from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME

        hub, file = os.path.split(source.get("hf_hub", ""))
        files = [file] if file else [HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME]
        with _one_at_a_time():
            for candidate in files if hub else []:
                cached = try_to_load_from_cache(hub, candidate)
                if isinstance(cached, str):
                    return Path(cached)
            try:
                with hub_errors_only():
                    return Path(download_pretrained(source))
            except Exception as error:  # each download library has its own errors
                weights = f"{files[0]} of {hub}" if hub else os.path.basename(source["url"])
                cache = constants.HF_HUB_CACHE if hub else "~/.cache/clip"
                raise self._error(
                    f"the weights, {weights}, are not in {cache} and cannot be fetched ({as_cause(error)})",
                    f"Put them there, or give the file as {self._with_file}.",
                    code="model.teacher-unavailable",
                ) from None

    @property
    def _with_file(self) -> str:
        if self.setting == "model":
            return f"model=clip:{self.name}:FILE"
        return (
            f"method.teacher={self.name}:FILE, features computed elsewhere as method.teacher=npz:FILE, or "
            "method.teacher=none"
        )

    def _error(self, problem: str, remedy: str, *, code: str) -> ConfigError:
        return teacher_error(self.name, problem, remedy, code=code, setting=self.setting)


def new_tower(description: TowerDescription) -> nn.Module:
    """Build an image tower of open_clip with random weights.

    Raises:
        ValueError: The description is not valid.
    """
    import timm
    from open_clip import CLIP

    check_numbers("vision", description["vision"])
    check_preprocessing(description["preprocessing"])
    library_name = description["vision"].get("timm_model_name")
    if library_name is not None and not timm.is_model(library_name):  # timm would fetch some names from the network
        raise ValueError(f"timm has no model {library_name!r}")
    text: Any = {
        "context_length": 2,
        "vocab_size": 2,
        "width": 2,
        "heads": 1,
        "layers": 1,
    }  # open_clip builds both towers
    vision: Any = description["vision"] | {"timm_model_pretrained": False}
    try:
        return CLIP(description["dim"], vision, text, quick_gelu=description["quick_gelu"]).visual
    except Exception as error:  # open_clip raises many types for a wrong description
        raise ValueError(as_cause(error)) from None


class _Tower(NamedTuple):
    """An image tower that all clients of a process share.

    Attributes:
        encode: Function from images [B, 3, S, S] to features before the projection, [B, w].
        projection: Matrix of the projection, float32 [w, d]; None if `encode` applies it.
        preprocess: Function from one image, uint8 [H, W, channels], to float32 [3, S, S].
        visual: The module behind `encode`, without its projection.
    """

    encode: Callable[[Tensor], Tensor]
    projection: Tensor | None
    preprocess: Callable[[np.ndarray], Tensor]
    visual: nn.Module


@lru_cache(maxsize=1)
def _tower(name: str, device: torch.device) -> _Tower:
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from PIL import Image

    teacher = open_teacher(name)
    assert isinstance(teacher, OpenClip)
    visual: Any = teacher.load().visual.to(device)
    matrix = getattr(visual, "proj", None)
    if isinstance(matrix, nn.Parameter):
        visual.proj = None  # open_clip then returns the features before the projection
    transform: Any = image_transform_v2(PreprocessCfg(**visual.preprocess_cfg), is_train=False)

    @torch.no_grad()
    def encode(x: Tensor) -> Tensor:
        features = visual(x.to(device))
        return features[0] if isinstance(features, tuple) else features

    def preprocess(image: np.ndarray) -> Tensor:
        return transform(Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image))

    projection = matrix.detach() if isinstance(matrix, nn.Parameter) else None
    return _Tower(encode, projection, preprocess, visual)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock so that only one of a user's processes on a node downloads weights at a time."""
    with Folder.open(Path(tempfile.gettempdir())) as folder:
        lock = folder.lock(f"raylt-weights-{os.getuid()}.lock", wait=True)
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)
