"""Clients' private states in checkpoints, stored in packs: files that hold the states of several clients.

    000012/clients-000012-0.safetensors     the tensors of clients that were called since the previous checkpoint
    000012/clients-000009-0.safetensors     the tensors of other clients, as written after step 9

A checkpoint writes the states that changed, in packs of PACK_BYTES, and carries the other packs over. If a client is in
several packs, the newest pack has its state. A pack is rewritten when less than half of it is still in use, or when it
is so small that there would be many packs. So the cost of a checkpoint grows with the number of clients that were
called, each state is written about twice, and clients that were never called cost nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from safetensors import SafetensorError, safe_open

from raylt import tree
from raylt.core.checkpoint.checkpoint import (
    PACKS,
    Checkpoint,
    CheckpointPart,
    ClientStates,
    fill,
    tensor_names,
    unreadable,
)
from raylt.core.fleet.fleet import Fleet
from raylt.tree import Tree

PACK_BYTES = 64 * 2**20  # size at which a pack is full; about this much is in memory at once
SMALL_PACK_CLIENTS, SMALL_PACK_BYTES = 64, 2**24  # a pack below both limits is small


def parts(step: int, saved: Mapping[str, CheckpointPart], fleet: Fleet) -> Iterator[tuple[str, ClientStates | None]]:
    """Yield the packs of a new checkpoint as (name, client states).

    None in place of the states stands for an unchanged pack.

    Args:
        step: Number of the step after which the checkpoint is saved.
        saved: The parts of the previous checkpoint of the same clients.
        fleet: The clients whose states are saved.
    """
    unchanged: dict[str, list[int]] = {}
    for id, name in part_of_client(saved).items():
        if id not in fleet.changed:
            unchanged.setdefault(name, []).append(id)
    rewritten = set(fleet.changed)
    for name, ids in unchanged.items():
        if _is_worth_keeping(saved[name], len(ids)):
            yield name, None
        else:
            rewritten.update(ids)
    yield from _packed(step, fleet.private_states(sorted(rewritten)))


def copied(step: int, saved: Checkpoint) -> Iterator[tuple[str, Tree | ClientStates]]:
    """Yield the name and tree of each part of a checkpoint, so that another run can save a copy of the checkpoint."""
    states = SavedStates(saved)
    yield from ((name, saved.read(name)) for name in saved.parts if not name.startswith(PACKS))
    yield from _packed(step, ((id, states.read_from(name, id)) for id, name in sorted(states.part_of.items())))


def part_of_client(saved: Mapping[str, CheckpointPart]) -> dict[int, str]:
    """Map each client id to the name of the checkpoint part that holds the client's newest state."""
    packs = [name for name in saved if name.startswith(PACKS)]
    packs.sort(key=lambda name: [int(number) for number in name.removeprefix(PACKS).split("-")])
    return {int(id): name for name in packs for id in saved[name]["tree"]["clients"]}


class SavedStates:
    """The private states in a checkpoint, read one by one on request.

    Attributes:
        part_of: Name of the part that holds a client's state, by client id.
    """

    def __init__(self, saved: Checkpoint):
        self._saved = saved
        self._files: dict[str, Any] = {}
        self.part_of = part_of_client(saved.parts)

    def read(self, id: int) -> Tree | None:
        """Return a client's state with its tensors on the CPU, or None if the client was never called."""
        return self.read_from(self.part_of[id], id) if id in self.part_of else None

    def read_from(self, name: str, id: int) -> Tree:
        """Return a client's state from the named part of the checkpoint.

        Raises:
            CheckpointError: The part cannot be read.
        """
        entry = self._saved.parts[name]
        try:
            form = entry["tree"]["forms"][entry["tree"]["clients"][str(id)]]
            tensors = {path: self._file(name, entry).get_tensor(f"{id}.{path}") for path in tensor_names(form)}
            return fill(form, tensors)
        except (OSError, SafetensorError, KeyError, IndexError, TypeError) as error:
            raise unreadable(self._saved.folder, name, error) from None

    def _file(self, name: str, entry: CheckpointPart) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._saved.folder / str(entry["file"]), framework="pt")
        return self._files[name]


def _packed(step: int, private_states: Iterable[tuple[int, Tree]]) -> Iterator[tuple[str, ClientStates]]:
    states: dict[int, Tree] = {}
    size, number = 0, 0
    for id, private in private_states:
        states[id] = private
        size += tree.nbytes(private)
        if size >= PACK_BYTES:
            yield f"{PACKS}{step:06d}-{number}", ClientStates(states, size)
            states, size, number = {}, 0, number + 1
    if states:
        yield f"{PACKS}{step:06d}-{number}", ClientStates(states, size)


def _is_worth_keeping(entry: CheckpointPart, current: int) -> bool:
    """Return whether to keep a pack of client states if only `current` of the states are up to date."""
    small = current < SMALL_PACK_CLIENTS and entry["tree"]["bytes"] < SMALL_PACK_BYTES
    return not small and 2 * current >= len(entry["tree"]["clients"])
