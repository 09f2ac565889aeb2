"""Fonts for texts with characters that matplotlib's default font does not have, such as Chinese class names."""

import warnings
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOXES = "Last Resort"  # font of matplotlib that has a box for each character


def add_fonts(figure: "Figure") -> None:
    """Let texts of a figure use installed fonts for characters that their own font does not have.

    If no installed font has a character, matplotlib draws a box instead, and a warning lists the character.
    """
    from matplotlib.font_manager import findfont
    from matplotlib.text import Text

    lacking: dict[Text, set[str]] = {}
    for text in figure.findobj(lambda artist: isinstance(artist, Text)):
        assert isinstance(text, Text)
        printable = {character for character in text.get_text() if character.isprintable()}
        if missing := printable - _covered(findfont(text.get_fontproperties())):
            lacking[text] = missing
    if not lacking:
        return
    families = _families(frozenset[str]().union(*lacking.values()))
    for text in lacking:
        text.set_fontfamily([*text.get_fontfamily(), *families])


@cache
def _families(characters: frozenset[str]) -> tuple[str, ...]:
    """Return a small set of installed font families that together have these characters, best coverage first.

    Characters that no family has are listed in a warning, once per process.
    """
    from matplotlib.font_manager import fontManager

    fonts = {font.name: font.fname for font in reversed(fontManager.ttflist) if not font.name.startswith(BOXES)}
    chosen: list[str] = []
    left = set(characters)
    while left:
        best = max(sorted(fonts), key=lambda name: len(left & _covered(fonts[name])))
        if not left & _covered(fonts[best]):
            warnings.warn(
                f"no installed font has these characters: {' '.join(sorted(left)[:20])}. Pictures show boxes "
                "instead. Install a font that has them, such as Noto Sans CJK.",
                stacklevel=3,
            )
            break
        chosen.append(best)
        left -= _covered(fonts[best])
    return tuple(chosen)


@cache
def _covered(path: str) -> frozenset[str]:
    """Return the characters of a font file; none if it cannot be read, since matplotlib's list may be outdated."""
    from matplotlib.font_manager import get_font

    try:
        return frozenset(map(chr, get_font(path).get_charmap()))
    except (OSError, RuntimeError):
        return frozenset()
