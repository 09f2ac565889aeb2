"""A check before a run starts: uploads that grow with the classes must not exceed the size limit of a reply."""

from raylt import tree
from raylt.core.fleet.wire import room_for
from raylt.data.task import Task
from raylt.errors import ConfigError
from raylt.models.split import SplitModel
from raylt.models.trainable import frozen_entries
from raylt.tree import Tree


def check_class_uploads(
    task: Task, model: SplitModel, of_class: Tree, values: str = "sums", more_bytes: int = 0
) -> None:
    """Raise ConfigError if one client's values of its classes would exceed the size limit of a reply.

    Args:
        task: The data.
        model: A new model of the run.
        of_class: The template of one class's values.
        values: Noun for the values in the message.
        more_bytes: Size of the reply's other parts.

    Raises:
        ConfigError: The reply exceeds the limit; the message has both sizes.
    """
    classes = int((task.client_counts > 0).sum(axis=1).max())
    size = classes * tree.nbytes(of_class) + more_bytes
    room = room_for(tree.nbytes(dict(model.state_dict()) | frozen_entries(model)))
    if size > room:
        raise ConfigError(
            f"method: the {values} of {classes} classes with {model.dim} features take {size / 2**20:,.0f} MiB at one "
            f"client, and a reply of this model may take {room / 2**20:,.0f} MiB. Use a model with fewer features, or "
            "clients with fewer classes.",
            code="reply.too-large",
            key="method",
            size=size,
            room=room,
            classes=classes,
        )
