"""Copy many tensors between the host and a GPU in one transfer.

Each copy costs the host about ten microseconds, whatever its size, and a copy from the GPU makes the host wait. A
message or a reply has about a hundred tensors, so they are first gathered in one buffer. On the host the buffer is
page-locked, is kept for later transfers, and is read and written directly by the GPU. On the GPU it is temporary.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_COPY_BYTES = 64 * 2**20  # A ResNet-18 fits. During a copy the GPU holds its content twice.
ALIGNMENT = 512  # In bytes, as in torch's allocator; libraries choose kernels by the alignment.


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return each tensor on a device, with the same bits and strides. Tensors already on the device are shared.

    Tensors that are copied together to the GPU share one block of memory, which is freed with the last of them.
    Tensors that are copied to the CPU have separate memory.
    """
    to_gpu = device.type != "cpu"
    gathered = [
        index
        for index, tensor in enumerate(tensors)
        if (tensor.device.type == "cpu") == to_gpu and _is_dense(tensor) and not tensor.requires_grad
    ]
    arrived: dict[int, Tensor] = {}
    for indices in _parcels(tensors, gathered):
        parcel = [tensors[index] for index in indices]
        copies = _BUFFER.send(parcel, device) if to_gpu else _BUFFER.receive(parcel)
        arrived.update(zip(indices, copies, strict=True))
    # non-blocking only to the GPU: after a copy from the GPU the host could read a tensor before it has arrived
    return [
        arrived[index] if index in arrived else tensor.to(device, non_blocking=to_gpu)
        for index, tensor in enumerate(tensors)
    ]


class Buffer:
    """A buffer of page-locked host memory for one transfer at a time, as large as the largest transfer so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._read: Any = None  # event: the GPU has read the last parcel

    def send(self, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        """Copy tensors from the CPU to a GPU, without making the host wait."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += _aligned(tensor.nbytes)
        with self._lock:
            memory = self._free(end)
            for start, tensor in zip(starts, tensors, strict=True):
                memory[start : start + tensor.nbytes].copy_(_flat(tensor).view(torch.uint8))
            gathered = torch.empty(end, dtype=torch.uint8, device=device)
            gathered.copy_(memory, non_blocking=True)
            self._read = torch.get_device_module(device).Event()
            self._read.record()
        # .data gives each tensor a version counter of its own, as single copies have
        return [_part(gathered, start, tensor).data for start, tensor in zip(starts, tensors, strict=True)]

    def receive(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors from a GPU to the CPU."""
        # the widest types first, so that every tensor starts at a multiple of its width
        kinds = sorted({tensor.dtype for tensor in tensors}, key=lambda kind: (-kind.itemsize, str(kind)))
        starts, end = {}, 0
        gathered = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=tensors[0].device)
        for kind in kinds:
            first = end
            of_kind = [index for index, tensor in enumerate(tensors) if tensor.dtype == kind]
            for index in of_kind:
                starts[index] = end
                end += tensors[index].nbytes
            torch.cat([_flat(tensors[index]) for index in of_kind], out=gathered[first:end].view(kind))
        with self._lock:
            memory = self._free(end)
            memory.copy_(gathered)
            return [_part(memory, starts[index], tensor).clone() for index, tensor in enumerate(tensors)]

    def _free(self, size: int) -> Tensor:
        """Return `size` bytes of the buffer, once the GPU has read the previous transfer."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._memory[:size]


_BUFFER = Buffer()  # The only buffer of this process.


def _aligned(size: int) -> int:
    """Return a size in bytes, rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _parcels(tensors: Sequence[Tensor], indices: list[int]) -> Iterator[list[int]]:
    """Yield groups of indices of the tensors to copy together.

    A group has at least two tensors and at most MAX_COPY_BYTES bytes. Tensors in no group are copied separately.

    Args:
        tensors: All tensors.
        indices: Indices of the tensors that may be copied together.
    """
    parcel: list[int] = []
    size = 0
    for index in indices:
        more = _aligned(tensors[index].nbytes)
        if more > MAX_COPY_BYTES:
            continue
        if size + more > MAX_COPY_BYTES:
            if len(parcel) > 1:
                yield parcel
            parcel, size = [], 0
        parcel.append(index)
        size += more
    if len(parcel) > 1:
        yield parcel


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills one block of memory without gaps, contiguous or channels-last."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_neg() or tensor.is_conj():
        return False
    return tensor.numel() > 0 and (
        tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    )


def _flat(tensor: Tensor) -> Tensor:
    """Return the numbers of a dense tensor in memory order, [n]."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _part(whole: Tensor, start: int, like: Tensor) -> Tensor:
    """Return bytes of a buffer, from `start` on, as a tensor with another tensor's type, shape and strides."""
    return whole[start : start + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
