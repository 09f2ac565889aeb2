"""The Python blocks of each page of docs/ run in order, as one script."""

import re
from pathlib import Path
from types import SimpleNamespace

import generate
import pytest
import torch
import typer

import raylt
from raylt.cli.main import app
from raylt.config import DEMO
from raylt.methods import METHODS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [
    DOCS.parent / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if not {"generated", "_build"} & set(page.parts)),
]
GENERATED = {f"generated/{name}" for name in generate.PAGES}


def blocks(page: Path) -> str:
    """Return a page's Python blocks as one source, with the line numbers of the page."""
    lines, inside, source = page.read_text().splitlines(), False, []
    for line in lines:
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        source.append(line if inside else "")
    return "\n".join(source)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["library.md"])
def test_the_blocks_of_a_page_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    exec(compile(blocks(DOCS / name), str(DOCS / name), "exec"), {"__name__": "docs"})
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    assert "Did you mean rounds?" in out
    assert "stopped\ndone 8\n" in out
    assert {path.name for path in tmp_path.glob("runs/first/*.png")} == {"data.png", "clients.png"}


@pytest.mark.slow
def test_the_blocks_of_the_page_on_notebooks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    scope: dict = {"__name__": "docs"}
    exec(compile(blocks(DOCS / "jupyter.md"), "jupyter.md", "exec"), scope)
    assert scope["longer"].state == "done"
    assert len(scope["accuracy"]) == 2
    assert scope["own"].config.model == "mlp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("write-a-model.md", "done\n"),
        ("write-a-source.md", "('rows', 'columns', 'falling', 'rising') {"),
        ("write-a-callback.md", "the run is done; figures are in few.jsonl\nstopped\n"),
    ],
)
def test_the_blocks_of_a_page_on_own_code_run(name, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(DOCS / name), str(DOCS / name), "exec"), {"__name__": "docs"})
    assert printed in capsys.readouterr().out


def test_a_callback_of_a_page_bears_steps_without_an_evaluation():
    """Between rounds nothing is evaluated for clients' own models."""
    (code,) = re.findall(r"^class Patience.*?(?=\n\S)", blocks(DOCS / "library.md"), re.M | re.S)
    scope = {"raylt": raylt}
    exec(code, scope)
    patience = scope["Patience"](2)
    for accuracy in (0.5, None, None, None, 0.5):
        patience.on_step(SimpleNamespace(accuracy=accuracy))
    with pytest.raises(KeyboardInterrupt):
        patience.on_step(SimpleNamespace(accuracy=0.4))


def test_blocks_keep_the_lines_of_their_page():
    page = DOCS / "library.md"
    number = next(i for i, line in enumerate(page.read_text().splitlines()) if line.startswith("import raylt"))
    assert blocks(page).splitlines()[number] == "import raylt"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_commands_that_there_are(page):
    parts = re.split(r"^```.*$", page.read_text(), flags=re.M)
    named = [name for part in parts[1::2] for name in re.findall(r"^raylt ([a-z]+)", part, re.M)]
    named += [name for part in parts[::2] for name in re.findall(r"`raylt ([a-z]+)", part)]
    assert set(named) <= set(typer.main.get_command(app).commands)


def test_index_names_every_page():
    """Sphinx also warns of a page that no table of contents names, but this test needs no Sphinx."""
    written = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES if path.is_relative_to(DOCS)}
    entries = contents("index") + [f"methods/{name}" for name in contents("methods/index")]
    assert sorted(entries) == sorted(written - {"index"} | GENERATED)


def contents(page: str) -> list[str]:
    """Return the pages that a page's tables of contents name."""
    tables = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)
    lines = [line for table in tables for line in table.splitlines() if line and not line.startswith(":")]
    return [re.sub(r".*<(.+)>", r"\1", line) for line in lines]


def test_every_method_of_raylt_has_a_page():
    ours = [name for name, method in METHODS.items() if method.__module__.startswith("raylt.")]
    assert sorted(contents("methods/index")) == sorted(ours)


def test_readme_names_every_method_and_no_other():
    readme = (DOCS.parent / "README.md").read_text()
    table = readme.partition("## Methods")[2].partition("## ")[0]
    named = re.findall(r"`([a-z0-9]+)`", table.partition("`raylt methods`")[0])
    assert sorted(named) == sorted(name for name, method in METHODS.items() if method.__module__.startswith("raylt."))


def test_first_page_counts_the_methods():
    counts = re.findall(r"(\d+)\s+methods", (DOCS / "index.md").read_text())
    assert counts == [str(sum(method.__module__.startswith("raylt.") for method in METHODS.values()))]


def test_readme_is_short():
    lines = (DOCS.parent / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120


def test_readme_gives_the_demonstration_from_python_too():
    sixty_seconds = (DOCS.parent / "README.md").read_text().partition("## Sixty seconds")[2].partition("\n## ")[0]
    assert re.findall(r'raylt\.run\("(.+?)"', sixty_seconds) == [f"recipe:{DEMO}"]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_to_headings_lead_to_one():
    broken = [
        f"{page.name}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text())
        if (linked := page.parent / target if target else page).suffix == ".md"
        and "generated" not in linked.parts
        and anchor not in headings(linked)
    ]
    assert broken == []


def test_links_between_pages_lead_somewhere():
    generated = {DOCS / "generated" / f"{name}.md" for name in generate.PAGES}
    broken = [
        f"{page.name}: {target}"
        for page in [*PAGES, DOCS.parent / "SECURITY.md"]
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (linked := page.parent / target).exists() and linked.resolve() not in generated
    ]
    assert broken == []
