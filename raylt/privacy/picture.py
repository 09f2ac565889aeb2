"""Plot of an attack: true images, reconstructions and their nearest training images."""

from pathlib import Path

from raylt.plots.style import INK, new_figure, save
from raylt.privacy.reconstruction import AttackFinding


def draw(finding: AttackFinding, path: Path) -> Path:
    """Write the image grid of one finding to a file and return its path.

    Raises:
        ConfigError: The picture cannot be written.
    """
    assert finding.shown is not None, "guesses have no picture"
    rows, columns = finding.shown.shape[:2]
    figure = new_figure(0.8 * columns + 1.2, 0.8 * rows + 0.3)
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, name in enumerate(("true", "made", "nearest\ntraining\nimage")):
        for column in range(columns):
            ax = axes[row][column]
            image = finding.shown[row, column].movedim(0, 2).numpy()
            ax.imshow(image.squeeze(2) if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=1)
            ax.set(xticks=[], yticks=[])
        axes[row][0].set_ylabel(name, rotation=0, ha="right", va="center", color=INK, fontsize=7)
    figure.suptitle(finding.what, fontsize=7, color=INK)
    return save(figure, path)
