"""Hosts and fleets that do what may happen to a run: other orders, lost processes, failing attempts."""

from typing import Any

from raylt import tree
from raylt.contract.trace import fingerprint
from raylt.core.client import Reply
from raylt.core.host import Host
from raylt.core.in_process import LocalFleet
from raylt.tree import Tree


class Recorder(Host):
    """Keeps what it was sent and what it replied, and notes the functions that change their message."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.messages: list[Tree] = []
        self.replies: list[tuple[str, int, int, Tree]] = []      # function, round, client, tree
        self.changed: set[str] = set()

    def run(self, fn, message, round, id, shard, private):
        self.messages.append(message)
        before, name = fingerprint(message), getattr(fn, "__name__", "call")
        reply, after = super().run(fn, message, round, id, shard, private)
        if fingerprint(message) != before:
            self.changed.add(name)
        if isinstance(reply, Reply):        # of any other the fleet says why it is none
            self.replies.append((name, round, id, tree.snapshot(reply.tree)))
        return reply, after


class Backwards(LocalFleet):
    """Runs the last client first and, as every fleet, answers in the order of the ids."""

    def _answers(self, fn, ids, message, enough, usable, sums):
        yield from reversed(list(super()._answers(fn, ids[::-1], message, enough, usable, sums)))


class OwnHosts:
    """As many hosts, so model objects, as there are clients: one actor for each."""

    def __init__(self, *args: Any):
        self.args, self.hosts, self.device = args, {}, args[-1]

    def run(self, fn, message, round, id, shard, private):
        if id not in self.hosts:
            self.hosts[id] = Host(*self.args)
        return self.hosts[id].run(fn, message, round, id, shard, private)


class NewHosts:
    """A new host for every call: the actor was lost in between, and all caches with it."""

    def __init__(self, *args: Any):
        self.args, self.device = args, args[-1]

    def run(self, *call):
        return Host(*self.args).run(*call)


class FailsFirst(Host):
    """Each client's first call of a function in a round raises, after it has trained."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.failed: set[tuple[str, int, int]] = set()

    def run(self, fn, message, round, id, shard, private):
        result = super().run(fn, message, round, id, shard, private)
        if (call := (getattr(fn, "__name__", "call"), round, id)) not in self.failed:
            self.failed.add(call)
            raise RuntimeError("the first attempt is lost")
        return result
