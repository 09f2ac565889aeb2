"""Hosts and fleets that run clients in other ways than the usual one; what comes out must not depend on it."""

from typing import Any

from raylt.core.host import Host
from raylt.core.in_process import LocalFleet


class Backwards(LocalFleet):
    """Runs the last client first and, as every fleet, answers in the order of the ids."""

    def _answers(self, fn, ids, *rest):
        yield from reversed(list(super()._answers(fn, ids[::-1], *rest)))


class OwnHosts:
    """As many hosts, so model objects, as there are clients: one actor for each."""

    def __init__(self, *args: Any):
        self.args, self.hosts = args, {}

    def run(self, fn, message, round, id, shard, private):
        if id not in self.hosts:
            self.hosts[id] = Host(*self.args)
        return self.hosts[id].run(fn, message, round, id, shard, private)


class NewHosts:
    """A new host for every call: the actor was lost in between, and all caches with it."""

    def __init__(self, *args: Any):
        self.args = args

    def run(self, *call):
        return Host(*self.args).run(*call)


class FailsFirst(Host):
    """Each client's first call of a function in a round raises, after it has trained."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.failed: set[tuple[str, int, int]] = set()

    def run(self, fn, message, round, id, shard, private):
        result = super().run(fn, message, round, id, shard, private)
        if (call := (fn.__name__, round, id)) not in self.failed:
            self.failed.add(call)
            raise RuntimeError("the first attempt is lost")
        return result
