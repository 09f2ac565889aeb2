"""Page-locked memory of the pretended host: copies from it that nobody waits for are made as late as may be."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

_MEMORY: list[torch.Tensor] = []  # for good: so no other memory has its place
_LATE: list[tuple[torch.Tensor, torch.Tensor]] = []  # where to, and where from


class Event:
    """Waiting for it is waiting for everything that was launched."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        catch_up()


def kept(memory: torch.Tensor) -> torch.Tensor:
    """The same, page-locked from now on."""
    _MEMORY.append(memory)
    return memory


def holds(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in page-locked memory."""
    place = tensor.untyped_storage().data_ptr()
    return any(memory.untyped_storage().data_ptr() == place for memory in _MEMORY)


def copy_late(target: torch.Tensor, source: torch.Tensor) -> None:
    """A copy that the device has been told to make."""
    _LATE.append((target, source))


def catch_up() -> None:
    """The device makes the copies that it was told to make."""
    with _disable_current_modes():
        for target, source in _LATE:
            target.copy_(source)
    _LATE.clear()
