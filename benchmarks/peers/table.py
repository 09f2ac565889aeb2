"""Writes the speed table from its record as Markdown into docs/speed.md."""

import json
import textwrap
from pathlib import Path

RECORD = Path(__file__).parents[1] / "speed.json"
PAGE = Path(__file__).parents[2] / "docs" / "speed.md"
BEGIN, END = "<!-- speed: written by `make bench` -->", "<!-- end of speed -->"
NAMES = {
    "bare": "bare PyTorch loop",
    "raylt-ray": "**raylt**, actors on Ray",
    "raylt-ray-stacked": "**raylt**, actors on Ray, stacks",
    "raylt-local": "**raylt**, one process",
    "raylt-local-stacked": "**raylt**, one process, stacks",
    "raylt-processes": "**raylt**, two forked processes",
    "raylt-processes-stacked": "**raylt**, two forked processes, stacks",
    "flower": "Flower",
    "pfl": "pfl-research",
    "flgo": "FLGo",
    "blazefl": "BlazeFL",
    "PFLlib": "PFLlib",
    "FedLTLib": "FedLTLib",
}


def show(record: dict) -> str:
    """Return the speed table as Markdown: for each scale, ratios to a plain PyTorch loop.

    Missing systems follow with the reasons, and then the conditions of the measurement.
    """
    parts = []
    for scale in record["scales"].values():
        settings, systems = scale["settings"], scale["systems"]
        bare = systems["bare"]
        parts += [
            f"{settings['clients']:,} clients of {settings['samples']} images, {settings['per_round']} a round, "
            f"{settings['rounds']} rounds of one local epoch, batches of {settings['batch']}, "
            f"`{settings['model']}` on {settings['side']}x{settings['side']}x{settings['channels']}:",
            "",
            "| system | CPU, a round | CPU, whole | time, a round | time, whole | end of round 1 | memory |",
            "|---|---|---|---|---|---|---|",
            f"| {NAMES['bare']} | {bare['round_cpu']:.2f} s | {bare['cpu']:.1f} s | {bare['round_wall']:.2f} s "
            f"| {bare['wall']:.1f} s | {bare['first']:.1f} s | {bare['memory']:,.0f} MB |",
        ]
        for name in NAMES:
            if name in systems and name != "bare":
                ratios = [
                    systems[name][key] / bare[key]
                    for key in ("round_cpu", "cpu", "round_wall", "wall", "first", "memory")
                ]
                parts.append(f"| {NAMES[name]} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
        parts.append("")
    own = record["versions"]["raylt"].get("python")
    versions = ", ".join(
        f"{package} {version}" + (f" on Python {system['python']}" if system.get("python", own) != own else "")
        for system in record["versions"].values()
        for package, version in system.items()
        if package not in ("torch", "ray", "python")
    )
    kernel = record["versions"]["raylt"]
    shared = " that others worked on meanwhile: CPU seconds are what to go by" if record["shared"] else ""
    turns = max(max(scale["turns"].values()) for scale in record["scales"].values())
    runs = "one run each" if turns == 1 else f"medians of at most {turns} alternating runs"
    notes = [
        f"Ratios to the bare loop, {runs}, on {record['machine']}{shared}; "
        f"{record['date']}, {versions}, torch {kernel['torch']}, "
        f"commit {', '.join(dict.fromkeys(scale['commit'] for scale in record['scales'].values()))}."
    ]
    missing = dict(item for scale in record["scales"].values() for item in scale["missing"].items())
    for why in dict.fromkeys(missing.values()):
        names = [NAMES[name] for name, reason in missing.items() if reason == why]
        notes.append(f"Not measured: {', '.join(names)}; {why}.")
    if record["left_out"]:
        notes.append(f"Not measured yet: {', '.join(record['left_out'])}.")
    parts.append(textwrap.fill(" ".join(notes), 128, break_long_words=False, break_on_hyphens=False))
    return "\n".join(parts)


def write_table() -> None:
    """Write the recorded table into docs/speed.md, between the two marks of the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + show(json.loads(RECORD.read_text())) + "\n" + END + rest.split(END)[1])
