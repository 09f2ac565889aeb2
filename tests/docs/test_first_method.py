"""The method on the first page, and that of `raylt new method`: FedProx under another name."""

from pathlib import Path

import pytest
import torch
from test_docs import DOCS
from tiny import configure, make_experiment

import raylt
from raylt.methods.fedprox import FedProx
from raylt.registry import load_plugin

TEMPLATE = Path(raylt.__file__).parent / "templates" / "my_method.py"


def trained(task, folder, method) -> torch.Tensor:
    """Return the parameters of the server's model after three rounds, as one vector."""
    experiment = make_experiment(configure(federation={"rounds": 3}), task, folder, method)
    while not experiment.done:
        experiment.step()
    return torch.cat([value.flatten() for value in experiment.server.model.parameters()]).detach()


def first_page() -> str:
    """Return the block below "Write a method" of the first page."""
    section = (DOCS.parent / "README.md").read_text().partition("\n## Write a method\n")[2]
    return section.partition("```python\n")[2].partition("```")[0]


@pytest.mark.parametrize("source", [first_page(), TEMPLATE.read_text()], ids=["README.md", TEMPLATE.name])
@pytest.mark.usefixtures("no_guests")
def test_the_first_method_gives_the_model_of_fedprox(source, tiny_task, tmp_path):
    file = tmp_path / "first_method.py"
    file.write_text(source)
    (plugin,) = load_plugin(file)
    own, proximal, averaged = (
        trained(tiny_task, tmp_path, method) for method in (plugin.value(mu=10.0), FedProx(mu=10.0), FedProx(mu=0.0))
    )
    assert (own - proximal).norm() < 1e-5 * (own - averaged).norm()
