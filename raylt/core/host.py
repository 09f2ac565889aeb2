"""`Host`: the clients that one process runs."""

import math

import torch

from raylt import tree
from raylt.core.client import Client, ClientFunction, Message, Reply
from raylt.core.evaluation import EvaluationSet
from raylt.core.full import is_full
from raylt.core.setup import Setup, private_entries
from raylt.core.wire import Unusable, plain, room_for
from raylt.data.samples import Samples
from raylt.data.task import Facts, Shard
from raylt.seeds import seeded
from raylt.tree import Tree


class Host:
    """The clients of one process.

    They share one model object: what is private to a client is put into it before the client's call and taken out
    afterwards. So a process with a hundred clients holds one model, and a call's result depends on (private state,
    message, seed) alone, whichever process runs it.

    Args:
        room: bytes that the samples of all its clients may take on the device. Beyond it those of the client whose last
            call is longest ago give way; with its next call they must come again.
    """

    def __init__(self, setup: Setup, facts: Facts, test: Shard, device: torch.device, room: float = math.inf):
        self.setup, self.facts, self.device, self._samples_room = setup, facts, device, room
        self.model = setup.new_model(facts).to(device)
        self.clients: dict[int, Client] = {}
        self._samples_bytes = 0
        self._initial = tree.snapshot(private_entries(setup.method, self.model))
        self._test = EvaluationSet(test, facts, device)
        self._threads = max(1, int(setup.config.resources.cpus_per_client))
        self._room = room_for(tree.nbytes(dict(self.model.state_dict())))

    def run(self, fn: ClientFunction, message: Message, round: int, id: int, shard: Shard | None,
            private: Tree | None) -> tuple[Reply | Unusable, Tree]:
        """Runs one client's function once; where the device is full, without the data of the other clients again.

        Args:
            shard: the client's data; needed the first time, and after they gave way.
            private: what the client's last call returned, or None before its first.

        Returns:
            The reply, or why it is none, and the client's private state, both on the CPU.

        Raises:
            LateWrite: the function changed what it had handed over.
        """
        try:
            return self._run(fn, message, round, id, shard, private)
        except Exception as error:
            if not (is_full(error) and self.drop(all_but=id)):
                raise
        return self._run(fn, message, round, id, shard, private)    # the error's frames would keep what they hold alive

    def _run(self, fn: ClientFunction, message: Message, round: int, id: int, shard: Shard | None,
             private: Tree | None) -> tuple[Reply | Unusable, Tree]:
        client = self._admit(id, shard)
        entries, state = (self._initial, {}) if private is None else (private["model"], private["state"])
        client.recall(state)
        arrived = tree.to({"entries": entries, "message": message}, self.device)
        client.receive(arrived["entries"])
        self.model.train()              # whoever ran before: a call starts from the same mode
        name, seed = getattr(fn, "__name__", "call"), self.setup.config.seed
        client.begin(name, round)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)        # the same everywhere: it decides the order of some sums
        try:
            with seeded(seed, name, round, id, device=self.device):
                reply = fn(client, arrived["message"])
        finally:
            torch.set_num_threads(threads)
        client.check_stamps()
        after = {"model": private_entries(self.setup.method, self.model), "state": dict(client.state)}
        return plain(reply, after, self._room)

    def _admit(self, id: int, shard: Shard | None) -> Client:
        client = self.clients.pop(id, None)
        if client is None:
            assert shard is not None, f"client {id} is not here and came without its data"
            samples = Samples(shard, self.facts, self.device)
            client = Client(id, samples, self._test, self.model, self.setup.config, self.device, self.setup.augment)
            self._samples_bytes += samples.nbytes
        self.clients[id] = client                       # the last one, who gives way last
        while len(self.clients) > 1 and self._samples_bytes > self._samples_room:
            self._release(next(iter(self.clients)))
        return client

    def _release(self, id: int) -> None:
        self._samples_bytes -= self.clients.pop(id).samples.nbytes

    def drop(self, all_but: int) -> bool:
        """Frees the device from the data of all clients but one; whether there were any."""
        others = [id for id in self.clients if id != all_but]
        for id in others:
            self._release(id)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return bool(others)
