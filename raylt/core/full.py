"""A device that is full, and what its own process can do about it.

A device can be full in many ways: what torch allocates is only one of them; contexts and the handles of CUDA's
libraries are made when they are first used. Torch raises most of that as `RuntimeError`, so the texts must tell.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# of a library's handle that could not be made: it has no other word for a device that is full
_FULL = ("cuda out of memory", "cuda error: out of memory", "cudaerrormemoryallocation", "hip out of memory",
         "cublas_status_alloc_failed", "cublas_status_not_initialized when calling `cublascreate",
         "cublas_status_not_initialized when calling `cublasltcreate", "cudnn_status_alloc_failed",
         "cudnn_status_not_initialized", "cudnn_status_internal_error_device_allocation_failed",
         "cusolver_status_alloc_failed", "cusolver_status_not_initialized", "cusparse_status_alloc_failed",
         "cufft_alloc_failed", "mps server has reached its maximum number of clients",
         "all cuda-capable devices are busy or unavailable")


def is_full(error: BaseException | None) -> bool:
    """Whether there was no room on the device, in torch's own memory or for a context or handle, for this error or the
    one that it came from."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error).lower() for text in _FULL):
            return True
        error = error.__cause__
    return False


class InHalves:
    """A function of images that takes half as many at a time as soon as the device has no room for all of a batch.

    For what does not change: each image's result must be its own, whatever other images are computed with it, as a
    model's answers in evaluation mode are; only the rounding of their last bits may differ.

    Args:
        fn: images [B, ...] to a tensor [B, ...].
        told: is told of each halving, in a line.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor], told: Callable[[str], None]):
        self._fn, self._told = fn, told
        self._most: int | None = None           # images at a time that there is room for, as far as is known

    def __call__(self, x: Tensor) -> Tensor:
        while True:
            size = len(x) if self._most is None else min(self._most, len(x))
            try:
                return self._fn(x) if size == len(x) else torch.cat([self._fn(part) for part in x.split(size)])
            except Exception as error:
                if size < 2 or not is_full(error):
                    raise
            self._most = size // 2              # out here: the error's frames would keep what they hold alive
            if x.device.type == "cuda":
                torch.cuda.empty_cache()
            self._told(f"device out of memory; going on with {self._most} images at a time instead of {size}")
