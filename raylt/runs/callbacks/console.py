"""`PlainConsole`: a terminal that prints names and texts from files literally, without markup or escape sequences."""

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

# Characters that move the cursor, change the terminal's state or change the direction of text.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class PlainConsole(Console):
    """A console that prints brackets literally, not as markup, and replaces escape sequences by question marks."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, *arguments: Any, **how: Any) -> Iterator[Segment]:
        """Print text without the escape sequences that names and files may contain."""
        for segment in super().render(*arguments, **how):
            if segment.control or not UNSAFE.search(segment.text):
                yield segment
            else:
                yield Segment(UNSAFE.sub("?", segment.text), segment.style)
