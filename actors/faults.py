"""What a device's error means: that it is full, or that this process cannot compute on it any more.

Torch raises most of CUDA's errors as `RuntimeError`, so their texts must tell. Some are sticky: after an illegal access
or a failed assertion every later call of the process fails as well, whatever it computes, until it is replaced.
"""

import os
import sys

import torch

from raylt.core.full import is_full
from raylt.errors import RayltError, one_line

FULL = "OutOfMemoryError"       # how the line of a call begins whose device is full
ENDED = 86                      # exit code of a process that gave its device up
_STICKY = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address",
           "illegal instruction", "invalid program counter", "invalid address space", "hardware stack error",
           "launch timed out", "uncorrectable ecc", "uncorrectable nvlink", "context is destroyed",
           "mps client has been terminated", "between the mps server and the mps client failed",
           "cuda error: unknown error")


class DeviceFull(RayltError):
    """There was no room on the device for a client actor that starts."""


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
