"""Progress inside one item of `Fleet.map`, reported by the item's function from its own process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from raylt.core.server import StageProgress

_observer: ContextVar[StageProgress | None] = ContextVar("observer", default=None)


@dataclass(frozen=True)
class ItemsProgress:
    """The progress of one `Fleet.map` call.

    Attributes:
        stage: the name of the function.
        done, total: items that are done, and all items.
        step, steps: steps of the first item under way that are done, and its steps.
        share: the share of the work that is done, in [0, 1]; it counts all items under way.
    """

    stage: str
    done: int
    total: int
    step: int
    steps: int
    share: float


ItemsHook = Callable[[ItemsProgress], None]


def report_steps(done: int, total: int) -> None:
    """Report how many steps of the current item are done. Outside `Fleet.map` this does nothing."""
    observer = _observer.get()
    if observer is not None:
        observer(done, total)


@contextmanager
def steps_reported_to(observer: StageProgress | None) -> Iterator[None]:
    """Send the reports of `report_steps` inside the block to an observer."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def progress_of_items(stage: str, done: int, total: int, steps: Mapping[int, tuple[int, int]]) -> ItemsProgress:
    """Return the progress of a `Fleet.map` call, from finished items and the steps of unfinished items.

    Args:
        steps: by number of an item under way, its steps that are done and its steps; at least one item.
    """
    first, all_steps = steps[min(steps)]
    share = (done + sum(taken / max(1, most) for taken, most in steps.values())) / total
    return ItemsProgress(stage, done, total, first, all_steps, share)
