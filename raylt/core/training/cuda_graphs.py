"""`Repeated`: a training step that is recorded once as a CUDA graph and then replayed.

The step of a small network takes as long as its several hundred kernel launches; a CUDA graph needs one launch. A step
is recorded only if each part is known to launch the same kernels every time (`raylt.recordability` defines this): the
objective and the augmentation declare it, the optimiser's steps are alike, and the model consists of `steady` layers.
Any other step runs kernel by kernel, as on a CPU.

`tests/core/training/test_cuda_graphs.py` compares every method's replayed steps with steps that were not recorded, bit
for bit.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from raylt.errors import RayltError
from raylt.models.trainable import FrozenEncoder, stay_in_evaluation
from raylt.recordability import is_recordable

WARM_UP = 3  # steps before the recording, in which libraries choose their kernels and allocate state
# Modules whose layers only launch kernels in their forward functions. They were inspected, and tests replay them.
_STEADY = (
    "raylt.methods.",
    "torch.nn.modules.",
    "torchvision.models.resnet",
    "torchvision.models.mobilenetv3",
    "torchvision.models.segmentation.lraspp",
    "torchvision.ops.misc",
)

_NOT_RECORDABLE = range(900, 910)  # codes of the CUDA runtime: cudaErrorStreamCapture...

Step = Callable[[Tensor], None]


class GraphRecorder(Protocol):
    """Records and replays functions on one type of device."""

    def warm_up(self, fn: Callable[[], None]) -> None:
        """Run a function, without recording it, on the stream that will record it later."""

    def record(self, fn: Callable[[], None], generator: torch.Generator | None) -> Callable[[], Any]:
        """Record the launches of a function without running them.

        Args:
            generator: A generator that the function draws from, besides torch's own generator of the device.

        Returns:
            A function that replays the launches.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs on the device of this process.

    All graphs share one memory pool, which the last graph keeps alive: with separate pools, memory would grow until the
    device is full. They can share it because no step leaves a result in it.
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
            graph.register_generator_state(generator)  # its draws continue from replay to replay
        # not `torch.cuda.graph`, which synchronises and empties the allocator's cache, in each client's call
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                fn()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the error only says that the recording was aborted
                    graph.capture_end()
                del self._pool  # torch cannot reuse the memory pool of a failed recording
                raise
            graph.capture_end()
        self._last = graph
        return graph.replay


_RECORDERS: dict[str, GraphRecorder] = {}  # recorders of this process by type of device


def set_recorder(kind: str, recorder: GraphRecorder | None) -> None:
    """Set the recorder for a type of device in this process; None turns recording off."""
    if recorder is None:
        _RECORDERS.pop(kind, None)
    else:
        _RECORDERS[kind] = recorder


def steady(model: nn.Module) -> bool:
    """Return whether all layers of a model are known to launch the same kernels for batches of the same size.

    Known layers are those of torch and of the inspected modules, and classes that are `recordable`.
    """
    bodies = [module.body for module in model.modules() if isinstance(module, FrozenEncoder)]
    return all(_steady(module) for part in [model, *bodies] for module in part.modules())


def _steady(module: nn.Module) -> bool:
    before = [hook for hook in module._forward_pre_hooks.values() if hook is not stay_in_evaluation]
    hooks = module._forward_hooks or before or module._backward_hooks or "forward" in vars(module)
    # without momentum, BatchNorm reads its counter on the host
    averages = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
    inspected = type(module).__module__.startswith(_STEADY) or "recordable" in vars(type(module))
    return inspected and not hooks and not averages


class Repeated:
    """A step function that is recorded after `WARM_UP` calls, then replayed for batches of the recorded size.

    Args:
        step: Function that takes a step on the samples at `rows`, int64 [B].
        device: The device of the step.
        parts: Objects that must be `is_recordable` for the step to be recorded.
        models: Models that must be `steady`.
        generator: A generator on the device that the step draws from.
    """

    def __init__(
        self,
        step: Step,
        device: torch.device,
        parts: list[object],
        models: list[nn.Module],
        generator: torch.Generator | None = None,
    ):
        self._step = step
        self._generator = generator
        self._steps = 0
        self._rows: Tensor | None = None  # memory from which the recording reads rows
        self._replay: Callable[[], Any] | None = None
        recorder = _RECORDERS.get(device.type)
        can_record = recorder is not None and all(map(is_recordable, parts)) and all(map(steady, models))
        self.recorder = recorder if can_record else None

    def __call__(self, rows: Tensor) -> None:
        if self.recorder is None:
            return self._step(rows)
        if self._rows is None:
            self._rows = rows.clone()
        if len(rows) != len(self._rows):  # the last, shorter batch of an epoch
            return self._step(rows)
        self._steps += 1
        if self._steps <= WARM_UP:
            return self.recorder.warm_up(lambda: self._step(rows))
        self._rows.copy_(rows)
        if self._replay is None:
            self._replay = self._record(self.recorder, self._rows)
        self._replay()

    def renew(self) -> None:
        """Discard the recording, so that the step is recorded again with changed values from the host."""
        self._replay = None

    def _record(self, recorder: GraphRecorder, rows: Tensor) -> Callable[[], Any]:
        try:
            return recorder.record(lambda: self._step(rows), self._generator)
        except torch.AcceleratorError as error:
            if getattr(error, "error_code", None) not in _NOT_RECORDABLE:  # the device is gone
                raise
            raise RayltError(
                f"resources.graphs: with auto a step that is declared recordable cannot be recorded "
                f"({str(error).splitlines()[0]}). Set resources.graphs=off.",
                code="device.not-recordable",
                key="resources.graphs",
            ) from error
