"""The command `raylt new example | study | method | cluster`: write files to start from."""

import shutil
from contextlib import suppress
from importlib.metadata import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer

from raylt.cli.options import out
from raylt.disk import file_errors, make
from raylt.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
TEMPLATES = PACKAGE / "templates"
PACKAGES = ("raylt", "actors", "tune")
# Files and next step of each kind.
FILES: dict[str, tuple[str, ...]] = {
    "example": ("eight_shops.py",),
    "study": ("my_study.yaml",),
    "method": ("my_method.py",),
    "cluster": ("cluster.yaml", "cluster-local.yaml"),
}
NEXT = {
    "example": "python eight_shops.py shops",
    "study": "raylt study my_study.yaml --dry-run",
    "method": "raylt check my_method.py",
    "cluster": "set the values marked SET; then ray up cluster.yaml, or ray up cluster-local.yaml",
}
PROJECT = """# raylt {version} for the nodes of a cluster, written by raylt new cluster
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "raylt"
version = "{version}"
requires-python = "{python}"
dependencies = [
{dependencies}
]

[project.scripts]
raylt = "raylt.__main__:main"

[tool.hatch.build.targets.wheel]
packages = ["raylt", "actors", "tune"]
"""


def new(
    kind: Annotated[
        Literal["example", "study", "method", "cluster"],
        typer.Argument(
            help="example: a script that draws images of eight shops; study, method: a template to edit; cluster: a "
            "folder for ray up, with raylt itself."
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="Folder for the files; by default this folder, or ./cluster for a cluster."
        ),
    ] = None,
) -> None:
    """Write files to start from: an example, a study, a method, or a cluster's configuration."""
    folder = folder or Path("cluster" if kind == "cluster" else ".")
    targets = {TEMPLATES / name: folder / name for name in FILES[kind]}
    texts: dict[Path, str] = {}
    if kind == "cluster":
        targets |= {PACKAGE.parent / name: folder / name for name in PACKAGES}
        texts = {folder / "pyproject.toml": _project(), folder / "README.md": "raylt for the nodes of a cluster\n"}
    _prepare(folder, [*targets.values(), *texts])
    try:
        _write(targets, texts)
    except BaseException:  # such as a full disk; the same command must be possible again
        _remove([*targets.values(), *texts])
        raise
    for target in (*targets.values(), *texts):
        out.print(target, soft_wrap=True)
    out.print(f"next, in {folder}: {NEXT[kind]}", soft_wrap=True)


def _prepare(folder: Path, targets: list[Path]) -> None:
    """Check that the files to write do not exist yet, and create the folder if it is missing.

    Raises:
        ConfigError: The folder cannot be created, or a file exists.
    """
    existing = next((target for target in targets if target.exists()), None)
    if existing is not None:
        raise ConfigError(
            f"new: the file exists already ({existing}). Give another folder.",
            code="file.exists",
            key="new",
            path=str(existing),
        )
    if folder.is_dir():
        return
    try:
        make(folder)
    except OSError as error:
        raise ConfigError(
            f"new: the folder cannot be created ({folder}: {error.strerror}). Give another folder.",
            code="file.unwritable",
            key="new",
            path=str(folder),
        ) from None


def _write(targets: dict[Path, Path], texts: dict[Path, str]) -> None:
    for source, target in targets.items():
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, ignore=ignored, copy_function=_copy)
        else:
            _copy(source, target)
    for target, text in texts.items():
        with file_errors(target):
            target.write_text(text)


def _copy(source: Path | str, target: Path | str) -> None:
    with file_errors(Path(target)):
        shutil.copyfile(source, target)


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _project() -> str:
    """Return the text of a pyproject.toml that depends on the installed raylt.

    An installed wheel does not contain this file.
    """
    installed = metadata("raylt")
    needed = [package for package in installed.get_all("Requires-Dist") or () if "extra ==" not in package]
    return PROJECT.format(
        version=installed["Version"],
        python=installed["Requires-Python"],
        dependencies="\n".join(f'    "{package}",' for package in needed),
    )
