"""The device and the arithmetic options of a process, chosen once and used by all its computations.

No other module asks torch whether there is a GPU. On Ray a process may see a GPU that was leased to another process, so
the caller says whether this process has a lease. A leased GPU is used, or an error is raised; the CPU never replaces
it.

`is_full` and `InHalves` handle a device that runs out of memory. Not only torch's own allocations can fail: CUDA makes
contexts and the handles of its libraries at their first use. Torch raises most of these errors as `RuntimeError`, so
they are recognised by their texts.
"""

import functools
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raylt.config import Config
from raylt.core.training import cuda_graphs
from raylt.errors import ConfigError, one_line
from raylt.machine import cores

_DRIVER = Path("/proc/driver/nvidia/version")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads this variable at its first use in a process


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread inside the block, so that weights do not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def all_threads() -> Iterator[None]:
    """Use all CPU cores inside the block; call this only while no client computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(cores()))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def open_device(config: Config, leased: bool | None = None) -> torch.device:
    """Set torch's arithmetic options from the configuration, and return the device of this process.

    Args:
        leased: Whether Ray leased a GPU to this process; None without Ray, where any GPU may be used.

    Raises:
        ConfigError: A GPU was leased or is required, and cannot be used.
    """
    device = torch.device("cuda" if _on_gpu(config, leased) else "cpu")
    _set_arithmetic(config, device)
    if device.type == "cuda":
        cuda_graphs.set_recorder("cuda", cuda_graphs.CudaRecorder() if config.resources.graphs == "auto" else None)
    return device


def describe(device: torch.device) -> dict[str, str | None]:
    """Describe the device, driver, torch version and processor, which affect results and durations.

    Returns:
        A dict. "device" is the GPU's name, or "cpu"; "driver", "cuda" and "mps" are None on a CPU; "mps" is "running"
        where NVIDIA's Multi-Process Service serves this process.
    """
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else device.type,
        "driver": driver_version() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "mps": "running" if gpu and mps_runs() else None,
        "torch": torch.__version__,
        "cpu": processor_name(),
    }


def gpus() -> int:
    """Return the number of GPUs that torch sees on this machine.

    `open_device` decides whether the process may use one.
    """
    return torch.cuda.device_count()


def driver_version() -> str | None:
    """Return the version of this machine's NVIDIA driver, or None if there is no driver."""
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def mps_runs() -> bool:
    """Return whether NVIDIA's Multi-Process Service serves this process.

    CUDA finds its daemon by a folder of pipes, and joins it when the process first uses the GPU. Without the service,
    kernels of two processes never overlap on a GPU.
    """
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        daemon = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
        os.kill(daemon, 0)
    except PermissionError:  # another user's daemon also serves this process
        return True
    except (OSError, ValueError):
        return False
    return (pipes / "control").exists()


@functools.cache
def processor_name() -> str:
    """Return the name of the processor model, as the operating system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _on_gpu(config: Config, leased: bool | None) -> bool:
    wanted = config.resources
    if wanted.gpu_share == 0:
        return False
    asked = "Ray leased a GPU to this process" if leased else "a GPU is asked for"
    if leased is False:
        if wanted.device == "cuda":
            raise ConfigError(
                "resources.device: Ray leased no GPU to this process (cuda). Join a cluster whose nodes have GPUs, or "
                "set resources.device=auto.",
                code="device.not-leased",
                key="resources.device",
                value="cuda",
            )
        return False
    if not torch.cuda.is_available():
        if leased or wanted.device == "cuda":
            raise _refusal(config, asked, "it sees none")
        return False
    try:
        torch.zeros(1, device="cuda").add_(1).item()  # fails with a wheel that has no kernels for this GPU
    except RuntimeError as error:
        if not leased and wanted.device != "cuda":
            asked = "this machine has a GPU"
        raise _refusal(config, asked, one_line(error)) from error
    return True


def _refusal(config: Config, asked: str, why: str) -> ConfigError:
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    versions = f"driver {driver_version() or 'none'}, torch {torch.__version__}, {built}"
    return ConfigError(
        f"resources.device = {config.resources.device}: {asked}, and torch cannot use it: {why} ({versions}). Install "
        "a driver and a torch wheel that fit each other, or set resources.device=cpu.",
        code="device.unusable",
        key="resources.device",
        value=config.resources.device,
        driver=driver_version(),
        cuda=torch.version.cuda,
    )


def _set_arithmetic(config: Config, device: torch.device) -> None:
    """Set all of torch's arithmetic options, since an earlier run in this process may have changed them."""
    cuda = device.type == "cuda"
    backends = torch.backends
    tf32 = cuda and config.local.precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    backends.cudnn.allow_tf32 = tf32  # torch's own default is True
    # overrides torch.backends.fp32_precision for convolutions
    convolution: Any = backends.cudnn
    precision = "tf32" if tf32 else "ieee"
    convolution.conv.fp32_precision = precision
    convolution.rnn.fp32_precision = precision
    deterministic = cuda and config.resources.deterministic
    backends.cudnn.deterministic = deterministic
    backends.cudnn.benchmark = False
    if deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():  # even a redundant call imports torch's compiler
        torch.use_deterministic_algorithms(deterministic)


# If a device is full when a library creates a handle, the library reports it only by one of these texts.
_FULL = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cudaerrormemoryallocation",
    "hip out of memory",
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized when calling `cublascreate",
    "cublas_status_not_initialized when calling `cublasltcreate",
    "cudnn_status_alloc_failed",
    "cudnn_status_not_initialized",
    "cudnn_status_internal_error_device_allocation_failed",
    "cusolver_status_alloc_failed",
    "cusolver_status_not_initialized",
    "cusparse_status_alloc_failed",
    "cufft_alloc_failed",
    "mps server has reached its maximum number of clients",
    "all cuda-capable devices are busy or unavailable",
)


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, says that the device ran out of memory.

    Memory may be missing for torch's own tensors, for a CUDA context or for a library's handle.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error).lower() for text in _FULL):
            return True
        error = error.__cause__
    return False


class InHalves:
    """A wrapper that calls a function on smaller batches of images after the device ran out of memory.

    The result for an image must not depend on the other images in the batch, except for rounding of the last bits. This
    holds for a model in evaluation mode.

    Args:
        fn: Function from images [B, ...] to a tensor [B, ...].
        note: Called with one line of text for each halving.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor], note: Callable[[str], None]):
        self._fn = fn
        self._note = note
        self._max_batch: int | None = None  # None before the first halving

    def __call__(self, x: Tensor) -> Tensor:
        while True:
            size = len(x) if self._max_batch is None else min(self._max_batch, len(x))
            try:
                return self._fn(x) if size == len(x) else torch.cat([self._fn(part) for part in x.split(size)])
            except Exception as error:
                if size < 2 or not is_full(error):
                    raise
            self._max_batch = size // 2  # outside the handler, since the error's frames keep their objects alive
            if x.device.type == "cuda":
                torch.cuda.empty_cache()
            self._note(f"device out of memory; continuing with {self._max_batch} images at a time instead of {size}")
