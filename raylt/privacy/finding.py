"""`Finding`: what came of one attack."""

from dataclasses import dataclass

from torch import Tensor

from raylt.privacy.measures import Nearness


@dataclass(frozen=True)
class Finding:
    """What came of one attack.

    Attributes:
        upload: the part that was attacked.
        what: how.
        count: reconstructions, or guesses.
        reached: how near they came; None of guesses.
        control: the same attack, trained on pairs that do not belong together; None where nothing is trained.
        average: what the mean outside image of the true class gives, for which nobody need see an upload.
        guessed: of guesses the balanced share that is right, 1/2 by chance.
        shown: true images, reconstructions and the nearest training images, [3, columns, channels, H, W].
    """

    upload: str
    what: str
    count: int
    reached: Nearness | None = None
    control: Nearness | None = None
    average: Nearness | None = None
    guessed: float | None = None
    shown: Tensor | None = None
