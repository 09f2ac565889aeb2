"""Models as graphs: torch.export's .pt2 and ONNX. They hold the computation itself, from an image's bytes to logits,
and what the file says of itself (`artefact.About`), so neither raylt's networks nor a method's code are needed.

They are programs: read only those of somebody whom you would let run one.
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raylt import store
from raylt.data.decoding import Fit
from raylt.errors import CheckpointError, ConfigError
from raylt.runs.about import KEY, About, parse, text_of
from raylt.runs.export import Prediction, TrainedModel, predict_in_parts, uint8_images

EXTRA = f"{KEY}.json"       # of a .pt2 file
INPUT, OUTPUT = "images", "logits"


class GraphModel:
    """A model that was read from a .pt2 or .onnx file.

    Attributes:
        about: what the file says of itself.
        class_names: C names.
        shape: height, width and channels of an image.
        fit: how image files are brought to that size.
    """

    def __init__(self, about: About, logits: Callable[[Tensor], Tensor]):
        self.about, self._logits = about, logits
        self.class_names = tuple(about["class_names"])
        self.fit: Fit = about["input"]["fit"]
        self.shape = about["input"]["height"], about["input"]["width"], about["input"]["channels"]

    def predict(self, images: Any) -> Prediction:
        """What is on images, uint8 [n, height, width, channels]."""
        return predict_in_parts(lambda part: self._logits(uint8_images(part, self.shape)), images, self.about["batch"],
                                self.class_names)


class _FromBytes(nn.Module):
    """Images as they are stored to logits."""

    def __init__(self, model: TrainedModel):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(self.model.preprocess(images))


def write(path: Path, model: TrainedModel, about: About) -> None:
    """Writes a model as a .pt2 or .onnx file, by the path's ending.

    Raises:
        ConfigError: it cannot be made a graph, or what writes ONNX is not installed.
    """
    images = torch.zeros(2, *model.shape, dtype=torch.uint8)
    with torch.no_grad():
        try:
            program = torch.export.export(_FromBytes(model.cpu()).eval(), (images,),
                                          dynamic_shapes={INPUT: {0: torch.export.Dim("n", min=1)}})
        except Exception as error:          # torch raises whatever it trips over in a network
            raise ConfigError(f"model = {about['model']}: torch.export cannot follow it "
                              f"({' '.join(str(error).split())[:200]}); export it as safetensors") from error
        if path.suffix == ".pt2":
            with warnings.catch_warnings():         # channels-last weights are all there, on the CPU
                warnings.filterwarnings("ignore", "No complete tensor")
                _write_with(path, lambda place: torch.export.save(program, place, extra_files={EXTRA: text_of(about)}))
        else:
            _write_onnx(path, program, about)


def _write_onnx(path: Path, program: torch.export.ExportedProgram, about: About) -> None:
    try:
        made = torch.onnx.export(program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], verbose=False)
    except ImportError as error:
        raise ConfigError(f"--format onnx: {error.name or 'onnx'} is not installed; pip install 'raylt[onnx]'"
                          ) from None
    assert made is not None
    made.model.metadata_props[KEY] = text_of(about)
    _write_with(path, lambda place: made.save(place))


def _write_with(path: Path, save: Callable[[str], None]) -> None:
    """A file that a library writes by its path, put in its place in one step."""
    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder) / path.name
        save(str(beside))
        store.write(path, beside.read_bytes())


def read(path: Path) -> GraphModel:
    """A .pt2 or .onnx file of `raylt export`.

    Raises:
        CheckpointError: it is none.
        ConfigError: onnxruntime is not installed.
    """
    return _read_pt2(path) if path.suffix == ".pt2" else _read_onnx(path)


def _read_pt2(path: Path) -> GraphModel:
    extra = {EXTRA: ""}
    try:
        network = torch.export.load(str(path), extra_files=extra).module()
    except Exception as error:              # a zip file, JSON, tensors: each part complains in its own way
        raise CheckpointError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); give a file that raylt "
                              "export wrote") from None
    text: Any = extra[EXTRA]
    return GraphModel(_parsed(text.decode() if isinstance(text, bytes) else text, path), torch.no_grad()(network))


def _read_onnx(path: Path) -> GraphModel:
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(f"{path}: onnxruntime is not installed; pip install 'raylt[onnx]'") from None
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:              # of onnxruntime's own kinds, which have nothing in common
        raise CheckpointError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); give a file that raylt "
                              "export wrote") from None
    about = _parsed(session.get_modelmeta().custom_metadata_map.get(KEY, ""), path)
    return GraphModel(about, lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0]))


def _parsed(text: str, path: Path) -> About:
    if not text:
        raise CheckpointError(f"{path}: does not say what it is; give a file that raylt export wrote")
    return parse(text, path)
