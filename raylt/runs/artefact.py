"""What `raylt export` writes: a file that says of itself what it is, and the models that are read from it.

A safetensors file has the models' entries, and under "raylt" in its metadata a JSON text, `About`: the architecture by
its names and fields, the classes, what an image must be, what the model comes from and how well it did. Of several
clients' models an entry that is the same for all stands once, under its name; of one that is not each value stands once
as NAME@ID, after the first client that has it. To read it, neither training data nor Ray are needed, nor the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from raylt import store
from raylt.core.checkpoint import hash_tensors
from raylt.core.setup import Setup
from raylt.data.task import Facts
from raylt.errors import CheckpointError, ConfigError
from raylt.models.split import Params, with_classifier
from raylt.runs.about import KEY, About, ClientEntry, choose_in, facts_of, parse, setup_of, text_of
from raylt.runs.export import TrainedModel


def rebuild(setup: Setup, facts: Facts, entries: Params) -> nn.Module:
    """The network that has these entries.

    Raises:
        ConfigError: it is not the one that method and model build, nor that one with another linear classifier.
    """
    model = setup.new_model(facts)
    if entries.keys() != model.state_dict().keys() and "classifier.weight" in entries:
        model = with_classifier(model, entries["classifier.weight"], entries.get("classifier.bias"),
                                entries.get("classifier.longest"))
    try:
        model.load_state_dict(entries)
    except RuntimeError as error:
        raise ConfigError(f"method = {setup.method.name}: its model cannot be built from its entries "
                          f"({' '.join(str(error).split())[:200]}); export it with --format pt2") from None
    return model


class Values:
    """The entries of one or several models, each value once."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, tuple[int, Tensor]]] = {}     # by entry and hash: who has it first, and it
        self._own: dict[int, dict[str, int]] = {}                       # by model and entry: who has its value first

    def add(self, id: int, entries: Mapping[str, Tensor]) -> None:
        """Takes in a model; values that are known are not kept again."""
        self._own[id] = {}
        for name, value in entries.items():
            kept = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            known = self._values.setdefault(name, {})
            self._own[id][name], _ = known.setdefault(hash_tensors({name: kept}), (id, kept))

    def tensors(self) -> dict[str, Tensor]:
        """As the file has them."""
        return {self._place(name, id): value for name, known in self._values.items() for id, value in known.values()}

    def own_of(self, id: int) -> dict[str, int]:
        """Of a model: who has the value of each entry first that is not the same for all."""
        return {name: first for name, first in self._own[id].items() if self._place(name, first) != name}

    def _place(self, name: str, id: int) -> str:
        shared = len(self._values[name]) == 1 and all(name in own for own in self._own.values())
        return name if shared else f"{name}@{id}"


def write(path: Path, tensors: Mapping[str, Tensor], about: About) -> None:
    """Writes a safetensors file.

    Raises:
        CheckpointError: it cannot be written there.
    """
    store.write(path, safetensors.torch.save(dict(tensors), {KEY: text_of(about)}))


@dataclass(frozen=True)
class Artefact:
    """A safetensors file of `raylt export`, as it was read."""

    path: Path
    about: About
    tensors: dict[str, Tensor]

    @property
    def clients(self) -> list[ClientEntry]:
        """Those whose models it has; none in the file of a global model."""
        return self.about["clients"] or []

    def model(self, client: str | int | None = None) -> TrainedModel:
        """Its model, or that of one client, by name or id.

        Raises:
            ConfigError: it has no such client; or several clients' models, and none is named.
        """
        entries = self._entries(client)
        setup, facts = setup_of(self.about, str(self.path)), facts_of(self.about)
        model = TrainedModel(setup.method, rebuild(setup, facts, entries), facts, self.about["batch"],
                             self.about["input"]["fit"])
        return model.requires_grad_(False)

    def _entries(self, client: str | int | None) -> Params:
        id = choose_in(self.about, client, self.path)
        if id is None:
            return self.tensors
        entry = next(each for each in self.clients if each["id"] == id)
        own = {f"{name}@{first}": name for name, first in entry["own"].items()}
        if missing := own.keys() - self.tensors.keys():
            raise CheckpointError(f"{self.path}: has no entry {min(missing)}; export it again")
        shared = {name: value for name, value in self.tensors.items() if "@" not in name}
        return shared | {name: self.tensors[stored] for stored, name in own.items()}


def read(path: Path) -> Artefact:
    """A safetensors file of `raylt export`.

    Raises:
        CheckpointError: it is none.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
            if text is None:
                raise CheckpointError(f"{path}: does not say what it is; give a file that raylt export wrote")
            return Artefact(path, parse(text, path), {name: file.get_tensor(name) for name in [*file.keys()]})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({' '.join(str(error).split())}); give a file that raylt export "
                              "wrote") from None
