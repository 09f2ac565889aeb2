"""The pages that docs/generate.py writes, and the site that contains them."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import generate
import narrow_tables
import pytest
import typer
from docutils import nodes
from docutils.utils import new_document
from latex2mathml.converter import convert

import raylt
from raylt.cli.main import app
from raylt.config import settings
from raylt.contract.checks import CHECKS
from raylt.contract.costs import relative_cost
from raylt.errors import CODES
from raylt.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
PARTS = DOCS / "generated" / "methods"
METHOD_PAGES = generate.method_pages()
OURS = [name for name, method in METHODS.items() if method.__module__.startswith("raylt.")]
# what a browser fetches when it opens a page, without the links that a reader may follow
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|embed)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*\bhref=["']?(?:https?:)?//[^>]*>"""
)
FETCHED_BY_STYLE = re.compile(r"""@import\s+["']?https?:|url\(["']?(?:https?:)?//[^)]*\)""")


def commands(command, path="raylt"):
    inner = getattr(command, "commands", None)
    return [path] if not inner else [name for key, each in inner.items() for name in commands(each, f"{path} {key}")]


def test_settings_page_has_a_row_with_every_setting():
    rows = re.findall(r"^\| `([\w.]+)` \|", generate.settings_page(), re.M)
    assert sorted(rows) == sorted(key for key, _ in settings())
    assert len(rows) > 40


def test_settings_page_has_each_section_once():
    titles = re.findall(r"^## (\w+)$", generate.settings_page(), re.M)
    assert sorted(titles) == sorted({key.rpartition(".")[0] or "run" for key, _ in settings()})


def test_settings_page_shows_defaults_as_yaml():
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .+? \| (`[^`]*`|) \| [^|]+ \|$", generate.settings_page(), re.M))
    assert rows["data.download"] == "`false`"
    assert rows["data.imbalance"] == "`null`"
    assert rows["data.source"] == "`digits`"
    assert "Undefined" not in str(rows)


def test_commands_page_has_a_section_with_every_command():
    titles = re.findall(r"^## (.+)$", generate.commands_page(), re.M)
    assert titles == commands(typer.main.get_command(app))
    assert {"raylt run", "raylt plot data"} <= set(titles)


def test_commands_page_has_arguments_by_their_metavar_and_options_by_their_names():
    section = generate.commands_page().partition("## raylt resume\n")[2].partition("\n## ")[0]
    assert "| `RUN` |" in section
    assert "| `--fleet` | `ray` |" in section


def test_contract_page_has_every_check_of_raylt_check():
    rules = re.findall(r"^\d+\. (.+)$", generate.contract_page(), re.M)
    assert len(rules) == len(CHECKS)
    assert all(rule.endswith(".") for rule in rules)


def test_error_codes_page_has_every_code():
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| (.+) \|$", generate.error_codes_page(), re.M))
    assert rows == CODES


def test_api_page_has_every_public_name_once():
    text = "\n".join(generate.api_parts().values())
    names = re.findall(r"^\.\. [\w:]+:: raylt\.(\w+)(?:\(.*\))?$", text, re.M)
    assert sorted(names) == sorted(set(raylt.__all__) - {"__version__"})


def test_api_page_has_each_field_of_a_model_with_its_meaning_in_place_of_a_signature():
    callbacks = generate.api_parts()["callbacks"].partition(".. autoclass:: raylt.RoundReport(**fields)\n")[2]
    pattern = r"^   \.\. py:attribute:: (\w+)\n      :type: (.+)\n(?:      :value: .+\n)?\n      (.+)$"
    fields = re.findall(pattern, callbacks, re.M)
    assert [name for name, _, _ in fields] == list(raylt.RoundReport.model_fields)
    assert ("seconds", "float", "seconds of training and aggregation, without evaluation") in fields
    assert ("timings", "dict[str, float]") in [field[:2] for field in fields]
    assert not [kind for _, kind, _ in fields if "Annotated" in kind]
    assert ".. py:attribute:: source\n      :type: str\n      :value: 'digits'\n" in generate.api_parts()["settings"]


def test_api_page_leads_to_a_page_with_each_group():
    page = generate.api_page()
    assert re.findall(r"^api/([\w-]+)$", page, re.M) == list(generate.api_parts())
    assert re.findall(r"\]\(api/([\w-]+)\.md\)", page) == list(generate.api_parts())


@pytest.mark.parametrize(
    "name",
    ["Augmentation", "Message", "Objective", "StateDict", "ProblemKind", "Tree", "each", "mean", "total"],
)
def test_api_page_describes_every_alias_and_value(name):
    assert generate._comment(name) != []


def test_page_of_an_earlier_build_is_kept_until_a_module_changes(tmp_path, monkeypatch):
    (tmp_path / "raylt").mkdir()
    module, page = tmp_path / "raylt" / "a.py", tmp_path / "methods.md"
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    module.touch()
    assert not generate._is_newer_than_code(page)
    page.write_text("measured")
    os.utime(module, (1, 1))
    assert generate._is_newer_than_code(page)
    os.utime(page, (0, 0))
    assert not generate._is_newer_than_code(page)


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_equations_of_a_method_page_are_drawn_as_mathml(page):
    text = page.read_text()
    equations = re.findall(r"\$\$(.+?)\$\$", text, re.S)
    equations += re.findall(r"(?<!\$)\$([^$]+)\$(?!\$)", text)
    assert len(equations) >= 3
    for equation in equations:
        drawn = convert(equation)
        assert drawn.startswith("<math")
        assert "\\" not in drawn, equation  # the converter leaves an unknown command as it is


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_method_page_has_every_field_and_departure_and_says_whether_it_was_run(page):
    method = METHODS[page.stem]
    part = generate.method_part(page.stem, "")
    assert all(f"| `{field}` |" in part for field in method.model_fields)
    notes = sys.modules[method.__module__].__doc__ or ""
    numbers = [int(number) for number in re.findall(r"^- \[(\d+)\]", part, re.M)]
    assert numbers == list(range(1, max(map(int, re.findall(r"^\[(\d+)\]", notes, re.M)), default=0) + 1))
    assert "Departure from the text" not in notes or numbers or "\n- " in part
    was_run = re.search(rf"^\| {page.stem}\b", part, re.M) is not None
    assert was_run != ("It was not run on the" in part)
    included = re.findall(rf"\{{include\}} \.\./generated/methods/{page.stem}\.md", page.read_text())
    assert len(included) == 2


def table_of(titles: list[str], *rows: list[str]) -> nodes.document:
    """Return a page with one table."""
    page = new_document("page")
    group = nodes.tgroup("", nodes.thead("", row_of(titles)), nodes.tbody("", *map(row_of, rows)), cols=len(titles))
    page += nodes.table("", group)
    return page


def row_of(cells: list[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", cell)) for cell in cells))


def test_cells_of_a_table_with_sentences_have_the_title_of_their_column():
    page = table_of(["claim", "p", "verdict"], ["SFD is above FedAvg on accuracy", "", "holds"])
    narrow_tables.mark_tables(None, page, "page")
    (table,) = page.findall(nodes.table)
    assert table["classes"] == ["stacked"]
    assert [cell.get("title") for cell in page.findall(nodes.entry)] == [None] * 3 + ["claim", None, "verdict"]


@pytest.mark.parametrize(
    ("titles", "row"),
    [(["arm", "few, %", "many, %"], ["sfd", "91.9 ± 2.2", "88.3 ± 0.3"]), (["key", "meaning"], ["seed", 40 * "a"])],
)
def test_tables_of_figures_or_of_two_columns_keep_their_columns(titles, row):
    page = table_of(titles, row)
    narrow_tables.mark_tables(None, page, "page")
    assert [table["classes"] for table in page.findall(nodes.table)] == [[]]


def test_fonts_of_the_style_are_there_with_their_licence():
    files = re.findall(r"url\(\"([\w.-]+)\"\)", (DOCS / "site.css").read_text())
    assert files
    for file in files:
        assert (DOCS / "fonts" / file).read_bytes()[:4] == b"wOF2"
        assert "SIL OPEN FONT LICENSE" in (DOCS / "fonts" / f"{Path(file).stem}-OFL.txt").read_text()


def test_what_a_client_sends_is_that_of_the_page_on_privacy():
    assert "count, sums of z and z zᵀ." in " ".join(generate.uploads("ccvr"))
    assert "federation.secure=true" in " ".join(generate.uploads("ccvr"))
    assert "In addition, with `prior=global`: once: counts." in generate.uploads("la")
    assert "federation.secure" not in " ".join(generate.uploads("mupfl"))
    assert "entries of its model" not in " ".join(generate.uploads("fedproto"))
    assert len(generate.uploads("fedavg")) == 1


def test_codes_of_replies_say_what_happens_and_what_to_do():
    section = generate.error_codes_page().partition("## reply\n")[2].partition("| code |")[0]
    assert "federation.quorum" in section
    assert "raylt debug" in section


def test_placeholders_of_help_texts_are_no_elements_of_html():
    assert generate._escaped("<class>/<image>, `<client>`, 3 < 4") == "&lt;class>/&lt;image>, `<client>`, 3 < 4"
    assert not re.search(r"<\w", re.sub(r"`[^`]*`", "", generate.commands_page()))


def test_asterisks_of_help_texts_are_no_emphasis():
    assert generate._escaped("resources.*, `a * b`, output.*") == r"resources.\*, `a * b`, output.\*"
    assert not re.search(r"(?<!\\)\*", re.sub(r"`[^`]*`", "", generate.commands_page()))


def test_a_single_departure_needs_no_number():
    assert generate.departures("M.\n\nDeparture from the text: the solver\nis SGD.\n\nmu = 0 is FedAvg.") == [
        "- The solver is SGD."
    ]
    assert generate.departures("M.\n\n[1] First\n    line.\n[2] Second.") == ["- [1] First line.", "- [2] Second."]


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_method_page_names_tests_that_there_are(page):
    named = re.findall(r"`(tests/[\w/.]+)`", page.read_text())
    assert named
    assert all((DOCS.parent / file).exists() for file in named)


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script async="async" src="https://cdn.example/mathjax.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/css">', True),
        ('<link href="https://fonts.example" rel="preconnect">', True),
        ('<img src="http://badge.example/a.svg">', True),
        ('<a href="https://arxiv.org/abs/1602.05629">paper</a><script src="_static/a.js"></script>', False),
        ('<link rel="next" href="https://x.example/">', False),
    ],
)
def test_what_a_page_fetches_from_elsewhere_is_found(html, found):
    assert bool(FETCHED.search(html)) == found


def test_methods_are_measured_where_the_code_is_newer_than_the_page(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(generate, "PAGES", {"methods": lambda: measured.append("once more") or "# Methods\n"})
    monkeypatch.setattr(generate, "write_method_parts", lambda folder: None)
    for _ in range(2):
        generate.write_pages(tmp_path)
        assert len(measured) == 1
    os.utime(tmp_path / "methods.md", (0, 0))
    generate.write_pages(tmp_path)
    assert len(measured) == 2
    assert (tmp_path / "methods.md").read_text() == "# Methods\n"


@pytest.fixture(scope="module")
def measured_page():
    """Return the page of methods, with costs measured in four rounds; the page's own 30 rounds take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raylt.cli.method_page.relative_cost", partial(relative_cost, rounds=4))
        return generate.methods_page()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_methods_page_has_the_measured_uploads_of_every_method(measured_page):
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(#\w+\) \| (.+) \| (.+) \| (.+) \| (.+) \| (.+) \| (.*) \|$", measured_page, re.M
    )
    assert sorted(name for name, *_ in rows) == sorted(OURS)
    assert all(re.fullmatch(r"[\d.]+\s(B|KiB|MiB)", up) for _, _, up, *_ in rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_site_builds_without_warnings_and_fetches_nothing_from_elsewhere(tmp_path, measured_page):
    source, site = tmp_path / "docs", tmp_path / "site"
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("_build", "generated"))
    (source / "generated").mkdir()
    (source / "generated" / "methods.md").write_text(measured_page)  # a page newer than the code is not made again
    # pages link to files of the repository, and generate.py reads the recorded studies
    for name in ("raylt", "studies", "examples", "SECURITY.md", "README.md", "pyproject.toml"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", source, site], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(site).as_posix(): page.read_text() for page in site.rglob("*.html")}
    written = {file.relative_to(DOCS) for file in DOCS.rglob("*.md") if PARTS not in file.parents}
    assert {file.with_suffix(".html").as_posix() for file in written} <= pages.keys()
    assert {name: found for name, text in pages.items() if (found := FETCHED.findall(text))} == {}
    assert (site / "_static" / "STIXTwoMath.woff2").is_file()
    styles = [file for file in site.rglob("*.css") if FETCHED_BY_STYLE.search(file.read_text())]
    assert styles == []
    assert "needs --fleet ray" in pages["generated/cli.html"]  # not an en dash
    for name in OURS:
        assert f'id="{name}"' in pages["generated/methods.html"]
    for page in METHOD_PAGES:
        html = pages[f"methods/{page.stem}.html"]
        assert html.count("<math") >= 3
        assert "merror" not in html
        assert page.stem in generate.WITHOUT_PAPER or "Departures from the paper" in html
