"""What a process computes on, and how exactly: decided once per process, here, and handed to everything that computes.

Nothing else asks torch whether there is a GPU. What comes from other places is the lease: on Ray a process may see a
GPU that is not its own, and one that was leased to it must be used or refused, never replaced by the CPU.
"""

import functools
import os
import platform
from pathlib import Path
from typing import Any

import torch

from raylt.config import Config
from raylt.core import graphs
from raylt.errors import ConfigError, one_line

_DRIVER = Path("/proc/driver/nvidia/version")
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"      # cuBLAS reads it when it is first used in a process


def open_device(config: Config, leased: bool | None = None) -> torch.device:
    """The device of this process, after torch was set to compute on it as the configuration says.

    Args:
        leased: whether Ray leased a GPU to this process; None where nobody leases, and what is there may be used.

    Raises:
        ConfigError: a GPU was leased, or is asked for, and cannot be used.
    """
    device = torch.device("cuda" if _on_gpu(config, leased) else "cpu")
    _set_arithmetic(config, device)
    if device.type == "cuda":
        graphs.set_recorder("cuda", graphs.CudaRecorder() if config.resources.graphs == "auto" else None)
    return device


def describe(device: torch.device) -> dict[str, str | None]:
    """What bits and seconds depend on, beside the code: the device and its driver, torch, the kind of processor.

    Returns:
        device: the GPU's name, or cpu. driver, cuda and mps are None on a CPU; mps is "running" where it is.
    """
    gpu = device.type == "cuda"
    return {"device": torch.cuda.get_device_name(device) if gpu else device.type, "driver": driver() if gpu else None,
            "cuda": torch.version.cuda if gpu else None, "mps": "running" if gpu and mps_runs() else None,
            "torch": torch.__version__, "cpu": cpu()}


def gpus() -> int:
    """How many GPUs this machine shows to torch. Whether a process may use one, `open_device` decides."""
    return torch.cuda.device_count()


def driver() -> str | None:
    """The version of the NVIDIA driver of this machine; None where there is none."""
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def mps_runs() -> bool:
    """Whether NVIDIA's Multi-Process Service is there for this process: CUDA finds its daemon by a folder of pipes, and
    joins it when the process first uses the GPU. Without it kernels of two processes never overlap on a GPU."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    try:
        daemon = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
        os.kill(daemon, 0)
    except PermissionError:                 # another user's, which serves this one all the same
        return True
    except (OSError, ValueError):
        return False
    return (pipes / "control").exists()


@functools.cache
def cpu() -> str:
    """The kind of processor, as the system names it."""
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
            raise ConfigError("resources.device = cuda: Ray leased no GPU to this process; join a cluster whose nodes "
                              "have GPUs, or set resources.device=auto")
        return False
    if not torch.cuda.is_available():
        if leased or wanted.device == "cuda":
            raise _refusal(config, asked, "it sees none")
        return False
    try:
        torch.zeros(1, device="cuda").add_(1).item()        # a wheel without kernels for this GPU is found out here
    except RuntimeError as error:
        raise _refusal(config, asked if leased or wanted.device == "cuda" else "a GPU is there",
                       one_line(error)) from error
    return True


def _refusal(config: Config, asked: str, why: str) -> ConfigError:
    has = f"driver {driver() or 'none'}, torch {torch.__version__}, " + (
        f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA")
    return ConfigError(f"resources.device = {config.resources.device}: {asked}, and torch cannot use it: {why} ({has})"
                       "; install a driver and a torch wheel that fit each other, or set resources.device=cpu")


def _set_arithmetic(config: Config, device: torch.device) -> None:
    """Says every time what holds, for the process may have computed for another run before."""
    cuda, backends = device.type == "cuda", torch.backends
    tf32 = cuda and config.local.precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    backends.cudnn.allow_tf32 = tf32                        # torch's own default is True
    # what a convolution does where torch.backends.fp32_precision says otherwise
    convolution: Any = backends.cudnn
    convolution.conv.fp32_precision = convolution.rnn.fp32_precision = "tf32" if tf32 else "ieee"
    deterministic = cuda and config.resources.deterministic
    backends.cudnn.deterministic, backends.cudnn.benchmark = deterministic, False
    if deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")
    if deterministic != torch.are_deterministic_algorithms_enabled():       # the call alone imports torch's compiler
        torch.use_deterministic_algorithms(deterministic)
