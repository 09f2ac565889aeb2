"""What the pictures have in common."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from raylt import store
from raylt.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# told apart by everyone, also in grey: Petroff's ten, a little changed
COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#2e8b57", "#832db6", "#a96b59", "#f781bf", "#b9ac3a", "#1a1a40", "#5fd3d8")
ACCENT, INK, GRID = "#bd1f01", "#555555", "#e3e3e3"


def new_figure(width: float, height: float, dpi: int = 150) -> "Figure":
    """An empty figure of so many inches, without pyplot: no global state, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: "Figure", path: Path) -> Path:
    """Writes a picture; its kind is that of the path's ending.

    Raises:
        ConfigError: the file cannot be written, or nobody knows this kind of picture.
    """
    content = io.BytesIO()
    try:
        figure.savefig(content, format=path.suffix.removeprefix(".") or "png")
        store.write(path, content.getvalue())
    except CheckpointError as error:
        raise ConfigError(f"--picture {path}: {str(error).rpartition(': ')[2]}; give a .png that can be written"
                          ) from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--picture {path}: {reason}; give a .png that can be written") from None
    return path


def plain_text(text: str) -> str:
    """A name as it is: matplotlib would take what stands between dollars for a formula."""
    return text.replace("$", r"\$")


def plain(ax: "Axes", lines: str = "y") -> None:
    """Axes without a box, with faint lines across one or both directions."""
    ax.grid(axis="both" if lines == "both" else "y" if lines == "y" else "x", color=GRID, zorder=0)
    ax.spines[["top", "right"]].set_visible(False)
