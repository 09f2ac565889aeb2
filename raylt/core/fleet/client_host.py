"""`ClientHost`: the clients that one process runs."""

import math

import torch

from raylt import tree
from raylt.core.client import Client, ClientFunction, Message, Reply
from raylt.core.device import is_full
from raylt.core.evaluation.counts import EvaluationSet
from raylt.core.fleet.wire import Unusable, plain, room_for
from raylt.core.setup import Setup, private_entries
from raylt.data.samples import Samples
from raylt.data.task import Shard, TaskSpec
from raylt.errors import RayltError, one_line
from raylt.models.split import set_training
from raylt.models.trainable import frozen_entries
from raylt.seeds import seeded
from raylt.tree import Tree


class ClientHost:
    """The clients of one process.

    All clients share one model object: the host loads a client's private entries into it before the client's call and
    takes them out afterwards. So a process with a hundred clients holds one model. The result of a call depends on
    (private state, message, seed) only, not on the process.

    Args:
        setup: method, configuration and model factory of the experiment.
        spec: what a method may know of the task.
        test: the balanced test set.
        device: runs the clients' calls.
        room: bytes that the samples of all its clients may take on the device. Beyond it the host drops the samples of
            the client whose last call is longest ago; they must come again with that client's next call.
    """

    def __init__(self, setup: Setup, spec: TaskSpec, test: Shard, device: torch.device, room: float = math.inf):
        self.setup = setup
        self.spec = spec
        self.device = device
        self.model = setup.new_model(spec).to(device)
        self.clients: dict[int, Client] = {}
        self._samples_room = room
        self._samples_bytes = 0
        self._initial = tree.snapshot(private_entries(setup.method, self.model))
        self._test = EvaluationSet(test, spec, device)
        self._threads = max(1, int(setup.config.resources.cpus_per_client))
        self._room = room_for(tree.nbytes(dict(self.model.state_dict()) | frozen_entries(self.model)))

    def run(
        self, fn: ClientFunction, message: Message, round: int, id: int, shard: Shard | None, private: Tree | None
    ) -> tuple[Reply | Unusable, Tree]:
        """Run a client function once for one client.

        Where the device is full, the host drops the data of the other clients and runs the function again.

        Args:
            shard: the client's data; needed the first time, and after the host dropped them.
            private: what the client's last call returned, or None before its first.

        Returns:
            The reply, or why it cannot be used, and the client's private state, both on the CPU.

        Raises:
            LateWrite: the function changed what it had handed over.
        """
        try:
            return self._run(fn, message, round, id, shard, private)
        except Exception as error:
            if not (is_full(error) and self.drop(all_but=id)):
                raise
        # outside the handler, since the error's frames keep their objects alive
        return self._run(fn, message, round, id, shard, private)

    def drop(self, all_but: int) -> bool:
        """Remove the data of all clients except the client `all_but` from the device.

        Returns:
            Whether there was another client's data to remove.
        """
        dropped = [id for id in self.clients if id != all_but]
        for id in dropped:
            self._release(id)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return bool(dropped)

    def _run(
        self, fn: ClientFunction, message: Message, round: int, id: int, shard: Shard | None, private: Tree | None
    ) -> tuple[Reply | Unusable, Tree]:
        client = self._admit(id, shard)
        entries, state = (self._initial, {}) if private is None else (private["model"], private["state"])
        client.recall(state)
        arrived = tree.to({"entries": entries, "message": message}, self.device)
        client.receive(arrived["entries"])
        set_training(self.model)  # every call starts in the same mode, whatever the previous client left
        name = getattr(fn, "__name__", "call")
        client.begin(name, round)
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)  # the same number everywhere, since it affects the order of some sums
        try:
            with seeded(self.setup.config.seed, name, round, id, device=self.device):
                reply = self._called(fn, client, arrived["message"])
        finally:
            torch.set_num_threads(threads)
        client.check_stamps()
        after = {"model": private_entries(self.setup.method, self.model), "state": dict(client.state)}
        return plain(reply, after, self._room)

    def _called(self, fn: ClientFunction, client: Client, message: Message) -> Reply:
        """Run a client function; raise an error with the code reply.not-finite if it fails on a diverged model."""
        try:
            return fn(client, message)
        except RayltError:
            raise
        except Exception as error:
            entries = self.model.state_dict().values()
            if is_full(error) or all(torch.isfinite(value).all() for value in entries):
                raise
            raise RayltError(
                f"the model is infinite or not a number: {one_line(error)}", code="reply.not-finite"
            ) from error

    def _admit(self, id: int, shard: Shard | None) -> Client:
        client = self.clients.pop(id, None)
        if client is None:
            assert shard is not None, f"client {id} is not in this process and came without its data"
            samples = Samples(shard, self.spec, self.device)
            setup = self.setup
            client = Client(
                id, samples, self._test, self.model, setup.config, self.device, setup.augment, setup.schedule
            )
            self._samples_bytes += samples.nbytes
        self.clients[id] = client  # at the end: it is dropped last
        while len(self.clients) > 1 and self._samples_bytes > self._samples_room:
            self._release(next(iter(self.clients)))
        return client

    def _release(self, id: int) -> None:
        self._samples_bytes -= self.clients.pop(id).samples.nbytes
