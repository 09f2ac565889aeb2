"""Progress inside one item of `Fleet.map`, reported by the item's function from its own process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from raylt.core.round_stats import StageProgress

_observer: ContextVar[StageProgress | None] = ContextVar("observer", default=None)


@dataclass(frozen=True)
class ItemsProgress:
    """The progress of one `Fleet.map` call.

    Attributes:
        stage: The name of the function.
        done, total: Number of finished items and of all items.
        step, steps: Number of finished steps and of all steps of the first unfinished item.
        share: Fraction of the work that is done, in [0, 1], including the steps of all unfinished items.
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
        stage: The name of the function.
        done: Number of finished items.
        total: Number of items.
        steps: Number of finished steps and of all steps, by number of each unfinished item; at least one item.
    """
    first, all_steps = steps[min(steps)]
    share = (done + sum(taken / max(1, most) for taken, most in steps.values())) / total
    return ItemsProgress(stage, done, total, first, all_steps, share)
