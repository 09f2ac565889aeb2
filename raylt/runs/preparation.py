"""`prepare`: the checks and the encoding between the plan of a run and its first step."""

from collections.abc import Callable

from raylt.core.checkpoint.checkpoint import Checkpoint
from raylt.core.checkpoint.frozen import check_frozen
from raylt.core.encoding import encode
from raylt.core.setup import Setup
from raylt.data.task import Task
from raylt.errors import own_function
from raylt.models.split import SplitModel


def prepare(
    setup: Setup, task: Task, saved: Checkpoint | None = None, report: Callable[[str], object] = lambda text: None
) -> tuple[Setup, Task, SplitModel]:
    """Let the method check and fetch what it needs, then encode the images if the encoder is frozen.

    Encoding comes last, since it may take long and everything before it may raise an error.

    Args:
        setup: Values that the configuration names.
        task: The data and their split.
        saved: Checkpoint from which the run continues.
        report: Called with a sentence about the images.

    Returns:
        The setup and the task for the experiment, and the untrained model.

    Raises:
        ConfigError: Method, model, data and settings do not fit together.
        CheckpointError: The model's frozen weights are not those of the checkpoint.
    """
    model = setup.new_model(task.spec)
    setup.check(task.spec, model)
    height, width, _ = task.shape
    side = setup.config.input
    if side is not None and (height, width) != (side, side):
        report(f"images of {height}x{width} are resized to {side}x{side} for {setup.config.model}")
    prepare_method(setup, task, model)
    if saved is not None:
        check_frozen(saved.read("server"), model, setup.config)
    setup, task = encode(setup, task, report)
    return setup, task, model


def prepare_method(setup: Setup, task: Task, model: SplitModel) -> None:
    """Let the method check its settings and fetch its files.

    Raises:
        ConfigError: The method refuses its settings or raises another exception, which names the line.
    """
    with own_function("method", f"prepare of {setup.method.name}"):
        setup.method.prepare(task, setup.config, model)
