"""The Python blocks of the pages of docs/ run, in order, as one script."""

import re
from pathlib import Path

import pytest
import torch

from raylt.methods import METHODS

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: Path) -> str:
    """Its Python blocks as one source whose lines have the numbers that they have in the page."""
    lines, inside, source = page.read_text().splitlines(), False, []
    for line in lines:
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        source.append(line if inside else "")
    return "\n".join(source)


@pytest.mark.parametrize("name", ["library.md"])
def test_the_blocks_of_a_page_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    exec(compile(blocks(DOCS / name), str(DOCS / name), "exec"), {"__name__": "docs"})
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    assert "did you mean rounds?" in out
    assert "stopped\ndone 8\n" in out
    assert {path.name for path in tmp_path.glob("runs/first/*.png")} == {"data.png", "clients.png"}


def test_blocks_keep_the_lines_of_their_page():
    page = DOCS / "library.md"
    number = next(i for i, line in enumerate(page.read_text().splitlines()) if line.startswith("import raylt"))
    assert blocks(page).splitlines()[number] == "import raylt"


@pytest.mark.parametrize("page", ["README.md", "docs/deployment.md", "docs/fair-ground.md", "docs/library.md",
                                  "docs/models-out.md", "docs/own-data.md", "docs/privacy.md", "docs/studies.md",
                                  "docs/write-a-method.md"])
def test_pages_name_commands_that_there_are(page):
    text = (DOCS.parent / page).read_text()
    known = {"run", "resume", "tune", "plot", "data", "methods", "settings", "recipes", "plan", "debug", "doctor",
             "check", "study", "compare", "report", "reproduce", "verdicts", "ls", "follow", "verify", "branch",
             "attack", "export", "predict", "evaluate", "page"}
    assert set(re.findall(r"\braylt ([a-z]+) (?=[\[A-Za-z-]*[A-Z./=\[])", text)) <= known


def test_readme_has_a_row_for_every_method_and_no_other():
    readme = (DOCS.parent / "README.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9]+)` \| ([^|]+) \|[^|]*\| (yes)? ?\| (yes)? ?\|$", readme, re.M)
    assert {name: (paper, personal == "yes", maps == "yes") for name, paper, personal, maps in rows} == {
        name: (method.paper, method.personal, "segmentation" in method.problems) for name, method in METHODS.items()
        if method.__module__.startswith("raylt.")}
