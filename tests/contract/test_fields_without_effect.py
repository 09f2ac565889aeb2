"""Fields without an effect are found, and no others."""

from typing import ClassVar

from torch.nn import functional as F

import raylt
from raylt.contract.fields import fields_without_effect


class Reader(raylt.Method):
    name: ClassVar[str] = "reader"
    paper: ClassVar[str] = "for tests"
    weight: float = raylt.hp(1.0, raylt.Uniform(0.5, 2.0), "weight of the loss")
    unread: float = raylt.hp(1.0, raylt.Uniform(0.5, 2.0), "weight of nothing")
    temperature: float = raylt.hp(1.0, raylt.Uniform(0.5, 2.0), "factor of the logits that are evaluated")
    broken: bool = raylt.hp(False, raylt.Choice(False, True), "whether training fails")

    def objective(self, client, message):
        assert not self.broken
        return lambda batch: self.weight * F.cross_entropy(client.model(batch.x), batch.y)

    def predict(self, model, x):
        return self.temperature * model(x)


def test_only_a_field_that_nothing_reads_has_no_effect():
    assert fields_without_effect(Reader()) == ["unread"]
