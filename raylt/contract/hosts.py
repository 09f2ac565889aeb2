"""Client hosts and fleets that disturb a run: other client orders, lost processes, failing calls."""

from collections.abc import Callable
from typing import Any

from raylt import tree
from raylt.contract.trace import fingerprint
from raylt.core.client import Reply
from raylt.core.fleet.client_host import ClientHost
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.errors import in_user_code
from raylt.tree import Tree


def noting(run: Callable[..., Any], raised: list[Exception]) -> Callable[..., Any]:
    """Wrap a host's `run` so that exceptions in the user's own code are also recorded in `raised`.

    A fleet keeps only one line of each exception.
    """

    def noted(*call: Any) -> Any:
        try:
            return run(*call)
        except Exception as error:
            if in_user_code(error):
                raised.append(error)
            raise

    return noted


class Recorder(ClientHost):
    """Client host that records messages, replies, and the names of functions that change their message."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.messages: list[Tree] = []
        self.replies: list[tuple[str, int, int, Tree]] = []  # function, round, client, tree
        self.changed: set[str] = set()

    def run(self, fn, message, round, id, shard, private):
        self.messages.append(message)
        before = fingerprint(message)
        name = getattr(fn, "__name__", "call")
        reply, after = super().run(fn, message, round, id, shard, private)
        if fingerprint(message) != before:
            self.changed.add(name)
        if isinstance(reply, Reply):  # for any other value the fleet reports the error
            self.replies.append((name, round, id, tree.snapshot(reply.tree)))
        return reply, after


class Backwards(LocalFleet):
    """Fleet that runs the last client first. Like every fleet, it returns replies in the order of client ids."""

    def _answers(self, fn, ids, message, enough, usable, sums):
        yield from reversed(list(super()._answers(fn, ids[::-1], message, enough, usable, sums)))


class OwnHosts:
    """Client host that uses a separate host and model object for each client, as with one actor per client."""

    def __init__(self, *args: Any):
        self.args = args
        self.hosts: dict[int, ClientHost] = {}
        self.device = args[-1]

    def run(self, fn, message, round, id, shard, private):
        if id not in self.hosts:
            self.hosts[id] = ClientHost(*self.args)
        return self.hosts[id].run(fn, message, round, id, shard, private)


class NewHosts:
    """Client host that uses a new host for every call, as if the actor and its caches were lost before it."""

    def __init__(self, *args: Any):
        self.args = args
        self.device = args[-1]

    def run(self, *call):
        return ClientHost(*self.args).run(*call)


class FailsFirst(ClientHost):
    """Client host in which each client's first call of a function in a round raises an error after training."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.failed: set[tuple[str, int, int]] = set()

    def run(self, fn, message, round, id, shard, private):
        result = super().run(fn, message, round, id, shard, private)
        call = (getattr(fn, "__name__", "call"), round, id)
        if call not in self.failed:
            self.failed.add(call)
            raise RuntimeError("the first attempt is lost")
        return result
