"""The model card of an exported file: what it is, how it was made, how well it does, how to use it."""

from raylt.runs.about import About

FIGURES = {
    "accuracy": "accuracy on the test set", "global_accuracy": "accuracy of the global model",
    "macro": "mean of the class accuracies", "miou": "mean intersection over union",
    "clients_local": "mean over clients, their own test images", "clients_owned": "mean over clients, classes that "
    "they own", "clients_matched": "mean over clients, own class mix",
    "clients_global": "mean over clients, all classes", "clients_miou": "mean IoU over clients, classes that they own",
}
MOST = 50           # clients or classes that are named


def card(about: About, file: str) -> str:
    """The card in Markdown.

    Args:
        file: the name of the file that it is of.
    """
    image, clients = about["input"], about["clients"]
    named = f', client="{clients[0]["name"]}"' if clients and len(clients) > 1 else ""
    option = f' --client "{clients[0]["name"]}"' if clients and len(clients) > 1 else ""
    one = {"classification": "class of an image", "segmentation": "class of each pixel"}[about["task"]]
    fields = ", ".join(f"{name} = {value}" for name, value in about["method"].items() if name != "name")
    lines = [
        f"# {file}", "",
        f"The {one}, one of {len(about['class_names'])}. Network `{about['model']}`, trained with "
        f"`{about['method']['name']}` in {about['rounds']} rounds on `{about['source']}` by raylt.", "",
        "## Use", "",
        "```", f"raylt predict {file} IMAGE ...{option}", "```", "",
        "```python", "import raylt", f'model = raylt.load_model("{file}"{named})',
        f"model.predict(images)     # uint8 [n, {image['height']}, {image['width']}, {image['channels']}]", "```", "",
        "## Input", "",
        f"Images of {image['height']}x{image['width']} pixels with {image['channels']} channel"
        f"{'s' if image['channels'] > 1 else ''}; per channel, of pixels in [0, 1], mean "
        f"{_row(image['mean'])} and deviation {_row(image['std'])} are taken off and divided by.", "",
        "## Classes", "", _names(about["class_names"]), "",
        "## Figures", "", "| figure | |", "|---|---|",
        *(f"| {FIGURES.get(name, name.replace('_', ' '))} | {_percent(value)} |"
          for name, value in about["figures"].items() if value is not None), ""]
    if clients:
        kinds = [kind for kind in ("local", "owned", "matched", "global") if kind in clients[0]["figures"]]
        lines += ["## Clients", "", f"| client | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|",
                  *(f"| {_cell(entry['name'])} | {' | '.join(_percent(entry['figures'][kind]) for kind in kinds)} |"
                    for entry in clients[:MOST]),
                  *([f"and {len(clients) - MOST} more"] if len(clients) > MOST else []), ""]
    lines += ["## Origin", "", "| | |", "|---|---|",
              f"| method | {about['method']['name']}{f': {fields}' if fields else ''} |",
              f"| run | `{about['run']}` |", f"| split | `{about['split_sha256']}` |",
              *(f"| {name} | {version} |" for name, version in about["versions"].items()),
              *(f"| {guest['kind']} {guest['name']} | {guest['origin']}, `{guest['sha256']}` |"
                for guest in about["guests"]), "",
              "Probabilities are those of a softmax, which nothing has calibrated. Figures are of test images like "
              "those that it was trained on; `raylt evaluate` says how well it does on others."]
    return "\n".join(lines) + "\n"


def _names(names: list[str]) -> str:
    shown = ", ".join(_cell(name) for name in names[:MOST])
    return shown + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def _cell(name: str) -> str:
    """A name as Markdown shows it."""
    return "".join(f"\\{letter}" if letter in "\\|`*_<>[]#" else letter for letter in name)


def _row(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:.4f}" for value in values) + ")"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"
