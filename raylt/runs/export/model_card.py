"""The model card of an exported file, which describes the model, its origin, its figures and its use."""

import re
import shlex

from raylt.data.task import JudgedImages
from raylt.errors import count_of
from raylt.formatting import percent, with_images
from raylt.metrics import LOCAL
from raylt.runs.export.artefact import ModelDescription

FIGURES = {
    "accuracy": "accuracy on the test set",
    "global_accuracy": "accuracy of the global model",
    "macro": "mean of the class accuracies",
    "miou": "mean intersection over union",
    "clients_local": "mean over clients, their own test images",
    "clients_owned": "mean over clients, classes that they own",
    "clients_matched": "mean over clients, own class mix",
    "clients_long_tailed": "mean over clients, class mix of all clients together",
    "clients_global": "mean over clients, all classes",
    "clients_miou": "mean IoU over clients, classes that they own",
}
MAX_NAMES = 50  # number of clients or classes to list


def model_card(description: ModelDescription, file: str) -> str:
    """Return the model card of an exported file in Markdown.

    Args:
        description: Description of the models.
        file: Name of the exported file.
    """
    sections = [
        _title(description, file),
        _use(description, file),
        _input(description),
        ["## Classes", "", _names(description["class_names"]), ""],
        _figures(description),
        _clients(description),
        _privacy(description),
        _origin(description),
    ]
    return "\n".join(line for section in sections for line in section) + "\n"


def _title(description: ModelDescription, file: str) -> list[str]:
    stage = [f"Not the run's last model: it is from {description['stage']}.", ""] if "stage" in description else []
    target = {"classification": "class of an image", "segmentation": "class of each pixel"}[description["task"]]
    return [
        f"# {_cell(file)}",
        "",
        f"The {target}, one of {len(description['class_names'])}. Network {_code(description['model'])}, trained "
        f"with {_code(description['method']['name'])} in {count_of(description['rounds'], 'round')} on "
        f"{_code(description['source'])} by raylt.",
        "",
        *stage,
    ]


def _use(description: ModelDescription, file: str) -> list[str]:
    image = description["input"]
    clients = description["clients"] or []
    several = len(clients) > 1
    # quoted, so that the line can safely be pasted into a shell
    argument = f", client={clients[0]['name']!r}" if several else ""
    option = f" --client {shlex.quote(clients[0]['name'])}" if several else ""
    return [
        "## Use",
        "",
        "```",
        f"raylt predict {shlex.quote(file)} IMAGE ...{option}",
        "```",
        "",
        "```python",
        "import raylt",
        f"model = raylt.load_model({file!r}{argument})",
        f"model.predict(images)     # uint8 [n, {image['height']}, {image['width']}, {image['channels']}]",
        "```",
        "",
    ]


def _input(description: ModelDescription) -> list[str]:
    image = description["input"]
    prepares = description.get("side") or description.get("tower")
    again = " The network then resizes and normalises them as in its training." if prepares else ""
    return [
        "## Input",
        "",
        f"Images of {image['height']}x{image['width']} pixels with {image['channels']} channel"
        f"{'s' if image['channels'] > 1 else ''}. Per channel, of pixels in [0, 1], the mean {_row(image['mean'])} is "
        f"subtracted and the result divided by the deviation {_row(image['std'])}.{again}",
        "",
    ]


def _figures(description: ModelDescription) -> list[str]:
    figures = {name: value for name, value in description["figures"].items() if value is not None}
    rows = [f"| {FIGURES.get(name, name.replace('_', ' '))} | {percent(value)} |" for name, value in figures.items()]
    return ["## Figures", "", "| figure | |", "|---|---|", *rows, "", *_basis(description.get("tests"))]


def _basis(tests: JudgedImages | None) -> list[str]:
    """Return sentences on the numbers of test images behind the figures."""
    if tests is None:
        return []
    low, high = tests["thresholds"]
    groups = ", ".join(f"{group} {n}" for group, n in tests["groups"].items())
    sentences = [
        f"n = {tests['images']} test images. Of classes with more than {high} training samples (many), {low} to {high} "
        f"(medium) and fewer than {low} (few): {groups}."
    ]
    if tests["one_class"]:
        names = _names(tests["one_class"])
        sentences.append(f"These clients' test images are all of one class, so their figures say nothing: {names}.")
    return [" ".join(sentences), ""]


def _clients(description: ModelDescription) -> list[str]:
    clients = description["clients"]
    if not clients:
        return []
    kinds = [kind for kind in ("local", "owned", "matched", "global") if kind in clients[0]["figures"]]
    heads = [f"{kind}, n" if kind == LOCAL else kind for kind in kinds]
    lines = ["## Clients", "", f"| client | {' | '.join(heads)} |", "|---" * (1 + len(kinds)) + "|"]
    for entry in clients[:MAX_NAMES]:
        tested = {LOCAL: entry.get("tested")}
        cells = [with_images(entry["figures"][kind], tested.get(kind), description["task"]) for kind in kinds]
        lines.append(f"| {_cell(entry['name'])} | {' | '.join(cells)} |")
    if len(clients) > MAX_NAMES:
        lines += ["", f"and {len(clients) - MAX_NAMES} more"]  # the empty line ends the table
    return [*lines, ""]


def _privacy(description: ModelDescription) -> list[str]:
    guarantee = description.get("privacy")
    if guarantee is None:
        return []
    return [
        "## Privacy",
        "",
        "| differential privacy | |",
        "|---|---|",
        f"| epsilon, delta | {guarantee['epsilon']:g}, {guarantee['delta']:g} for {_cell(guarantee['unit'])} |",
        f"| against | {_cell(guarantee['against'])} |",
        f"| noise | standard deviation {guarantee['sigma']:g} for sensitivity 1, lengths up to {guarantee['clip']:g} |",
        f"| covered | {_cell(guarantee['covers'])} |",
        f"| not covered | {_cell(guarantee['not_covered'])} |",
        "",
    ]


def _origin(description: ModelDescription) -> list[str]:
    method = description["method"]
    fields = ", ".join(f"{name} = {_cell(str(value))}" for name, value in method.items() if name != "name")
    versions = [f"| {_cell(name)} | {_cell(version)} |" for name, version in description["versions"].items()]
    plugins = [
        f"| {plugin['kind']} {_cell(plugin['name'])} | {_cell(plugin['origin'])}, `{plugin['sha256']}` |"
        for plugin in description["guests"]
    ]
    return [
        "## Origin",
        "",
        "| | |",
        "|---|---|",
        f"| method | {_cell(method['name'])}{f': {fields}' if fields else ''} |",
        f"| run | `{description['run']}` |",
        f"| split | `{description['split_sha256']}` |",
        *versions,
        *plugins,
        "",
        "Probabilities come from a softmax and are not calibrated. Figures are for test images similar to the training "
        "images; `raylt evaluate` computes them for other images.",
    ]


def _names(names: list[str]) -> str:
    shown = ", ".join(_cell(name) for name in names[:MAX_NAMES])
    return shown + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def _cell(name: str) -> str:
    """Return a name with Markdown's special characters escaped, for a table cell."""
    return "".join(f"\\{letter}" if letter in "\\|`*_<>[]#" else letter for letter in name)


def _code(text: str) -> str:
    """Return a text as inline code in Markdown, even if it contains backticks."""
    ticks = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if ticks != "`" else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _row(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:.4f}" for value in values) + ")"
