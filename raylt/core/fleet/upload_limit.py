"""A check before a run starts: clients' last uploads must be small enough to send."""

from raylt import tree
from raylt.core.fleet.wire import room_for
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.models.split import SplitModel
from raylt.models.trainable import frozen_entries
from raylt.tree import Tree


def check_class_sums(task: Task, model: SplitModel, of_class: Tree) -> None:
    """Raise ConfigError if the class sums of one client would exceed the size limit of a reply.

    Args:
        of_class: the template of one class's sums.

    Raises:
        ConfigError: they do not fit; names both sizes.
    """
    classes = int((task.client_counts > 0).sum(axis=1).max())
    size = classes * tree.nbytes(of_class)
    room = room_for(tree.nbytes(dict(model.state_dict()) | frozen_entries(model)))
    if size > room:
        raise ConfigError(
            f"method: the sums of {classes} classes with {model.dim} features take {size / 2**20:,.0f} MiB at one "
            f"client, and a reply of this model may take {room / 2**20:,.0f} MiB. Take a model with fewer features, or "
            "clients with fewer classes.",
            code="reply.too-large",
            key="method",
            size=size,
            room=room,
            classes=classes,
        )
