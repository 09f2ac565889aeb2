"""Tensors on their way between the host and a GPU: many in one copy.

A copy costs the host some ten microseconds whatever it holds, and one from the GPU makes it wait; a message or a reply
is a hundred of them. So they are gathered in one piece of memory first: on the host in a buffer that is page-locked, so
that the GPU reads and writes it by itself, and that the process keeps; on the GPU in memory of the moment.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 64 * 2**20       # bytes of one copy, which a GPU has room for twice while it is made: all of a ResNet-18
ALIGNED = 512           # bytes, as torch's own allocator does it: libraries choose their kernels by it


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Each tensor on a device, with its bits and its strides; one that is there already is shared, not copied.

    What arrives on the GPU shares one piece of memory, which is there as long as any of them; what arrives on the CPU
    has memory of its own.
    """
    up = device.type != "cpu"
    together = [place for place, tensor in enumerate(tensors)
                if (tensor.device.type == "cpu") == up and _is_dense(tensor) and not tensor.requires_grad]
    arrived: dict[int, Tensor] = {}
    for places in _parcels(tensors, together):
        parcel = [tensors[place] for place in places]
        arrived.update(zip(places, _BUFFER.send(parcel, device) if up else _BUFFER.receive(parcel), strict=True))
    # without a wait only on the way up: what is on its way down could be read too early
    return [arrived[place] if place in arrived else tensor.to(device, non_blocking=up)
            for place, tensor in enumerate(tensors)]


class Buffer:
    """Page-locked memory of the host, as large as the largest parcel yet, for one parcel at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._read: Any = None          # an event: the last parcel on its way up has been read

    def send(self, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        """Copies of tensors of the CPU on a GPU; the host does not wait for them to arrive."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        with self._lock:
            memory = self._free(end)
            for start, tensor in zip(starts, tensors, strict=True):
                memory[start:start + tensor.nbytes].copy_(_flat(tensor).view(torch.uint8))
            there = torch.empty(end, dtype=torch.uint8, device=device)
            there.copy_(memory, non_blocking=True)
            self._read = torch.get_device_module(device).Event()
            self._read.record()
        # data: torch counts the changes of each one by itself, as of tensors that were copied one by one
        return [_part(there, start, tensor).data for start, tensor in zip(starts, tensors, strict=True)]

    def receive(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of tensors of a GPU on the CPU."""
        # the widest numbers first: so all lie at multiples of their width
        kinds = sorted({tensor.dtype for tensor in tensors}, key=lambda kind: (-kind.itemsize, str(kind)))
        starts, end = {}, 0
        there = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=tensors[0].device)
        for kind in kinds:
            first, alike = end, [place for place, tensor in enumerate(tensors) if tensor.dtype == kind]
            for place in alike:
                starts[place] = end
                end += tensors[place].nbytes
            torch.cat([_flat(tensors[place]) for place in alike], out=there[first:end].view(kind))
        with self._lock:
            memory = self._free(end)
            memory.copy_(there)
            return [_part(memory, starts[place], tensor).clone() for place, tensor in enumerate(tensors)]

    def _free(self, size: int) -> Tensor:
        """So many bytes of it, that nothing reads any more."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._memory[:size]


_BUFFER = Buffer()      # of this process


def _parcels(tensors: Sequence[Tensor], places: list[int]) -> Iterator[list[int]]:
    """The places in groups of at least two, of at most MOST bytes each; those left over are left out."""
    parcel: list[int] = []
    size = 0
    for place in places:
        more = -(-tensors[place].nbytes // ALIGNED) * ALIGNED
        if more > MOST:
            continue
        if size + more > MOST:
            if len(parcel) > 1:
                yield parcel
            parcel, size = [], 0
        parcel.append(place)
        size += more
    if len(parcel) > 1:
        yield parcel


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers, and nothing else, lie in one piece of memory, as they are or channels last."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_neg() or tensor.is_conj():
        return False
    return tensor.numel() > 0 and (tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)))


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's numbers as they lie in memory, [n]."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _part(whole: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes from `start` on as a tensor of the same type, shape and strides as another."""
    return whole[start:start + like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())
