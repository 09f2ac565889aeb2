"""Figures, colours and file formats that all plots share."""

import io
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raylt import store
from raylt.disk import as_path, is_folder
from raylt.errors import CheckpointError, ConfigError, spoken
from raylt.plots.fonts import add_fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Petroff's ten colours, slightly changed; distinguishable in greyscale and by colour-blind readers.
COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#2e8b57", "#832db6", "#a96b59", "#f781bf", "#b9ac3a", "#1a1a40", "#5fd3d8")
# Dashes that distinguish lines in greyscale.
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (7, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MAX_NAME_LENGTH = 28  # characters of a name on an axis
ACCENT, INK, GRID = "#bd1f01", "#555555", "#e3e3e3"


@cache
def _figure_class() -> "type[Figure]":
    """Return a matplotlib figure class that notebooks can display.

    Matplotlib is imported only when this function is called.
    """
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A figure that notebooks display without pyplot and its list of open figures."""

        def _repr_png_(self) -> bytes:
            return _content(self, "png")

    return NotebookFigure


def new_figure(width: float, height: float, dpi: int = 150) -> "Figure":
    """Return an empty figure of the given size in inches.

    It is created without pyplot, so it needs no display and leaves no global state.

    Args:
        width: Width in inches.
        height: Height in inches.
        dpi: Resolution of bitmap formats, in dots per inch.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _figure_class()(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: "Figure", path: Path | str) -> Path:
    """Write a figure in the format of the path's suffix, and return the path.

    Raises:
        ConfigError: The file cannot be written, or the format is unknown.
    """
    path = as_path(path, "path")
    try:
        store.write(path, _content(figure, path.suffix.removeprefix(".").lower() or "png"))
    except (CheckpointError, ValueError) as error:
        raise ConfigError(
            f"{spoken('--picture', 'path')}: {path} cannot be written ({_reason(error, path)}). Give a .png, .pdf or "
            ".svg in a folder that can be written to.",
            code="file.unwritable",
            key="--picture",
            path=str(path),
        ) from None
    return path


def _reason(error: Exception, path: Path) -> str:
    """Return the reason why a picture cannot be written, without the path and the remedy of the original error."""
    cause = error.__context__
    if is_folder(path):
        return "it is a folder"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return "it is not a plain file" if isinstance(error, CheckpointError) else " ".join(str(error).split()).rstrip(".")


def save_if_asked(figure: "Figure", path: Path | str | None) -> "Figure":
    """Write a figure to `path` if a path is given, and return the figure."""
    if path is not None:
        save(figure, path)
    return figure


def _content(figure: "Figure", format: str) -> bytes:
    """Return a figure as the bytes of an image file, without a date, so that equal figures give equal files."""
    import matplotlib

    add_fonts(figure)
    dates = {"pdf": "CreationDate", "svg": "Date"}
    metadata = {dates[format]: None} if format in dates else {}
    content = io.BytesIO()
    # 42 is TrueType, because journals reject matplotlib's default Type 3 fonts
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "raylt"}), warnings.catch_warnings():
        # `add_fonts` warns about all missing characters at once
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(content, format=format, metadata=metadata)
    return content.getvalue()


def plain_text(text: str) -> str:
    """Return a name with dollar signs escaped, because matplotlib would read text between them as a formula."""
    return text.replace("$", r"\$")


def tick_name(name: str) -> str:
    """Return a name for an axis. The middle of a long name is left out, so that it fits."""
    if len(name) > MAX_NAME_LENGTH:
        name = f"{name[: MAX_NAME_LENGTH // 2]}…{name[1 - MAX_NAME_LENGTH // 2 :]}"
    return plain_text(name)


def style_axes(ax: "Axes", lines: Literal["x", "y", "both"] = "y") -> None:
    """Remove the box around the axes and draw faint grid lines in one or both directions."""
    ax.grid(axis=lines, color=GRID, zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
