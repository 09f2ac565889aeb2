"""Page-locked memory of the pretend host; copies from it without a wait are made as late as possible."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

_MEMORY: list[torch.Tensor] = []  # never freed, so that no other memory gets the same address
_LATE: list[tuple[torch.Tensor, torch.Tensor]] = []  # (target, source) of each copy


class Event:
    """An event that, when waited for, waits for everything that was launched."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        catch_up()


def kept(memory: torch.Tensor) -> torch.Tensor:
    """Mark memory as page-locked; return it."""
    _MEMORY.append(memory)
    return memory


def holds(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in page-locked memory."""
    place = tensor.untyped_storage().data_ptr()
    return any(memory.untyped_storage().data_ptr() == place for memory in _MEMORY)


def copy_late(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy on the device."""
    _LATE.append((target, source))


def catch_up() -> None:
    """Make all queued copies."""
    with _disable_current_modes():
        for target, source in _LATE:
            target.copy_(source)
    _LATE.clear()
