"""Client hosts and fleets that disturb a run: other client orders, lost processes, failing calls."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raylt import tree
from raylt.contract.trace import fingerprint
from raylt.core.client import Client, Reply
from raylt.core.fleet.client_host import ClientHost, ReplyAndState
from raylt.core.fleet.function_name import function_name
from raylt.core.fleet.local_fleet import LocalFleet
from raylt.core.setup import Setup
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
    """Client host that records messages and replies.

    Attributes:
        messages: The messages to the clients, in the order of the calls.
        replies: The name of the function, the round, the client and the reply of each call.
        changed: Names of functions that change their message.
        attributes: Names of functions that set new attributes on a client or its model, with one such attribute each.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.messages: list[Tree] = []
        self.replies: list[tuple[str, int, int, Tree]] = []
        self.changed: set[str] = set()
        self.attributes: dict[str, str] = {}
        self._attributes_before: set[str] = set()

    def run(self, fn, message, round, id, shard, private):
        self.messages.append(message)
        before = fingerprint(message)
        name = function_name(fn)
        reply, after = super().run(fn, message, round, id, shard, private)
        if fingerprint(message) != before:
            self.changed.add(name)
        if new := _attributes_of(self.clients[id]) - self._attributes_before:
            self.attributes[name] = min(new)
        if isinstance(reply, Reply):  # for any other value the fleet reports the error
            self.replies.append((name, round, id, tree.snapshot(reply.tree)))
        return reply, after

    def _begin(self, fn, round, call):
        client, entries = super()._begin(fn, round, call)
        self._attributes_before = _attributes_of(client)
        return client, entries


def _attributes_of(client: Client) -> set[str]:
    """Return the names of all attributes of a client and of the modules of its model."""
    names = {f"client.{name}" for name in vars(client)}
    for path, module in client.model.named_modules():
        prefix = f"client.model.{path}." if path else "client.model."
        entries = vars(module) | module._parameters | module._buffers | module._modules
        names |= {prefix + name for name in entries}
    return names


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

    def stacks(self, fn: Any) -> bool:
        return False

    def run(self, fn, message, round, id, shard, private):
        if id not in self.hosts:
            self.hosts[id] = ClientHost(*self.args)
        return self.hosts[id].run(fn, message, round, id, shard, private)


class NewHosts:
    """Client host that uses a new host for every call, as if the actor and its caches were lost before each call."""

    def __init__(self, *args: Any):
        self.args = args
        self.device = args[-1]

    def stacks(self, fn: Any) -> bool:
        return False

    def run(self, *call):
        return ClientHost(*self.args).run(*call)


class InStacks(ClientHost):
    """Client host that trains clients in stacks and alone, and records the largest difference of their results.

    Attributes:
        difference: Largest difference |stacked - alone| / max(|alone|, 1).
        compared: Number of calls that were compared.
    """

    def __init__(self, setup: Setup, *args: Any):
        super().__init__(setup, *args, any_processor=True)
        local = setup.config.local.model_copy(update={"stacked": "off"})
        self._alone = ClientHost(replace(setup, config=setup.config.model_copy(update={"local": local})), *args)
        self.difference = 0.0
        self.compared = 0

    def run_stacks(self, fn, message, round, calls):
        outcomes = super().run_stacks(fn, message, round, calls)
        for call in calls:
            if (outcome := outcomes.get(call.id)) is not None:
                alone = self._alone.run(fn, message, round, call.id, call.shard, call.private)
                self.compared += 1
                self.difference = max(self.difference, _difference(outcome, alone))
        return outcomes


def _difference(outcome: ReplyAndState, alone: ReplyAndState) -> float:
    numbers, expected = (dict(_numbers_of(each)) for each in (outcome, alone))
    if numbers.keys() != expected.keys():
        return math.inf
    worst = 0.0
    for path, value in expected.items():
        scale = value.abs().clamp(min=1)
        off = ((numbers[path] - value).abs() / scale).nan_to_num(math.inf)
        worst = max(worst, off.max().item() if off.numel() else 0.0)
    return worst


def _numbers_of(outcome: ReplyAndState) -> Iterator[tuple[str, Tensor]]:
    reply, private = outcome
    assert isinstance(reply, Reply)
    for path, leaf in tree.leaves({"reply": reply.tree, "private": private}):
        if isinstance(leaf, Tensor | float | int):
            yield path, torch.as_tensor(leaf, dtype=torch.float64)


class FailsFirst(ClientHost):
    """Client host in which each client's first call of a function in a round raises an error after training."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.failed: set[tuple[str, int, int]] = set()

    def run(self, fn, message, round, id, shard, private):
        result = super().run(fn, message, round, id, shard, private)
        call = (function_name(fn), round, id)
        if call not in self.failed:
            self.failed.add(call)
            raise RuntimeError("the first attempt is lost")
        return result
