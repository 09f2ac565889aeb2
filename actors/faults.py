"""What a device's error means: that it is full, or that this process cannot compute on it any more.

Torch raises most of CUDA's errors as `RuntimeError`, so their texts must tell. A device can be full in many ways: what
torch allocates is only one of them; contexts and the handles of CUDA's libraries are made when they are first used.
Other errors are sticky: after an illegal access or a failed assertion every later call of the process fails as well,
whatever it computes, until the process is replaced.
"""

import os
import sys

import torch

from raylt.errors import RayltError, one_line

FULL = "OutOfMemoryError"       # how the line of a call begins whose device is full
ENDED = 86                      # exit code of a process that gave its device up
# of a library's handle that could not be made: it has no other word for a device that is full
_FULL = ("cuda out of memory", "cuda error: out of memory", "cudaerrormemoryallocation", "hip out of memory",
         "cublas_status_alloc_failed", "cublas_status_not_initialized when calling `cublascreate",
         "cublas_status_not_initialized when calling `cublasltcreate", "cudnn_status_alloc_failed",
         "cudnn_status_not_initialized", "cudnn_status_internal_error_device_allocation_failed",
         "cusolver_status_alloc_failed", "cusolver_status_not_initialized", "cusparse_status_alloc_failed",
         "cufft_alloc_failed", "mps server has reached its maximum number of clients",
         "all cuda-capable devices are busy or unavailable")
_STICKY = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address",
           "illegal instruction", "invalid program counter", "invalid address space", "hardware stack error",
           "launch timed out", "uncorrectable ecc", "uncorrectable nvlink", "context is destroyed",
           "mps client has been terminated", "between the mps server and the mps client failed",
           "cuda error: unknown error")


class DeviceFull(RayltError):
    """There was no room on the device for a client actor that starts."""


def is_full(error: BaseException | None) -> bool:
    """Whether there was no room on the device, in torch's own memory or for a context or handle, for this error or the
    one that it came from."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error).lower() for text in _FULL):
            return True
        error = error.__cause__
    return False


def is_lost(error: BaseException, device: torch.device) -> bool:
    """Whether the process cannot compute on its device any more."""
    if any(text in str(error).lower() for text in _STICKY) and isinstance(error, RuntimeError):
        return True
    if device.type != "cuda" or is_full(error):
        return False
    try:
        torch.cuda.synchronize(device)      # every call fails after a sticky error, whatever its text was
    except RuntimeError:
        return True
    return False


def told(error: BaseException, device: torch.device) -> str:
    """The line that says what happened; it begins with FULL where the device was full.

    Where the device is lost to this process it ends here, without the clean-up that would ask the device: its actor is
    replaced, its call made again.
    """
    line = one_line(error)
    if is_lost(error, device):
        print(f"this process cannot use its device any more, and ends: {line}", file=sys.stderr, flush=True)
        os._exit(ENDED)
    return f"{FULL}: {line}" if is_full(error) and not line.startswith(FULL) else line
