"""Models as computation graphs: torch.export's .pt2 and ONNX.

They contain the computation itself, from uint8 images to logits, and a `ModelDescription`. Reading them needs neither
raylt's networks nor a method's code. They are programs, so load only files that you trust.

Each file ends with the SHA-256 of all preceding bytes: as the archive comment of a .pt2 file, and as the last metadata
entry of an .onnx file. Other readers ignore it.
"""

import hashlib
import logging
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raylt import store
from raylt.data.images.decoding import Fit
from raylt.errors import ConfigError, spoken
from raylt.runs.export.artefact import KEY, ModelDescription, changed, parse, sealed, to_json, unreadable
from raylt.runs.export.trained_model import Prediction, TrainedModel, predict_in_parts, uint8_images

EXTRA = f"{KEY}.json"  # name of the description in a .pt2 file
MARK = f"{KEY}_sha256".encode()  # name of the hash at the end of a file
INPUT, OUTPUT = "images", "logits"


class GraphModel:
    """A model from a .pt2 or .onnx file.

    Attributes:
        description: The file's description.
        class_names: Names of the C classes.
        shape: Height, width and channels of an image.
        fit: Rule by which image files are resized to that shape.
        depth: Bits of grey image files; None for the bits of their pixel type.
    """

    def __init__(self, description: ModelDescription, logits: Callable[[Tensor], Tensor]):
        image = description["input"]
        self.description = description
        self.class_names = tuple(description["class_names"])
        self.fit: Fit = image["fit"]
        self.depth = image["depth"]
        self.shape = image["height"], image["width"], image["channels"]
        self._logits = logits

    def predict(self, images: Any) -> Prediction:
        """Predict the classes of images, uint8 [n, height, width, channels]."""
        return predict_in_parts(
            self._logits, uint8_images(images, self.shape), self.description["batch"], self.class_names, self.shape
        )


def read(path: Path) -> GraphModel:
    """Read a .pt2 or .onnx file that `raylt export` wrote.

    Raises:
        CheckpointError: The file cannot be read, or `raylt export` did not write it.
        ConfigError: onnxruntime is not installed.
    """
    return _read_pt2(path) if path.suffix == ".pt2" else _read_onnx(path)


def _read_pt2(path: Path) -> GraphModel:
    extra = {EXTRA: ""}
    file = store.plain_file(path)
    if not zipfile.is_zipfile(file):
        raise unreadable(path, ValueError("it is not an archive"))
    store.check_archive(file)
    has_hash = _check_hash(file)
    log = logging.getLogger("torch.export")  # silenced, since it would print a traceback before raising
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        network = torch.export.load(str(file), extra_files=extra).module()
    except Exception as error:  # zip, JSON and tensor errors have no common base class
        raise unreadable(path, error) from None
    finally:
        log.setLevel(level)
    text: Any = extra[EXTRA]
    description = parse(text.decode() if isinstance(text, bytes) else text, path)
    if "sha256" in description and not has_hash:
        raise changed(path)
    return GraphModel(description, torch.no_grad()(network))


def _read_onnx(path: Path) -> GraphModel:
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{path}: onnxruntime is not installed. Run pip install '.[onnx]' in the clone.",
            code="config.missing-package",
            name="onnxruntime",
            path=str(path),
        ) from None
    file = store.plain_file(path)
    has_hash = _check_hash(file)
    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise unreadable(path, error) from None
    description = parse(session.get_modelmeta().custom_metadata_map.get(KEY, ""), path)
    if "sha256" in description and not has_hash:
        raise changed(path)
    return GraphModel(description, lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0]))


class _FromBytes(nn.Module):
    """A network that maps uint8 images to logits, with the preprocessing included."""

    def __init__(self, model: TrainedModel):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(self.model.preprocess(images))


def write(path: Path, model: TrainedModel, description: ModelDescription) -> None:
    """Write a model to a .pt2 or .onnx file; the path's suffix selects the format.

    Raises:
        ConfigError: torch cannot export the model, or the ONNX packages are not installed.
    """
    program = _program_of(model, description)
    description = sealed(description, {})
    if path.suffix == ".onnx":
        _write_onnx(path, program, description)
        return
    with torch.no_grad(), warnings.catch_warnings():
        # torch warns about channels-last weights, although they are complete
        warnings.filterwarnings("ignore", "No complete tensor")
        extra = {EXTRA: to_json(description)}
        _write_with(path, lambda to: torch.export.save(program, to, extra_files=extra))


@torch.no_grad()
def _program_of(model: TrainedModel, description: ModelDescription) -> torch.export.ExportedProgram:
    images = torch.zeros(2, *model.shape, dtype=torch.uint8)
    batch = {0: torch.export.Dim("n", min=1)}
    try:
        return torch.export.export(_FromBytes(model.cpu()).eval(), (images,), dynamic_shapes={INPUT: batch})
    except Exception as error:  # torch may raise any exception for a network
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model: torch.export cannot trace it ({description['model']}: {reason}). Export it as safetensors.",
            code="export.not-a-graph",
            key="model",
            value=description["model"],
        ) from error


@torch.no_grad()
def _write_onnx(path: Path, program: torch.export.ExportedProgram, description: ModelDescription) -> None:
    try:
        exported = torch.onnx.export(program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False)
    except ImportError as error:
        package = error.name or "onnx"
        raise ConfigError(
            f"{spoken('--format', 'format')}: {package} is not installed (onnx). Run pip install '.[onnx]' in the "
            "clone.",
            code="config.missing-package",
            key="--format",
            name=package,
        ) from None
    assert exported is not None
    exported.model.metadata_props[KEY] = to_json(description)
    _write_with(path, lambda to: exported.save(to))


def _write_with(path: Path, save: Callable[[str], None]) -> None:
    """Write a file through a library that needs a path, then move it to its final path atomically."""
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / path.name
        save(str(temporary))
        content = temporary.read_bytes()
    if path.suffix == ".pt2":
        content = content[:-2]  # without the length of the archive comment, which `_ending` adds
    store.write(path, content + _ending(path.suffix, hashlib.sha256(content).hexdigest()))


def _ending(suffix: str, sha256: str) -> bytes:
    """Return the end of a .pt2 or .onnx file, which contains the hash of the bytes before it."""
    if suffix == ".pt2":
        comment = MARK + b" " + sha256.encode()
        return len(comment).to_bytes(2, "little") + comment
    # an entry of the repeated field metadata_props (14) of ModelProto, with a key (1) and a value (2)
    entry = b"".join(bytes([tag, len(text)]) + text for tag, text in ((0x0A, MARK), (0x12, sha256.encode())))
    return bytes([0x72, len(entry)]) + entry


def _check_hash(path: Path) -> bool:
    """Check the hash at the end of a .pt2 or .onnx file; return False if the file has none.

    Raises:
        CheckpointError: The file was changed.
    """
    digest = hashlib.sha256()
    left = path.stat().st_size - len(_ending(path.suffix, digest.hexdigest()))
    with path.open("rb") as stream:
        while left > 0 and (part := stream.read(min(left, store.MIB))):
            digest.update(part)
            left -= len(part)
        end = stream.read()
    if end == _ending(path.suffix, digest.hexdigest()):
        return True
    if MARK in end:
        raise changed(path)
    return False
