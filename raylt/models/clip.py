"""Teachers by name: the two towers of an open_clip model, or a file of features.

    MODEL/TAG           as open_clip calls them: ViT-B-32/openai; the weights are fetched into the user's cache
    MODEL/TAG:FILE      the weights of that tag, in a file
    local-dir:FOLDER    a model of one's own: open_clip_config.json and the weights, as open_clip saves them
    npz:FILE            features that were computed elsewhere: see `FeatureFile`

Preprocessing and activation are always those of the weights: open_clip itself only warns when OpenAI's weights meet
another GELU. It is imported inside the functions: it takes seconds that nobody else pays.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raylt.data.samples import Samples
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.models.teacher import FeatureFile, Teacher, Wording, describe, shorten
from raylt.seeds import seeded
from raylt.store import Folder

BATCH = 64              # always the same: it decides the last bits of a feature


def open_teacher(name: str) -> Teacher:
    """The teacher of that name, with absolute paths in it: processes elsewhere open it too. Nothing is read yet.

    Raises:
        ConfigError: not of a form that the module's docstring lists.
    """
    kind, _, place = name.partition(":")
    if kind == "npz" and place:
        return FeatureFile(Path(place).expanduser().absolute())
    if kind == "local-dir" and place:
        return OpenClip(f"local-dir:{Path(place).expanduser().absolute()}", None, None)
    found = re.fullmatch(r"([^/:]+)/([^/:]+)(?::(.+))?", name)
    if found is None:
        raise ConfigError(f"method.teacher = {name!r}: MODEL/TAG, MODEL/TAG:FILE, local-dir:FOLDER, npz:FILE or none "
                          "is expected, as in ViT-B-32/openai")
    model, tag, file = found.groups()
    return OpenClip(model, tag, Path(file).expanduser().absolute() if file else None)


class OpenClip(Teacher):
    """A model of open_clip.

    Args:
        model: its architecture, or local-dir:FOLDER.
        tag: of its weights; None for a folder.
        file: the weights, where they are not to be fetched.
    """

    def __init__(self, model: str, tag: str | None, file: Path | None):
        super().__init__(model + (f"/{tag}" if tag else "") + (f":{file}" if file else ""))
        self.model, self.tag, self.file = model, tag, file

    @property
    def dim(self) -> int:
        return self._config()["embed_dim"]

    def _check(self, task: Task, wordings: Set[Wording], trainable: bool) -> None:
        vision = self._config().get("vision_cfg", {})
        if trainable and ("timm_model_name" in vision or not isinstance(vision.get("layers", 12), int)):
            raise ConfigError(f"method.teacher = {self.name}: its image tower has no projection matrix that could be "
                              "trained; give a vision transformer of open_clip's own, as ViT-B-32/openai, or "
                              "method.finetune=false")
        describe(task.class_names, "phrase")
        self._weights()

    def text(self, names: Sequence[str], wording: Wording, device: torch.device) -> Tensor:
        from open_clip import get_tokenizer

        model = self.load().to(device)
        tokens = get_tokenizer(self.model)(describe(names, wording))
        with torch.no_grad():
            return torch.cat([model.encode_text(part.to(device)).cpu() for part in tokens.split(BATCH)])

    def images(self, samples: Samples) -> Tensor:
        encode, _, preprocess = _tower(self.name, samples.x.device)
        return torch.cat([encode(torch.stack([preprocess(image) for image in part.cpu().numpy()]))
                          for part in samples.x.split(BATCH)])

    def projection(self, device: torch.device) -> Tensor | None:
        return _tower(self.name, device)[1]

    def _config(self) -> dict[str, Any]:
        import open_clip

        try:
            found = open_clip.get_model_config(self.model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"method.teacher = {self.name}: {shorten(error)}; a folder with open_clip_config.json "
                              "and weights is expected") from None
        if found is None:
            raise ConfigError(f"method.teacher = {self.name}: open_clip has no model {self.model}; there are: "
                              f"{', '.join(open_clip.list_models())}")
        return found

    def _source(self) -> dict[str, Any]:
        """What open_clip knows of the tag: where the weights lie, their preprocessing and activation."""
        import open_clip

        assert self.tag is not None
        found = open_clip.get_pretrained_cfg(self.model, self.tag)
        if not found:
            tags = open_clip.list_pretrained_tags_by_model(self.model)
            raise ConfigError(f"method.teacher = {self.name}: {self.model} has no weights called {self.tag}; there "
                              f"are: {', '.join(tags) or 'none'}")
        return found

    def _weights(self) -> Path:
        """The file of the weights, fetched if it must be, by one process of a node at a time."""
        if self.tag is None:
            folder = Path(self.model.removeprefix("local-dir:"))
            files = [file for file in sorted(folder.iterdir()) if file.suffix in (".safetensors", ".bin", ".pth")]
            if not files:               # open_clip would go on with random weights
                raise ConfigError(f"method.teacher = {self.name}: no weights in {folder}; put "
                                  "open_clip_model.safetensors there")
            return files[0]
        source = self._source()
        if self.file is not None:
            if not self.file.is_file():
                raise ConfigError(f"method.teacher = {self.name}: no file {self.file}; give the weights of "
                                  f"{self.model}/{self.tag}, or leave the file out to have them fetched")
            return self.file
        return _fetch(self.name, source)

    def load(self) -> Any:
        """Both towers with their weights, on the CPU."""
        import open_clip

        source: dict[str, Any] = {} if self.tag is None else self._source()
        file = self._weights()
        try:
            # its initial weights are drawn before those of the file replace them: no call's own draws may notice
            with seeded(0, "teacher"):
                model = open_clip.create_model(
                    self.model, None if self.tag is None else str(file), require_pretrained=True,
                    force_quick_gelu=source.get("quick_gelu", False), force_preprocess_cfg=source)
        except Exception as error:      # whatever a damaged or foreign file makes torch and open_clip trip over
            raise ConfigError(f"method.teacher = {self.name}: {file} does not hold its weights ({shorten(error)}); "
                              "fetch them again") from None
        return model.eval().requires_grad_(False)


@lru_cache(maxsize=1)
def _tower(name: str, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Tensor | None,
                                                     Callable[[np.ndarray], Tensor]]:
    """Encoder, projection and preprocessing of an image tower: one for all clients of a process."""
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from PIL import Image

    teacher = open_teacher(name)
    assert isinstance(teacher, OpenClip)
    visual: Any = teacher.load().visual.to(device)
    matrix = getattr(visual, "proj", None)
    if isinstance(matrix, nn.Parameter):
        visual.proj = None              # open_clip's own way to get what comes before it
    transform: Any = image_transform_v2(PreprocessCfg(**visual.preprocess_cfg), is_train=False)

    @torch.no_grad()
    def encode(x: Tensor) -> Tensor:
        found = visual(x.to(device))
        return found[0] if isinstance(found, tuple) else found

    def preprocess(image: np.ndarray) -> Tensor:
        return transform(Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image))

    return encode, matrix.detach() if isinstance(matrix, nn.Parameter) else None, preprocess


def _fetch(name: str, source: dict[str, Any]) -> Path:
    from huggingface_hub import constants, try_to_load_from_cache
    from open_clip import download_pretrained
    from open_clip.constants import HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME

    hub, file = os.path.split(source.get("hf_hub", ""))
    files = [file] if file else [HF_SAFE_WEIGHTS_NAME, HF_WEIGHTS_NAME]
    with _one_at_a_time():
        for candidate in files if hub else []:
            if isinstance(found := try_to_load_from_cache(hub, candidate), str):
                return Path(found)
        try:
            return Path(download_pretrained(source))
        except Exception as error:      # of whatever library carries the download
            what, where = (f"{files[0]} of {hub}", constants.HF_HUB_CACHE) if hub else (
                os.path.basename(source["url"]), "~/.cache/clip")
            raise ConfigError(
                f"method.teacher = {name}: its weights, {what}, are not in {where} and cannot be fetched "
                f"({shorten(error)}); bring them there, or give the file as method.teacher={name}:FILE, features "
                "computed elsewhere as method.teacher=npz:FILE, or method.teacher=none") from None


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Processes of one user on one node that want weights wait for the one that fetches them."""
    with Folder.open(Path(tempfile.gettempdir())) as folder:
        lock = folder.lock(f"raylt-weights-{os.getuid()}.lock", wait=True)
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)
