"""A client that misuses its reply, its judgement or its state, in every way that was tried so far.

`KINDS` has the expected outcome of each way:
- "rejected": the run ends as if the client had been lost
- "harmless": the run ends as if nothing had happened
- "believed": an honest reply could look the same; the run ends, and no other client is blamed
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raylt.core.client import Client, Message, Reply
from raylt.core.method import Method
from raylt.models.split import SplitModel

COUNTER = "num_batches_tracked"


class Subclass(Tensor):
    pass


class Other:
    weight, tree = 1.0, {}


def _first(model: dict[str, Any]) -> str:
    return next(name for name, value in model.items() if value.is_floating_point() and value.dim() > 1)


def of_entry(change: Callable[[Tensor], Any]) -> Callable[[Client, Reply], Any]:
    """Return a misuse that changes one float entry of the model."""

    def reply(client: Client, honest: Reply) -> Reply:
        model = dict(honest.tree["model"])
        name = _first(model)
        model[name] = change(model[name].detach().clone())
        return replace(honest, tree=honest.tree | {"model": model})

    return reply


def of_all(change: Callable[[Tensor], Tensor]) -> Callable[[Client, Reply], Any]:
    """Return a misuse that changes every float entry of the model."""

    def reply(client: Client, honest: Reply) -> Reply:
        model = {
            name: change(value) if value.is_floating_point() else value for name, value in honest.tree["model"].items()
        }
        return replace(honest, tree=honest.tree | {"model": model})

    return reply


def of_counter(value: int) -> Callable[[Client, Reply], Any]:
    def reply(client: Client, honest: Reply) -> Reply:
        model = {
            name: torch.full_like(old, value) if name.endswith(COUNTER) else old
            for name, old in honest.tree["model"].items()
        }
        assert any(name.endswith(COUNTER) for name in model)
        return replace(honest, tree=honest.tree | {"model": model})

    return reply


def of_model(change: Callable[[dict[Any, Any]], Any]) -> Callable[[Client, Reply], Any]:
    return lambda client, honest: replace(honest, tree=honest.tree | {"model": change(dict(honest.tree["model"]))})


def of_part(name: Any, value: Any) -> Callable[[Client, Reply], Any]:
    return lambda client, honest: replace(honest, tree=honest.tree | {name: value})


def of_weight(value: Any) -> Callable[[Client, Reply], Any]:
    return lambda client, honest: replace(honest, weight=value)


def of_state(value: Any) -> Callable[[Client, Reply], Any]:
    def reply(client: Client, honest: Reply) -> Reply:
        client.state["own"] = value
        return honest

    return reply


def _without(model: dict[str, Any]) -> dict[str, Any]:
    model.pop(_first(model))
    return model


def _nested(model: dict[str, Any]) -> dict[str, Any]:
    name = _first(model)
    head, _, rest = name.partition(".")
    return {key: value for key, value in model.items() if key != name} | {head: {rest: model[name]}}


def _cycle(model: dict[str, Any]) -> dict[str, Any]:
    model["self"] = model
    return model


def _deep(model: dict[str, Any]) -> dict[str, Any]:
    for _ in range(500):
        model = {"deeper": model}
    return model


def _shared(model: dict[str, Any]) -> dict[str, Any]:
    """Return the model with all float entries as views into one tensor."""
    floats = {name: value for name, value in model.items() if value.is_floating_point()}
    memory = torch.cat([value.flatten() for value in floats.values()])
    parts = memory.split([value.numel() for value in floats.values()])
    return model | {name: part.view(value.shape) for (name, value), part in zip(floats.items(), parts, strict=True)}


def _sparse(value: Tensor) -> Tensor:
    return value.to_sparse()


def _quantised(value: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)


def _objects(value: Tensor) -> Any:
    return np.array([value, None], dtype=object)


def _generator() -> Any:
    yield 1


KINDS: dict[str, tuple[str, Callable[[Client, Reply], Any]]] = {
    # names
    "one name missing": ("rejected", of_model(_without)),
    "one name more": ("rejected", of_model(lambda model: model | {"more": torch.ones(1)})),
    "one part more": ("rejected", of_part("more", 1.0)),
    "one part missing": ("rejected", lambda client, honest: replace(honest, tree={"model": honest.tree["model"]})),
    "a dict for a dotted name": ("rejected", of_model(_nested)),
    "an empty name": ("rejected", of_model(lambda model: model | {"": torch.ones(1)})),
    "a number for a name": ("rejected", of_model(lambda model: model | {3: torch.ones(1)})),
    "a tuple for a name": ("rejected", of_model(lambda model: model | {(1, 2): torch.ones(1)})),
    "a part without a text for a name": ("rejected", of_part(None, 1.0)),
    "a name of a megabyte": ("rejected", of_model(lambda model: model | {"x" * 2**20: torch.ones(1)})),
    "ten thousand names": ("rejected", of_model(lambda model: model | {f"n{i}": torch.ones(1) for i in range(10_000)})),
    "a dict in a dict in a dict ...": ("rejected", of_model(_deep)),
    "a dict that holds itself": ("rejected", of_model(_cycle)),
    "an empty dict for a tensor": ("rejected", of_entry(lambda value: {})),
    "names in another order": ("harmless", of_model(lambda model: OrderedDict(reversed(model.items())))),
    # values
    "nan": ("rejected", of_entry(lambda value: value.fill_(torch.nan))),
    "inf": ("rejected", of_entry(lambda value: value.fill_(torch.inf))),
    "1e38": ("rejected", of_all(lambda value: torch.full_like(value, 1e38))),
    "zeros": ("believed", of_all(torch.zeros_like)),
    "times 19": ("believed", of_all(lambda value: 19 * value)),
    "times 1000": ("rejected", of_all(lambda value: 1000 * value)),
    "negative variances": ("rejected", of_all(lambda value: -value)),
    "one entry times -10": ("believed", of_entry(lambda value: -10 * value)),
    "constant": ("believed", of_all(lambda value: torch.full_like(value, 0.5))),
    "float64": ("rejected", of_all(Tensor.double)),
    "float16": ("rejected", of_all(Tensor.half)),
    "bfloat16": ("rejected", of_all(Tensor.bfloat16)),
    "int": ("rejected", of_entry(Tensor.int)),
    "bool": ("rejected", of_entry(Tensor.bool)),
    "complex": ("rejected", of_entry(lambda value: value.to(torch.complex64))),
    "another shape": ("rejected", of_entry(lambda value: value[:, :, :1])),
    "transposed": ("rejected", of_entry(lambda value: value.transpose(0, 1))),
    "a number for a tensor": ("rejected", of_entry(lambda value: 1.0)),
    "no dimension": ("rejected", of_entry(lambda value: value.sum())),
    "empty": ("rejected", of_entry(lambda value: value[:0])),
    "sparse": ("rejected", of_entry(_sparse)),
    "quantised": ("rejected", of_entry(lambda value: _quantised(value))),
    "meta": ("rejected", of_entry(lambda value: value.to("meta"))),
    "expanded": ("believed", of_entry(lambda value: torch.zeros(1).expand(value.shape))),
    "expanded to 4 TB": ("rejected", of_entry(lambda value: torch.zeros(1).expand(2**40))),
    "memory shared": ("harmless", of_model(_shared)),
    "requires grad": ("harmless", of_entry(lambda value: value.requires_grad_())),
    "a subclass": ("rejected", of_entry(lambda value: value.as_subclass(Subclass))),
    "a numpy array": ("rejected", of_entry(Tensor.numpy)),
    "an object array": ("rejected", of_entry(_objects)),
    "a text": ("rejected", of_entry(lambda value: "weights")),
    "a text that is not Unicode": ("rejected", of_part("loss", "\ud800")),
    "bytes": ("rejected", of_entry(lambda value: bytes(8))),
    "None": ("rejected", of_entry(lambda value: None)),
    "a list": ("rejected", of_entry(Tensor.tolist)),
    "a function": ("rejected", of_entry(lambda value: of_entry)),
    "300 MB": ("rejected", of_model(lambda model: model | {"huge": torch.zeros(75 * 2**20)})),
    "a counter of 2**62": ("rejected", of_counter(2**62)),
    "a negative counter": ("rejected", of_counter(-5)),
    # weight
    "weight 0": ("rejected", of_weight(0.0)),
    "weight -1": ("rejected", of_weight(-1.0)),
    "weight nan": ("rejected", of_weight(float("nan"))),
    "weight inf": ("rejected", of_weight(float("inf"))),
    "weight 1e9": ("rejected", of_weight(1e9)),
    "weight 1e300": ("rejected", of_weight(1e300)),
    "weight 10**400": ("rejected", of_weight(10**400)),
    "weight 10**5000": ("rejected", of_weight(10**5000)),
    "weight True": ("rejected", of_weight(True)),
    "weight a text": ("rejected", of_weight("24")),
    "weight None": ("rejected", of_weight(None)),
    "weight a tensor": ("rejected", of_weight(torch.tensor(24.0))),
    # loss
    "loss nan": ("rejected", of_part("loss", float("nan"))),
    "loss 10**400": ("rejected", of_part("loss", 10**400)),
    "loss 1e300": ("rejected", of_part("loss", 1e300)),
    "loss a text": ("rejected", of_part("loss", "low")),
    "loss True": ("rejected", of_part("loss", True)),
    "loss a tensor": ("rejected", of_part("loss", torch.tensor(1.0))),
    # the reply
    "no reply": ("rejected", lambda client, honest: None),
    "a tuple": ("rejected", lambda client, honest: (honest.weight, honest.tree)),
    "two replies": ("rejected", lambda client, honest: (honest, honest)),
    "another class": ("rejected", lambda client, honest: Other()),
    "an exception": ("rejected", lambda client, honest: ValueError("no")),
    "a generator": ("rejected", lambda client, honest: _generator()),
    "a reply without a tree": ("rejected", lambda client, honest: Reply(honest.weight, [])),  # pyright: ignore
    "another client's reply": ("rejected", lambda client, honest: Reply(14.0, honest.tree)),
    "the end of the process": ("rejected", lambda client, honest: _end()),
    # the state
    "a state that is not finite": ("harmless", of_state(torch.tensor([torch.nan]))),
    "a state that is no tree": ("rejected", of_state([1, 2])),
    "a state with a number for a name": ("rejected", of_state({1: 2})),
    "a state with one name twice": ("rejected", of_state({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})),
    "a state of 4 TB": ("rejected", of_state(torch.zeros(1).expand(2**40))),
    "another client's state": ("harmless", of_state({"last": torch.tensor(3.0)})),
}

COMPARED = "times 1000", "negative variances"  # with what was sent: a part without a template can be anything


def _cells(counts: dict[int, int]) -> Tensor:
    return torch.tensor(list(counts.items()), dtype=torch.int32)


# judgements of a personal method, as cells of a 4 x 4 matrix; the tiny task has 10 test images of each class
RIGHT = {0: 10, 5: 10, 10: 10, 15: 10}
COUNTS: dict[str, Any] = {
    "a million of each": _cells(dict.fromkeys(RIGHT, 10**6)),
    "negative": _cells({0: -10, 1: 20, 4: -10, 5: 20, 8: -10, 9: 20, 12: -10, 13: 20}),
    "3x3": _cells({0: 10, 4: 10, 8: 10}),
    "5x5": _cells({0: 10, 6: 10, 12: 10, 18: 10, 24: 10}),
    "float": _cells(RIGHT).float(),
    "long": _cells(RIGHT).long(),
    "dense": torch.eye(4, dtype=torch.int32) * 10,
    "one column": _cells(RIGHT)[:, :1],
    "one row": _cells(RIGHT)[0],
    "a missing row": _cells({0: 10, 4: 10, 8: 10}),
    "a cell twice": torch.cat([_cells({0: 5}), _cells({0: 5, 5: 10, 10: 10, 15: 10})]),
    "descending": _cells(RIGHT).flip(0),
    "before the first": _cells({-1: 10, 4: 10, 8: 10, 12: 10}),
    "more than the matrix has": torch.cat([_cells(RIGHT), _cells(dict.fromkeys(range(16, 40), 0))]),
    "nothing": torch.empty(0, 2, dtype=torch.int32),
    "none": None,
}


def _end() -> Any:
    raise SystemExit(3)


class Hostile(Method):
    """FedAvg whose clients add their number to the model; from round 2 on, one client misbehaves as `kind` says."""

    name: ClassVar[str] = "hostile"
    kind: str = ""
    culprit: int = 0

    def train(self, client: Client, message: Message) -> Reply:
        model = {
            name: value + (0.01 * client.id if value.is_floating_point() else 1)
            for name, value in message["model"].items()
        }
        honest = client.reply(model=model, loss=1.0)
        if client.id != self.culprit or client.round < 2 or not self.kind:
            return honest
        if self.kind == "lost":
            raise ValueError("gone")
        return KINDS[self.kind][1](client, honest)


class Judged(Hostile):
    """A personal method in which one client lies about its counts."""

    name: ClassVar[str] = "judged"
    personal: ClassVar[bool] = True

    def client_model(self, client: Client) -> SplitModel:
        if client.id == self.culprit and self.kind:
            if self.kind == "lost":
                raise ValueError("gone")
            lie = COUNTS[self.kind]

            def reply(**parts: Any) -> Reply:
                del client.reply  # the client object is used again after the call
                return Reply(len(client), parts | {"confusion": lie})

            client.reply = reply
        return client.model
