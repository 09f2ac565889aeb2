"""Private states in checkpoints: those of many clients share a file, a pack.

    000012/clients-000012-0.safetensors     the tensors of clients that were called since the checkpoint before
    000012/clients-000009-0.safetensors     of others, as they were written after step 9

A checkpoint writes the states that are new, in packs of PACK bytes, and carries the other packs on as they are. Of a
client that is in several the newest counts. A pack of which less than half still counts is not carried on: what counts
of it is written anew, as is that of packs so small that there would be many of them. So what a checkpoint costs follows
the clients that were called, each state is written about twice, and clients that never were cost nothing.

Up to format 2 each client had a file of its own, `client-003.safetensors`: these are read, and the next checkpoint
packs them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from safetensors import SafetensorError, safe_open

from raylt import tree
from raylt.core.checkpoint import Checkpoint
from raylt.core.fleet import Fleet
from raylt.core.parts import PACKS, Part, States, fill, paths
from raylt.errors import CheckpointError
from raylt.tree import Tree

PACK = 64 * 2**20           # bytes after which a pack is full: so much is in memory at a time
FEW, LITTLE = 64, 2**24     # clients, and bytes, below which a pack is small
_SINGLE = "client-"


def parts(step: int, saved: Mapping[str, Part], fleet: Fleet) -> Iterator[tuple[str, States | None]]:
    """The packs of a checkpoint; None for one that is as it was.

    Args:
        saved: the parts of the checkpoint before, whose clients the fleet knows.
    """
    by_part: dict[str, list[int]] = {}
    for id, name in places(saved).items():
        if id not in fleet.changed:
            by_part.setdefault(name, []).append(id)
    anew = set(fleet.changed)
    for name, ids in by_part.items():
        if _stays(saved[name], len(ids)):
            yield name, None
        else:
            anew.update(ids)
    yield from _packed(step, fleet.private_states(sorted(anew)))


def copied(step: int, saved: Checkpoint) -> Iterator[tuple[str, Tree | States]]:
    """All parts of a checkpoint, for one of another run after this step."""
    kept = SavedStates(saved)
    yield from ((name, saved.read(name)) for name in saved.parts if not name.startswith((PACKS, _SINGLE)))
    yield from _packed(step, ((id, private) for id in sorted(kept.places) if (private := kept.read(id)) is not None))


def places(saved: Mapping[str, Part]) -> dict[int, str]:
    """The part that has a client's state, by id."""
    packs = sorted((name for name in saved if name.startswith(PACKS)),
                   key=lambda name: [int(number) for number in name.removeprefix(PACKS).split("-")])
    single = {int(name.removeprefix(_SINGLE)): name for name in saved if name.startswith(_SINGLE)}
    return single | {int(id): name for name in packs for id in saved[name]["tree"]["clients"]}


class SavedStates:
    """The private states of a checkpoint, each read when it is asked for.

    Attributes:
        places: the part that has a client's state, by id.
    """

    def __init__(self, saved: Checkpoint):
        self._saved, self.places = saved, places(saved.parts)
        self._files: dict[str, Any] = {}

    def read(self, id: int) -> Tree | None:
        """A client's, its tensors on the CPU; None for one that was never called."""
        name = self.places.get(id)
        if name is None or name.startswith(_SINGLE):
            return None if name is None else self._saved.read(name)
        entry = self._saved.parts[name]
        try:
            form = entry["tree"]["forms"][entry["tree"]["clients"][str(id)]]
            return fill(form, {path: self._file(name, entry).get_tensor(f"{id}.{path}") for path in paths(form)})
        except (OSError, SafetensorError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(f"{self._saved.folder}: {name} cannot be read ({' '.join(str(error).split())}); give "
                                  "another round, or start a new run") from None

    def _file(self, name: str, entry: Part) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._saved.folder / str(entry["file"]), framework="pt")
        return self._files[name]


def _packed(step: int, private_states: Iterable[tuple[int, Tree]]) -> Iterator[tuple[str, States]]:
    held, size, number = dict[int, Tree](), 0, 0
    for id, private in private_states:
        held[id] = private
        size += tree.nbytes(private)
        if size >= PACK:
            yield f"{PACKS}{step:06d}-{number}", States(held, size)
            held, size, number = {}, 0, number + 1
    if held:
        yield f"{PACKS}{step:06d}-{number}", States(held, size)


def _stays(entry: Part, alive: int) -> bool:
    """Whether a pack is carried on, of whose clients so many count."""
    if "clients" not in entry["tree"]:
        return False
    small = alive < FEW and entry["tree"]["bytes"] < LITTLE
    return not small and 2 * alive >= len(entry["tree"]["clients"])
