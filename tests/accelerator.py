"""A pretend accelerator: tensors that claim another device while their numbers are on the CPU.

Torch takes them for tensors of another device (the back end's key for third parties, registered from Python). So
everything above the kernels is real: autograd, modules, autocast, `.to`. Below that, a dispatch mode runs each
operation on the numbers. First it refuses what a GPU would refuse (tensors of two devices, a generator of another
device) or do in an unintended slow way (indices on the CPU). It counts the kernels that a GPU would launch, and the
waits of the host. The tensors cannot be pickled, because another process may lack the device. Results have the bits of
the CPU.

`Recorder` records and replays like CUDA graphs. Copies from page-locked memory without a wait are made as late as
possible: when something computes with the tensor, or waits for an event after it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import page_locked
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
aten: Any = torch.ops.aten

MOVES = {aten.copy_, aten._to_copy, aten._copy_from, aten._copy_from_and_resize}  # copies between devices on purpose
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
PLACED = {aten.where, aten.fill_, aten.masked_fill, aten.masked_fill_}  # numbers may be on the CPU
# operations that make the host wait for a value, or for the size of the result
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.equal,
    aten.masked_select,
    aten.bincount,
    aten.is_nonzero,
    aten.linalg_eigh,
    aten._linalg_eigh,
}
# operations that launch nothing; views launch nothing either
FREE = {
    aten.detach,
    aten.alias,
    aten._unsafe_view,
    aten.empty,
    aten.empty_strided,
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.split,
    aten._reshape_alias,
    aten.lift_fresh,
    aten.unbind,
    aten._local_scalar_dense,
}


class Counts:
    """Counts launched kernels, waits of the host, and copies "to" and "from" the device, by torch operation."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.transfers: Counter[str] = Counter()

    def clear(self) -> None:
        self.kernels.clear()
        self.waits.clear()
        self.transfers.clear()


@contextmanager
def accelerator() -> Iterator[Counts]:
    """Provide a device called `NAME` inside the block; yield its counts."""
    counts, generator, lifts = Counts(), torch.Generator, torch._C._only_lift_cpu_tensors()
    torch.Generator = Generator
    # makes torch.tensor(..., device=...) take two steps, of which the second is seen here
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Mode(counts):
            yield counts
    finally:
        torch.Generator = generator
        torch._C._set_only_lift_cpu_tensors(lifts)


class Held(torch.Tensor):
    """A tensor on the pretend device; `held` has its numbers on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Held":
        wrap: Any = torch.Tensor._make_wrapper_subclass
        tensor = wrap(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(NAME, 0),
        )
        tensor.held = held
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} on {NAME}"

    def tolist(self) -> Any:  # torch has no `tolist` for subclasses
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert a tensor on {NAME} to numpy; use Tensor.cpu() first")

    __array__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:  # only CPU tensors may be sent to other processes
        raise TypeError(f"a tensor on {NAME} is sent to another process; use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, None)


# by the C++ object, because torch passes generators on as other Python objects
_OURS: WeakValueDictionary[int, "Generator"] = WeakValueDictionary()


class Generator(torch.Generator):
    """A generator that can be on the pretend device; it draws the numbers of a CPU generator."""

    def __new__(cls, device: torch.device | str = "cpu") -> Any:
        if torch.device(device).type != NAME:
            return torch._C.Generator(device)
        generator = super().__new__(cls, "cpu")
        _OURS[generator._cdata] = generator
        return generator

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


class _Backend(_DummyBackendModule):
    Event = page_locked.Event

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def _lazy_init(self) -> None: ...

    # torch.random.fork_rng saves the state of each device; here the CPU's generator makes all draws
    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None: ...


# at import, because autograd counts the devices at its first backward pass
_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
_AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_AUTOCAST.fallback(torch.library.fallthrough_kernel)


class _Mode(TorchDispatchMode):
    def __init__(self, counts: Counts):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {}, self._counts)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any], counts: Counts | None) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    on_device = [x for x in flat if isinstance(x, Held)]
    on_cpu = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Held)]
    target = kwargs.get("device")
    target = None if target is None else torch.device(target).type
    if not on_device and target != NAME:
        _check_generator(flat, "cpu", func)
        if kwargs.get("pin_memory"):
            return page_locked.kept(func(*args, **kwargs | {"pin_memory": False}))
        return func(*args, **kwargs)
    packet = func.overloadpacket
    if on_device and packet not in MOVES:
        _check_devices(func, args, on_cpu)
    to = target or (NAME if on_device else "cpu")
    if packet is aten.copy_:
        to = NAME if isinstance(args[0], Held) else "cpu"
    _check_generator(flat, to, func)
    if counts is not None:
        _count(counts, func, args, kwargs, bool(on_device), bool(on_cpu), to)
    plain_args, plain_kwargs = pytree.tree_unflatten([x.held if isinstance(x, Held) else x for x in flat], spec)
    if plain_kwargs.get("device") is not None:
        plain_kwargs["device"] = torch.device("cpu")
    if packet is aten._to_copy and to == NAME and "memory_format" not in plain_kwargs:
        plain_kwargs["memory_format"] = torch.preserve_format
    if _TAPE is not None:
        _TAPE.check(func, args, flat, on_cpu, to)
    if packet is aten.copy_ and to == NAME and _blocks_not(args, kwargs) and on_cpu and page_locked.holds(on_cpu[0]):
        page_locked.copy_late(plain_args[0], plain_args[1])
        return args[0]
    if not func.is_view:
        page_locked.catch_up()
    out = func(*plain_args, **plain_kwargs)
    if _TAPE is not None and not func.is_view:
        _TAPE.entries.append((func, plain_args, plain_kwargs, out))
    if packet is aten.copy_:
        return args[0]
    if to != NAME or packet is aten._local_scalar_dense:
        return out
    wrapped = pytree.tree_map_only(torch.Tensor, Held, out)
    if target is not None or not on_device:
        return wrapped
    return return_and_correct_aliasing(func, tuple(args), kwargs, wrapped)


def _check_devices(func: Any, args: Sequence[Any], on_cpu: list[torch.Tensor]) -> None:
    """Raise if an operation mixes devices as a GPU would refuse; allow numbers in pointwise operations.

    Indices on the CPU are refused too: a GPU would copy them without notice, and the host would wait.
    """
    packet = func.overloadpacket
    if packet in INDEXED and not isinstance(args[0], Held):
        raise RuntimeError(f"{func}: indices on {NAME}, the indexed tensor on the CPU")
    by_place = torch.Tag.pointwise in func.tags or "foreach" in func.name() or packet in INDEXED or packet in PLACED
    written = {
        id(x)
        for a, value in zip(func._schema.arguments, args, strict=False)
        if a.alias_info and a.alias_info.is_write
        for x in (value if isinstance(value, list | tuple) else [value])
    }
    strange = [x for x in on_cpu if x.dim() or not by_place or id(x) in written]
    if strange:
        shapes = [list(x.shape) for x in strange]
        raise RuntimeError(f"{func}: some tensors are on {NAME}, others ({shapes}) on the CPU")


def _check_generator(flat: list[Any], to: str, func: Any) -> None:
    for x in flat:
        if isinstance(x, torch._C.Generator) and (own := NAME if x._cdata in _OURS else x.device.type) != to:
            raise RuntimeError(f"{func}: draws on {to} with a generator of {own}")


def _blocks_not(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a copy is asked not to wait; `copy_` has this as its third argument."""
    return bool(kwargs.get("non_blocking") or args[2:3] == (True,))


def _count(
    counts: Counts, func: Any, args: Sequence[Any], kwargs: dict[str, Any], on_device: bool, on_cpu: bool, to: str
) -> None:
    name, packet = func.name().removeprefix("aten::"), func.overloadpacket
    moved = packet in MOVES and (on_device != (to == NAME) or on_cpu)
    if moved:
        counts.transfers["to" if to == NAME else "from"] += 1
    if moved and not _blocks_not(args, kwargs):
        counts.waits[f"{name} {'to' if to == NAME else 'from'}"] += 1
    masked = packet in INDEXED and any(
        isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or []
    )
    ragged = packet is aten.repeat_interleave and kwargs.get("output_size") is None
    if packet in WAITS or masked or ragged:
        counts.waits[name] += 1
    if not (func.is_view or packet in FREE):
        counts.kernels[name] += 1


# graphs: a replay launches what was launched during the recording, on the same memory, whatever the host does

Entry = tuple[Any, Sequence[Any], dict[str, Any], Any]


class _Tape:
    """Holds the launches of a recording, and ends it where a CUDA graph's recording would end."""

    def __init__(self, generator: torch.Generator | None):
        self.entries: list[Entry] = []
        self._generator = None if generator is None else generator._cdata

    def check(self, func: Any, args: Sequence[Any], flat: list[Any], on_cpu: list[torch.Tensor], to: str) -> None:
        packet = func.overloadpacket
        masked = packet in INDEXED and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or []
        )
        strange = {x._cdata for x in flat if isinstance(x, torch._C.Generator)} - {self._generator}
        if packet in WAITS or masked or to != NAME or on_cpu or strange:
            error = torch.AcceleratorError(f"{func}: operation not permitted when stream is capturing")
            error.error_code = 900
            raise error


_TAPE: _Tape | None = None


class Recorder:
    """A recorder for `raylt.core.training.cuda_graphs`; it counts recordings, and one launch for each replay."""

    def __init__(self, counts: Counts):
        self.recordings, self._counts = 0, counts

    def warm_up(self, fn: Callable[[], None]) -> None:
        fn()

    def record(self, fn: Callable[[], None], generator: torch.Generator | None) -> Callable[[], None]:
        global _TAPE
        self.recordings += 1
        tape, kernels, written = _Tape(generator), self._counts.kernels.copy(), _Written()
        states = [
            (torch.default_generator, torch.get_rng_state()),
            *([] if generator is None else [(generator, generator.get_state())]),
        ]
        _TAPE = tape
        try:
            with written:
                fn()
        finally:  # a recording launches nothing, so its writes and draws are undone
            _TAPE = None
            written.restore()
            self._counts.kernels = kernels
            for drawn, state in states:
                drawn.set_state(state)

        def replay() -> None:
            self._counts.kernels["graph"] += 1
            page_locked.catch_up()
            with _disable_current_modes():
                for entry in tape.entries:
                    _again(*entry)

        return replay


class _Written(TorchDispatchMode):
    """Keeps copies of tensors that are written inside the block, from before the first write."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # batch normalisation writes entries that its signature does not mark as written
        unsaid = ("running_mean", "running_var") if "batch_norm" in func.name() else ()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if (argument.alias_info and argument.alias_info.is_write) or argument.name in unsaid:
                for x in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(x, Held) and (place := x.held.untyped_storage().data_ptr()) not in self._before:
                        self._before[place] = x.held.untyped_storage(), x.held.untyped_storage().clone()
        return func(*args, **(kwargs or {}))

    def restore(self) -> None:
        for whole, copy in self._before.values():
            whole.copy_(copy)


def _again(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    made = func(*args, **kwargs)
    for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(made), strict=True):
        if isinstance(old, torch.Tensor) and old is not new and old.data_ptr() != new.data_ptr():
            old.copy_(new)
