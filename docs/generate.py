"""Write the pages of the reference that follow from the code: methods, settings, commands, error codes, API, verdicts.

python docs/generate.py [FOLDER]
"""

import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import stringify_annotation

ROOT = Path(__file__).resolve().parents[1]
GROUND_COLUMNS = ("arm", "accuracy", "many", "medium", "few", "matched", "worst_decile")  # as wide as a page
TIED = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"  # conf.py does this for pages, but not for what they include
WITHOUT_MODEL = (
    "local",
    "fedproto",
    "fedic",
    "mupfl",
    "fednova",
    "qfedavg",
)  # methods of which no mean of models is taken
WITHOUT_PAPER = ("local", "noisymeans", "oracle")  # baselines and controls of raylt


def write_pages(folder: Path) -> None:
    """Write every generated page into a folder, replacing those of an earlier build."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in PAGES.items():
        file = folder / f"{name}.md"
        if name == "methods" and _is_newer_than_code(file):
            continue  # measuring every method takes minutes
        text = write()
        if name == "methods" or not file.is_file() or file.read_text() != text:  # Sphinx reads newer files again
            file.write_text(text)
    write_method_parts(folder)
    (folder / "api").mkdir(exist_ok=True)
    for name, text in api_parts().items():
        file = folder / "api" / f"{name}.md"
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)


def write_method_parts(folder: Path) -> None:
    """Write the generated parts of the pages docs/methods/NAME.md, which include them."""
    measured = (folder / "methods.md").read_text()
    (folder / "methods").mkdir(exist_ok=True)
    for page in method_pages():
        text = method_part(page.stem, measured)
        file = folder / "methods" / page.name
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)


def method_pages() -> list[Path]:
    """Return the written pages of single methods, docs/methods/NAME.md."""
    return sorted(page for page in (ROOT / "docs" / "methods").glob("*.md") if page.stem != "index")


def method_part(name: str, measured: str) -> str:
    """Return the row on the common benchmark, the fields, departures and uploads of a method.

    Args:
        name: Name of the method.
        measured: Page of all methods, which has the measured uploads.
    """
    import raylt.methods
    from raylt.hyper import range_of

    method = raylt.methods.METHODS[name]
    notes = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    section = measured.partition(f"\n### {name}\n")[2].partition("\n##")[0]
    fields = [
        f"| `{field}` | {info.default} | {range_of(info)} | {_escaped(info.description or '').replace('|', '/')} |"
        for field, info in method.model_fields.items()
    ]
    if name in WITHOUT_PAPER:
        decided = ["## Decisions", "", *departures(notes), ""] if departures(notes) else []
    else:
        decided = ["## Departures from the paper", "", *(departures(notes) or ["None that changes results."]), ""]
    return "\n".join(
        [
            "<!-- ground -->",
            *ground_rows(name),
            "<!-- end of ground -->",
            "<!-- rest -->",
            "",
            "## Fields",
            "",
            *(["| field | default | search range | meaning and source |", "|---|---|---|---|"] if fields else []),
            *(fields or ["The method has no fields of its own."]),
            "",
            *decided,
            "## What leaves a client",
            "",
            *uploads(name),
            "",
            "Bytes of one client's replies and messages, measured with resnet8 and ten classes:",
            "",
            *re.findall(r"^- .+$", section.partition("A client sends:")[2], re.M),
            "",
        ]
    )


def uploads(name: str) -> list[str]:
    """Return what a client of a method sends; beyond its model, as the table of docs/privacy.md has it."""
    table = (ROOT / "docs" / "privacy.md").read_text().partition("| method | uploads |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    model = "" if name in WITHOUT_MODEL else "the shared entries of its model, and "
    lines = [f"A client sends {model}figures such as the loss. [Privacy](../privacy.md) compares the methods' uploads."]
    for methods, content, reduction, _ in rows:
        if f"`{name}`" in methods:
            condition = methods.partition(f"`{name}` with ")[2]
            lines += ["", f"In addition{', with ' + condition if condition else ''}: {content}."]
            if reduction != "each":
                lines.append("With `federation.secure=true` the server sees only its sum over clients.")
    return lines


def departures(notes: str) -> list[str]:
    """Return the departures in a module's docstring as items of a list; a single one has no number there."""
    items = re.findall(r"^\[(\d+)\] (.+(?:\n    .+)*)", notes, re.M)
    single = re.findall(r"Departure from the text: (.+(?:\n.+)*)", notes)
    return [f"- [{number}] {' '.join(text.split())}" for number, text in items] or [
        f"- {text[0].upper()}{' '.join(text[1:].split())}" for text in single
    ]


def ground_rows(name: str) -> list[str]:
    """Return the rows of a method in the tables of docs/results/ground.md, tuned and untuned, with their heads."""
    page = (ROOT / "docs" / "results" / "ground.md").read_text()
    tuned, _, plain = page.partition("## With default fields")
    parts = [
        *_ground_table(name, "tuned with the budget of all methods", tuned.partition("\n## Clients' own models")[0]),
        *_ground_table(name, "with its defaults", plain),
    ]
    return parts or ["It was not run on the [common benchmark](../results/ground.md)."]


def _ground_table(name: str, how: str, text: str) -> list[str]:
    """Return a method's rows in the first table of a part of docs/results/ground.md, or nothing if it has none."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    head = next(row for row in cells if row[0] == "arm")
    rows = [row for row in cells if row[0].split()[:1] == [name] and len(row) == len(head)]
    if not rows:
        return []
    shown = [index for index, title in enumerate(head) if title.split(",")[0] in GROUND_COLUMNS]
    return [
        f"On the common benchmark, {how}, {rows[0][head.index('seeds')]} seeds ([all methods](../results/ground.md)):",
        "",
        *(f"| {' | '.join(row[index] for index in shown)} |" for row in (head, ["---"] * len(head))),
        *(f"| {' | '.join(row[index].replace(' ± ', TIED) for index in shown)} |" for row in rows),
        "",
    ]


def methods_page() -> str:
    """Return the page that `raylt methods --page` writes."""
    import tempfile

    from raylt.cli.main import app

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "methods.md"
        app(["methods", "--page", str(page)], standalone_mode=False)
        return with_links(re.sub(r"(\d) (B|KiB|MiB)\b", "\\1\N{NO-BREAK SPACE}\\2", page.read_text()))


def with_links(page: str) -> str:
    """Return the page of all methods with a link from each section to the method's own page."""
    for name in (each.stem for each in method_pages()):
        link = f"[Equations, fields and departures](../methods/{name}.md)"
        page = page.replace(f"\n### {name}\n", f"\n### {name}\n\n{link}\n", 1)
    return page


def _is_newer_than_code(page: Path) -> bool:
    """Return whether a page was written after the last change of a module of raylt."""
    newest = max(file.stat().st_mtime for file in (ROOT / "raylt").rglob("*.py"))
    return page.is_file() and page.stat().st_mtime > newest


def reproducibility_page() -> str:
    """Return the page of verdicts over all recorded studies."""
    from raylt import Study
    from raylt.studies.papers.verdict_page import page
    from raylt.studies.papers.verdicts import verdicts

    files = sorted((ROOT / "studies" / "results").glob("*.json"))
    records = [record for file in files for record in Study.open(file).records]
    return page(verdicts(records, mix_versions=True))


def settings_page() -> str:
    """Return a table of every setting, a section each."""
    from raylt.config import UNLISTED, allowed, settings

    sections: dict[str, list[str]] = {}
    for key, field in settings():
        cells = [f"`{key}`", _escaped(field.description or ""), _default(field), _escaped(allowed(field))]
        row = "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
        sections.setdefault(key.rpartition(".")[0] or "run", []).append(row)
    head = f"`raylt settings` prints the same. Each is given as `key=value` or in a YAML file. {UNLISTED}"
    lines = ["# Settings", "", head, ""]
    for section, rows in sections.items():
        lines += [f"## {section}", "", "| setting | meaning | default | allowed |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _default(field: Any) -> str:
    """Return a setting's default as YAML has it; nothing where there is none."""
    if field.is_required():
        return ""
    return f"`{field.default if isinstance(field.default, str) else json.dumps(field.default, default=str)}`"


def commands_page() -> str:
    """Return every command with its arguments and options."""
    import typer

    from raylt.cli.main import app

    root: Any = typer.main.get_command(app)
    lines = ["# Options of every command", "", "`raylt COMMAND --help` prints the same.", ""]
    for path, command in _commands(root, "raylt"):
        lines += [f"## {path}", "", _escaped(inspect.cleandoc(command.help or "").split("\f")[0]), ""]
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["| argument or option | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return a plain text as Markdown that shows it literally.

    Outside of code `<name>` is no element of HTML and an asterisk no emphasis.
    """
    parts = text.split("`")
    parts[::2] = [re.sub(r"<(?=\w)", "&lt;", part).replace("*", r"\*") for part in parts[::2]]
    return "`".join(parts)


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield path, command
        return
    for name, each in inner.items():
        yield from _commands(each, f"{path} {name}")


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    named = ", ".join(parameter.opts) if is_option else parameter.metavar or parameter.name.upper()
    default = "" if parameter.default is None or callable(parameter.default) else f"`{parameter.default}`"
    meaning = _escaped(" ".join((getattr(parameter, "help", None) or "").split()))
    return "| " + " | ".join(text.replace("|", "\\|") for text in (f"`{named}`", default, meaning)) + " |"


def contract_page() -> str:
    """Return every check of the contract of methods, in the order in which they run."""
    from raylt.contract.checks import CHECKS

    rules = [" ".join((check.__doc__ or "").split()) for check in CHECKS]
    lines = [
        "# The contract of a method",
        "",
        "Every method of raylt keeps these rules, and the tests check all of them. `raylt check my_method.py` checks",
        "a method of your own. It stops at the first rule that the method breaks, and shows the innermost line of your",
        "file. [Write a method](../write-a-method.md) says how to keep them.",
        "",
        "The checks run two rounds on a tiny task. Among its clients one has a single class and one a single sample.",
        "",
        *(f"{number}. {rule}" for number, rule in enumerate(rules, 1)),
        "",
        "A method for label maps is checked on a task with label maps, too.",
        "",
    ]
    return "\n".join(lines)


CONSEQUENCES = {
    "reply": "A reply that cannot be used is rejected. The round continues with the others, and its line in "
    "`metrics.jsonl` has the client and the reason under `rejected`. `raylt debug RUN --round R --client ID` repeats "
    "the client's call in one process. If too few replies remain for `federation.quorum`, the run ends with "
    "`reply.too-few`, whose message has the first failure. Mend that, then continue with `raylt resume RUN`. Values "
    "that are not finite or out of range mostly come from training that diverged: lower `local.lr`. Names, shapes, "
    "weights and late writes are mistakes in a method's code: `raylt check FILE` finds them.",
}  # by subject of the codes: what happens, and what to do


def error_codes_page() -> str:
    """Return every error code with its meaning."""
    from raylt.errors import CODES

    lines = ["# Error codes", "", "Every error that raylt raises on purpose carries a `code`.", ""]
    for subject, codes in groupby(sorted(CODES), key=lambda code: code.partition(".")[0]):
        lines += [f"## {subject}", "", *([CONSEQUENCES[subject], ""] if subject in CONSEQUENCES else [])]
        lines += ["| code | meaning |", "|---|---|"]
        lines += [*(f"| `{code}` | {CODES[code]} |" for code in codes), ""]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """Return the page with every public name, in the groups of `raylt.__all__`, each with a page of its own."""
    import raylt

    lines = ["# Python API", "", "Every public name is imported from `raylt`.", "", "| page | names |", "|---|---|"]
    groups = dict(_groups(Path(raylt.__file__ or "").read_text()))
    for title, names in groups.items():
        lines.append(f"| [{title}](api/{_file_of(title)}.md) | {' '.join(f'`{name}`' for name in names)} |")
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", *(f"api/{_file_of(each)}" for each in groups), "```", ""])


def api_parts() -> dict[str, str]:
    """Return a page for each group of public names, which autodoc fills, by the name of its file."""
    import raylt

    pages = {}
    for title, names in _groups(Path(raylt.__file__ or "").read_text()):
        lines = [f"# {title}", ""]
        for name in names:
            lines += ["```{eval-rst}", *_directive(name, getattr(raylt, name)), "```", ""]
        pages[_file_of(title)] = "\n".join(lines)
    return pages


def _file_of(title: str) -> str:
    return title.lower().replace(" ", "-")


def _groups(source: str) -> Iterator[tuple[str, list[str]]]:
    """The groups of `__all__`: a comment names each."""
    inside = source.partition("__all__ = [")[2].partition("\n]")[0]
    title, names = "Names", []
    for line in inside.splitlines():
        text = line.strip()
        if text.startswith("#"):
            if names:
                yield title, names
            title, names = text.lstrip("# ").capitalize(), []
        else:
            names += [part.strip("\"', ") for part in text.split(",") if part.strip() and not part.startswith('"__')]
    names = [name for name in names if not name.startswith("__")]
    if names:
        yield title, names


def _directive(name: str, value: Any) -> list[str]:
    """Return the lines of reStructuredText that document one public name."""
    if inspect.ismodule(value):
        return [f".. automodule:: {value.__name__}"]
    if inspect.isclass(value) and issubclass(value, BaseModel) and value.model_fields:
        return [f".. autoclass:: raylt.{name}(**fields)", *_field_directives(value)]
    if inspect.isclass(value) and not isinstance(value, types.GenericAlias):
        return [f".. autoclass:: raylt.{name}"]
    if inspect.isroutine(value):
        return [f".. autofunction:: raylt.{name}"]
    # autodoc would show the docstring of `dict` for an alias such as dict[str, Tensor]
    is_alias = not type(value).__module__.startswith("raylt.")
    shown = f"   :value: {_alias(value)}" if is_alias else f"   :type: {type(value).__name__}"
    return [f".. py:data:: raylt.{name}", shown, "", *(f"   {line}" for line in _comment(name))]


def _field_directives(model: type[BaseModel]) -> list[str]:
    """Return the lines of reStructuredText that document a model's fields: name, type, default and meaning."""
    from raylt.core.report import Figure

    lines = []
    for name, hint in get_type_hints(model).items():
        if name in model.model_fields:
            field = model.model_fields[name]
            figures = [each.title for each in field.metadata if isinstance(each, Figure)]
            lines += ["", f"   .. py:attribute:: {name}", f"      :type: {_alias(hint)}"]
            if not (field.is_required() or isinstance(field.default, BaseModel)):
                lines.append(f"      :value: {field.default!r}")
            lines.append("")
            lines += [f"      {text}" for text in [*figures, field.description] if text]
    return lines


def _comment(name: str) -> list[str]:
    """Return the `#:` comment or the string that documents a public value where its module assigns it."""
    import raylt

    module, attribute = raylt._EXPORTS[name]
    return ModuleAnalyzer.for_module(module).find_attr_docs().get(("", attribute), [])


def _alias(value: Any) -> str:
    """Return a type or an alias of one as Python writes it, without the modules of its names."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", stringify_annotation(value))


PAGES = {
    "methods": methods_page,
    "settings": settings_page,
    "cli": commands_page,
    "contract": contract_page,
    "error-codes": error_codes_page,
    "api": api_page,
    "reproducibility": reproducibility_page,
}

if __name__ == "__main__":
    write_pages(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "generated")
