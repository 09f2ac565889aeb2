"""Jobs of a `Dispatcher`: the calls of a client function, and the items of `Fleet.map`.

Several small clients share one Ray call, because a call costs more than their computation. A client with more than
`MAX_SHARED_SAMPLES` samples has a call of its own. So does every client if few clients are asked, or if the fleet does
not wait for all of them. If every actor gets several blocks of `raylt.core.fleet.block_sums`, each block that has only
small clients is one call and returns its sum.

Large replies of other blocks stay in the object store, on the nodes of their actors. When all clients of a block have
replied, an actor fetches the replies and adds them up, and only the sums reach the server.
"""

import heapq
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray.exceptions import ObjectLostError

from actors.actor_pool import ActorPool, ActorSlot
from actors.client import Block, BlockClient, name_clients
from actors.dispatch import ActorCall, ItemOutcome, Job, Reach
from actors.shards import Shards
from raylt.config import Config
from raylt.core.client import ClientFunction
from raylt.core.fleet.block_sums import BLOCK, SummedReply, split_into_blocks
from raylt.core.fleet.fleet import Answer, Arrived, ItemFunction
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.schema import Schema
from raylt.core.fleet.wire import Fault, unpacked
from raylt.core.round_stats import RoundStats
from raylt.core.training.stacked_sgd import MAX_STACKED_SAMPLES, MIN_TASK_CLIENTS
from raylt.errors import ClientError, ClientLost, RayltError
from raylt.tree import Tree, from_arrays, to_arrays

MAX_SHARED_SAMPLES = 32  # For clients that share a call; MAX_STACKED_SAMPLES applies to clients that train in stacks.
MAX_CLIENTS_PER_CALL = 64
MIN_CALLS_PER_ACTOR = 4  # With fewer calls, actors would wait long for the last one.
MIN_STORED_BYTES = 2**20  # Larger replies are added up by actors; the server adds a smaller one in a millisecond.


@dataclass(frozen=True)
class StoredReply:
    """A reply that stays in the object store, with its reference."""

    ref: Any


@dataclass
class StoredBlock:
    """A block of clients whose replies stay in the object store until an actor adds them up.

    Attributes:
        ids: Ids of the clients.
        losses: Number of actors that died while they added up the block.
        missing: Clients that may still reply.
    """

    ids: list[int]
    losses: int = 0

    def __post_init__(self) -> None:
        self.missing = set(self.ids)


class Addition(ActorCall):
    """A call that adds up the replies of a `StoredBlock`."""


@dataclass
class NodeQueue:
    """The calls that wait for an actor of one node, or for an idle actor of another node.

    Attributes:
        clients: Ids of clients, in the order of their calls.
        blocks: Blocks of ids of small clients; each block is one call, which returns its sum.
        complete: Blocks to add up.
    """

    clients: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    complete: list[StoredBlock] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.clients) + len(self.blocks) + len(self.complete)


class ClientDirectory(Protocol):
    """The attributes and methods of a fleet that `ClientCalls` uses.

    Attributes:
        all_sizes: Number of samples of each client, by id.
        shards: References to the clients' data.
        slots: The pool of client actors.
    """

    config: Config
    round: int
    round_stats: RoundStats
    all_sizes: dict[int, int]
    shards: Shards
    slots: ActorPool

    def private(self, id: int) -> Any:
        """Return a reference to a client's private state; None before the client's first call."""

    def keep(self, private: Any) -> Any:
        """Return a reference to a private state that stays valid if the client's node is lost."""

    def patience(self, name: str, clients: int) -> float:
        """Return the seconds after which a call of this function at `clients` clients counts as stuck."""
        ...

    def record_seconds(self, name: str, id: int, seconds: float) -> None:
        """Record how long a client's call took."""

    def note(self, text: str) -> None:
        """Add a line to the notes of the run."""

    def note_once(self, text: str) -> None:
        """Add a line to the notes of the run, unless an earlier call did."""

    def note_stuck(self, ids: list[int], name: str, seconds: float, slot: ActorSlot) -> None:
        """Add a note about a call that has run for a long time."""


class ClientCalls(Job):
    """Job that calls one client function on several clients, largest client first.

    The deadline counts from the construction. Retries are recorded in the fleet's `round_stats`.

    Args:
        fleet: The fleet of the clients.
        fn: The client function.
        ids: Ids of the clients.
        message: A reference to the message.
        enough: Number of usable answers after which the job is satisfied.
        usable: Function that checks a reply, and counts it if it is usable.
        sums: See `Fleet._answers`.

    Attributes:
        answers: The answers that have arrived, by client.
    """

    def __init__(
        self,
        fleet: ClientDirectory,
        fn: ClientFunction,
        ids: list[int],
        message: Any,
        enough: int,
        usable: Callable[[int, Arrived], bool],
        sums: Schema | None,
    ):
        self.fleet = fleet
        self.fn = fn
        self.message = message
        self.enough = enough
        self.usable = usable
        self.sums = sums
        self.name = function_name(fn)
        self.answers: dict[int, Answer] = {}
        self._usable_answers = 0
        self._attempts = dict.fromkeys(ids, 0)
        self._alone = set[int]()  # clients to retry one by one after a lost call
        limit = fleet.config.federation.deadline_s
        self.deadline = None if limit is None else time.monotonic() + limit
        waits_for_all = enough >= len(ids) and limit is None
        size = len(ids) // (MIN_CALLS_PER_ACTOR * len(fleet.slots))
        self._most_samples = MAX_SHARED_SAMPLES
        if fleet.slots[0].stacks:
            size = max(size, min(MIN_TASK_CLIENTS, len(ids) // len(fleet.slots)))
            self._most_samples = MAX_STACKED_SAMPLES
        self._block_size = min(MAX_CLIENTS_PER_CALL, size) if waits_for_all else 1
        self._queues = [NodeQueue() for _ in range(1 + fleet.slots.home_nodes.max())]
        self._stored_blocks: dict[int, StoredBlock] = {}  # by client
        self._stored_replies: dict[int, ItemOutcome] = {}  # by client
        blocks = [] if sums is None else split_into_blocks(ids)
        stores = sums is not None and waits_for_all and len(blocks) > 1 and sums.template_bytes >= MIN_STORED_BYTES
        in_no_call = set(ids)
        for block in blocks:
            if self._block_size >= BLOCK and all(map(self._shares, block)):
                self._queue_of(block[0]).blocks.append(block)
                in_no_call.difference_update(block)
            elif stores:
                self._stored_blocks |= dict.fromkeys(block, StoredBlock(block))
        # largest client first: started last, it would prolong the round
        for id in sorted(in_no_call, key=lambda id: (-fleet.all_sizes[id], id)):
            self._queue_of(id).clients.append(id)

    def _queue_of(self, id: int) -> NodeQueue:
        return self._queues[self.fleet.slots.home_nodes[id]]

    @property
    def arrived(self) -> int:
        """Return the number of answers and replies that have arrived at the server or in the object store."""
        return len(self.answers) + len(self._stored_replies)

    @property
    def pending(self) -> bool:
        return any(self._queues)

    @property
    def satisfied(self) -> bool:
        return self._usable_answers >= self.enough

    def submit(self, slot: ActorSlot, reach: Reach) -> tuple[Any, ActorCall] | None:
        queue = self._queues[slot.home_node]
        if reach == "others":
            queue = max(self._queues, key=len)
        if queue.complete:  # first, because its replies fill the object store
            return self._submit_addition(slot, queue.complete.pop(0))
        ids = self._take(queue.clients, slot.own if reach == "own" else None)
        if ids:
            return self._submit(slot, ids)
        if queue.blocks and reach != "own":
            return self._submit(slot, queue.blocks.pop(0), self.sums)
        return None

    def _take(self, waiting: list[int], clients: Container[int] | None) -> list[int]:
        """Return the ids of the first waiting clients that can share one call, and remove these clients from the queue.

        Args:
            waiting: The waiting clients.
            clients: The clients to choose from; None for all.
        """
        positions: list[int] = []
        for position, id in enumerate(waiting):
            if clients is None or id in clients:
                if positions and not (self._shares(id) and self._stores(id) == self._stores(waiting[positions[0]])):
                    continue
                positions.append(position)
                if len(positions) >= self._block_size or not self._shares(id):
                    break
        if not positions:
            return []
        ids = [waiting[position] for position in positions]
        taken = set(positions)
        seen = positions[-1] + 1
        waiting[:seen] = [id for position, id in enumerate(waiting[:seen]) if position not in taken]
        return ids

    def _shares(self, id: int) -> bool:
        return self.fleet.all_sizes[id] <= self._most_samples and id not in self._alone

    def _stores(self, id: int) -> bool:
        """Return whether a client's reply stays in the object store."""
        return id in self._stored_blocks

    def _submit(self, slot: ActorSlot, ids: list[int], sums: Schema | None = None) -> tuple[Any, ActorCall]:
        shards = self.fleet.shards
        private_refs = [self.fleet.private(id) for id in ids]
        new_packs = sorted({shards.pack_numbers[id] for id in ids} - slot.packs)
        # a node keeps only the data of its own clients
        keep = self.fleet.slots.home_nodes[ids[0]] == slot.home_node
        if keep:
            slot.packs.update(new_packs)
        stores_replies = self._stores(ids[0])
        clients = []
        sent_privates = []
        for id, private in zip(ids, private_refs, strict=True):
            position = None
            if private is not None:
                position = len(sent_privates)
                sent_privates.append(private)
            clients.append(BlockClient(id, shards.pack_numbers[id], position))
        patience = self.fleet.patience(self.name, len(ids))
        name = f"{self.name}, round {self.fleet.round}"  # Ray's dashboard counts the calls of each name
        returns = 1 + (2 if stores_replies else 1) * len(ids)
        replies, *refs = slot.actor.run.options(num_returns=returns, name=name).remote(
            self.fn,
            self.message,
            Block(self.fleet.round, new_packs, clients, bool(keep), stores_replies),
            patience,
            None if sums is None else sums.restricted_to(ids),
            *(shards.packs[number] for number in new_packs),
            *sent_privates,
        )
        call = ActorCall(ids, slot, len(self.fleet.slots), refs[: len(ids)], refs[len(ids) :], patience=patience)
        return replies, call

    def _submit_addition(self, slot: ActorSlot, block: StoredBlock) -> tuple[Any, ActorCall]:
        assert self.sums is not None
        ids = [id for id in block.ids if id in self._stored_replies]
        # if the references were separate arguments, Ray would fetch all replies at once
        replies = [self._stored_replies[id].value.ref for id in ids]
        name = f"add up {self.name}, round {self.fleet.round}"
        sums = slot.actor.add_up.options(name=name).remote(self.sums.restricted_to(ids), ids, replies)
        return sums, Addition(ids, slot, len(self.fleet.slots))

    def outcomes(self, call: ActorCall, results: Any) -> Sequence[ItemOutcome]:
        if isinstance(call, Addition):
            private_refs = [self._stored_replies[id].private_ref for id in call.ids]
        else:
            private_refs = [self.fleet.keep(private) for private in call.private_refs]
            for problem in results.problems:
                self.fleet.note_once(f"{self.name}: {problem}")
            results = results.replies
        if call.reply_refs:
            results = [fault or StoredReply(ref) for fault, ref in zip(results, call.reply_refs, strict=True)]
        return [
            ItemOutcome(id, reply, private) for id, reply, private in zip(call.ids, results, private_refs, strict=True)
        ]

    def accept(self, outcome: ItemOutcome, seconds: float) -> None:
        added_up = self._stored_replies.pop(outcome.id, None) is not None
        if not added_up:
            self.fleet.record_seconds(self.name, outcome.id, seconds)
        if isinstance(outcome.value, StoredReply):
            self._stored_replies[outcome.id] = outcome
            self._complete_block(outcome.id)
            return
        reply = outcome.value if isinstance(outcome.value, SummedReply) else unpacked(outcome.value)
        self._usable_answers += self.usable(outcome.id, reply)
        self.answers[outcome.id] = Answer(outcome.id, reply, outcome.private_ref)

    def _complete_block(self, id: int) -> None:
        """Record that a client has replied or failed. After the last client of a block, queue the block's addition."""
        block = self._stored_blocks.get(id)
        if block is None:
            return
        block.missing.discard(id)
        if not block.missing and any(id in self._stored_replies for id in block.ids):
            self._queue_of(block.ids[0]).complete.append(block)

    def fail(self, id: int, fault: Fault) -> None:
        self._fail(id, ClientError(id, self.fleet.round, self.name, fault.text, code=fault.code))

    def _fail(self, id: int, error: ClientError) -> None:
        """Retry the call at a client, or record its error if no attempt is left."""
        if self._attempts[id] < self.fleet.config.federation.retries:
            self._attempts[id] += 1
            self.fleet.round_stats.retried.append(id)
            self.requeue([id])
        else:
            self.answers[id] = Answer(id, None, None, error)
            self._complete_block(id)

    def requeue(self, ids: Sequence[int]) -> None:
        for id in reversed(ids):
            self._queue_of(id).clients.insert(0, id)
            if self._stored_replies.pop(id, None) is not None and self._stores(id):
                self._stored_blocks[id].missing.add(id)

    def lose(self, call: ActorCall, error: Exception) -> None:
        """Retry the calls of all clients whose actor died.

        If the call had several clients, it is unknown which of them ended the process, so this is not counted as an
        attempt of any client.
        """
        cause = f"process died ({type(error).__name__})"
        if isinstance(call, Addition):
            self._lose_addition(call, error)
        elif len(call.ids) == 1:
            lost = ClientLost(call.ids[0], self.fleet.round, self.name, f"its {cause}")
            self.fleet.note(str(lost))
            self._fail(call.ids[0], lost)
        else:
            self.fleet.note(
                f"{name_clients(call.ids)}, round {self.fleet.round}, {self.name}: their {cause}, retrying them one by "
                "one"
            )
            self._ask_alone(call.ids)

    def _lose_addition(self, call: ActorCall, error: BaseException) -> None:
        """Add up a block again on another actor, or ask its clients again for replies that the server adds up.

        The clients are asked again if a reply was lost with its node, or after a second loss.
        """
        block = self._stored_blocks[call.ids[0]]
        block.losses += 1
        again = block.losses == 1 and not isinstance(error, ObjectLostError)
        remedy = "another process adds them up" if again else "they are asked again"
        self.fleet.note(
            f"{name_clients(call.ids)}, round {self.fleet.round}, {self.name}: the sum of their replies was lost "
            f"({type(error).__name__}), {remedy}"
        )
        if again:
            self._queue_of(block.ids[0]).complete.append(block)
            return
        for id in block.ids:
            del self._stored_blocks[id]
        self._ask_alone(call.ids)

    def reject(self, call: ActorCall, cause: BaseException) -> None:
        if isinstance(call, Addition):
            self._lose_addition(call, cause)
        elif len(call.ids) > 1:
            self._ask_alone(call.ids)
        else:
            self.fail(call.ids[0], Fault.of(cause))

    def _ask_alone(self, ids: Sequence[int]) -> None:
        self._alone.update(ids)
        self.fleet.round_stats.retried += ids
        self.requeue(ids)

    def expire(self, calls: Sequence[ActorCall]) -> None:
        limit = self.fleet.config.federation.deadline_s
        running = [id for call in calls for id in call.ids]
        waiting = [id for queue in self._queues for id in queue.clients]
        for id in [*running, *waiting]:
            cause = f"not done after federation.deadline_s = {limit:g} s"
            error = ClientError(id, self.fleet.round, self.name, cause, code="client.late", deadline_s=limit)
            self.answers[id] = Answer(id, None, None, error)

    def report_stuck(self, call: ActorCall, seconds: float) -> None:
        self.fleet.note_stuck(call.ids, self.name, seconds, call.slot)

    def describe(self, id: int) -> str:
        return f"client {id}, round {self.fleet.round}, {self.name}"


class ServerItems(Job):
    """Job that computes the items of `Fleet.map`, in order.

    Args:
        pool: The pool of client actors.
        fn: Function to call on each item.
        items: The items.
        retries: Number of times that an item is submitted again after its process died.

    Attributes:
        results: Results by position of the item.
        error: The first error; the job ends with it.
    """

    def __init__(self, pool: ActorPool, fn: ItemFunction, items: Sequence[Tree], retries: int):
        self.pool = pool
        self.fn = fn
        self.items = items
        self.retries = retries
        self.name = function_name(fn)
        self.results: dict[int, Tree] = {}
        self.error: RayltError | None = None
        self._waiting = list(range(len(items)))  # a heap, so that the items are submitted in order
        self._submitted: set[int] = set()  # items that have no result yet
        self._losses = dict.fromkeys(self._waiting, 0)

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    @property
    def under_way(self) -> list[int]:
        """Return the numbers of the items that were submitted and have no result yet."""
        return sorted(self._submitted)

    @property
    def satisfied(self) -> bool:
        return self.error is not None or len(self.results) == len(self.items)

    def submit(self, slot: ActorSlot, reach: Reach) -> tuple[Any, ActorCall] | None:
        if reach == "own" or not self._waiting:
            return None
        item = heapq.heappop(self._waiting)
        self._submitted.add(item)
        ref = slot.actor.compute.remote(self.fn, to_arrays(self.items[item]), item)
        return ref, ActorCall([item], slot, len(self.pool))

    def outcomes(self, call: ActorCall, results: Any) -> Sequence[ItemOutcome]:
        return [ItemOutcome(call.ids[0], results)]

    def accept(self, outcome: ItemOutcome, seconds: float) -> None:
        self._submitted.discard(outcome.id)
        self.results[outcome.id] = from_arrays(outcome.value)

    def fail(self, id: int, fault: Fault) -> None:
        self._fail(id, fault.text)

    def _fail(self, item: int, cause: str) -> None:
        self.error = RayltError(
            f"{self.describe(item)}: {cause}", code="server.map-failed", function=self.name, item=item, cause=cause
        )

    def requeue(self, ids: Sequence[int]) -> None:
        self._submitted.difference_update(ids)
        for id in ids:
            heapq.heappush(self._waiting, id)

    def lose(self, call: ActorCall, error: Exception) -> None:
        item = call.ids[0]
        self._losses[item] += 1
        if self._losses[item] > self.retries:
            self._fail(item, f"its process died {self._losses[item]} times ({type(error).__name__})")
        else:
            self.requeue([item])

    def reject(self, call: ActorCall, cause: BaseException) -> None:
        self.fail(call.ids[0], Fault.of(cause))

    def describe(self, id: int) -> str:
        return f"{self.name}, item {id}"
