"""`Repeated`: a step that is taken again and again, recorded once and from then on launched as one, a CUDA graph.

A step of a small network is bound by its launches, of which there are some hundred; a graph is one. It is recorded only
where everything that takes part is known to launch the same every time (`raylt.recordable` says what that means):
objective and augmentation declare it, the optimiser's steps are all alike, and the model is made of `steady` layers.
Anything else is taken step by step, as on a CPU.

`tests/test_graphs.py` holds every method's steps, replayed, against those that were not, to the bit.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from raylt.errors import RayltError
from raylt.recordable import is_recordable

WARM_UP = 3             # steps before the recording: libraries choose their kernels there, and state comes to be
# whose layers' forward functions only launch: looked through for this, and replayed in the tests
_STEADY = ("torch.nn.modules.", "torchvision.models.resnet", "torchvision.models.mobilenetv3",
           "torchvision.models.segmentation.lraspp", "torchvision.ops.misc")

Step = Callable[[Tensor], None]


class Recorder(Protocol):
    """How a kind of device records."""

    def warm_up(self, fn: Callable[[], None]) -> None:
        """Runs a function as it is, in the place where it will be recorded."""

    def record(self, fn: Callable[[], None], generator: torch.Generator | None) -> Callable[[], Any]:
        """What a function launches, as a function that launches it again. Nothing has been computed then.

        Args:
            generator: what it draws from beside torch's own generator of the device.
        """
        ...


class CudaRecorder:
    """CUDA graphs of the device of this process.

    All have one pool of memory, and the last one holds it: with a pool for each the memory would grow until the device
    is full. They may share it since nothing that a step leaves behind lies there.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.CUDAGraph | None = None

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @functools.cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, fn: Callable[[], None]) -> None:
        now = torch.cuda.current_stream()
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            fn()
        now.wait_stream(self._stream)

    def record(self, fn: Callable[[], None], generator: torch.Generator | None) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        if generator is not None:
            graph.register_generator_state(generator)       # its draws go on from replay to replay
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            fn()
        self._last = graph
        return graph.replay


_RECORDERS: dict[str, Recorder] = {}        # of this process, by type of device


def set_recorder(kind: str, recorder: Recorder | None) -> None:
    """From now on steps on this type of device are recorded by it; None: they are not recorded."""
    if recorder is None:
        _RECORDERS.pop(kind, None)
    else:
        _RECORDERS[kind] = recorder


def steady(model: nn.Module) -> bool:
    """Whether all layers of a model are known to launch the same for every batch of one size: torch's own, those that
    were looked through, and classes that are `recordable`."""
    return all(_steady(module) for module in model.modules())


def _steady(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or "forward" in vars(module)
    averages = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None   # it reads its counter
    known = type(module).__module__.startswith(_STEADY) or "recordable" in vars(type(module))
    return known and not hooks and not averages


class Repeated:
    """`step(rows)`, replayed from the `WARM_UP`-th call on where rows are as many as at first; else as it is.

    Args:
        step: a step on the samples at `rows`, int64 [B].
        device: where it is taken.
        parts: what must be `is_recordable` for the step to be recorded.
        models: what must be `steady`.
        generator: what it draws from, on its device.
    """

    def __init__(self, step: Step, device: torch.device, parts: list[object], models: list[nn.Module],
                 generator: torch.Generator | None = None):
        self._step, self._generator, self._steps = step, generator, 0
        self._rows: Tensor | None = None                # the memory that the recording reads rows from
        self._replay: Callable[[], Any] | None = None
        recorder = _RECORDERS.get(device.type)
        may = recorder is not None and all(map(is_recordable, parts)) and all(map(steady, models))
        self.recorder = recorder if may else None

    def __call__(self, rows: Tensor) -> None:
        if self.recorder is None:
            return self._step(rows)
        if self._rows is None:
            self._rows = rows.clone()
        if len(rows) != len(self._rows):                # the rest of an epoch
            return self._step(rows)
        self._steps += 1
        if self._steps <= WARM_UP:
            return self.recorder.warm_up(lambda: self._step(rows))
        self._rows.copy_(rows)
        if self._replay is None:
            self._replay = self._record(self.recorder, self._rows)
        self._replay()

    def renew(self) -> None:
        """A number of the host's that the step computes with has changed: it is recorded anew."""
        self._replay = None

    def _record(self, recorder: Recorder, rows: Tensor) -> Callable[[], Any]:
        try:
            return recorder.record(lambda: self._step(rows), self._generator)
        except RuntimeError as error:
            if "captur" not in str(error):              # the device is full, or gone
                raise
            raise RayltError(f"resources.graphs = auto: a step that is declared recordable cannot be recorded "
                             f"({str(error).splitlines()[0]}); set resources.graphs=off") from error
