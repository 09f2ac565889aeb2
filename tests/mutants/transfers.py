"""Device transfers left out, one at a time, drawn at random: nine of ten must be noticed on the pretend device.

    python tests/mutants/transfers.py [NUMBER] [SEED] [WORD]        of those whose file and line hold the word

A transfer is `x.to(device)`, `x.cpu()`, `tree.to(x, device)`, `torch.Generator(device)`, or `device=` of what torch
makes. Without it a tensor stays where it was: on a GPU that is an error or, worse, a slow path that nobody sees. The
tests are those of the pretend device, slow ones among them: of a method its own, of everything else those of some
methods that together use most of it. Survivors that are none of `EXPLAINED`, or more than one in ten, end this with
code 1.

Last judged in November 2026: all of them, and those that came with raylt/staging.py by themselves; the one in
`EXPLAINED` alone was not noticed.
"""

import ast
import importlib
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from run import ROOT, copy_to, outcome

PARTS = ("core", "data", "methods", "models", "ops", "metrics.py", "tree.py")
# what no test on a pretend device can reach: OpenCLIP itself, the search for a real GPU
LEFT_OUT = ("models/clip.py", "core/device.py")
WIDE = "bits and classification and (fedavg or sfd or fedsm or mupfl or bpfed or fedadam)"
# of files that are reached in another way, or by other methods
WORDS = {"data/augment.py": "augmentation or drawn or (bits and fedyoyo)",
         "data/samples.py": "(bits and fedavg) or drawn or view_of_the_classes",
         "data/transforms.py": "augmentation or not_recordable or (bits and fedyoyo)",
         "core/client.py": "augmentation or (bits and fedavg)", "core/evaluation.py": f"counted or ({WIDE})",
         "core/evaluator.py": f"counted or ({WIDE})", "core/fleet.py": "work_of_the_server",
         "core/server.py": "servers_step or servers_model",
         "core/pixels.py": "pixels or (bits and mupfl and segmentation)",
         "core/training.py": "bits and (fedavg or balancefl)", "core/validation.py": "held_out",
         "models/teacher.py": "other_fields", "methods/creff": "bits and (creff or clip2fl)",
         "methods/classifiers": "bits and (ccvr or fed3r or fednpc or posthoc)",
         "ops/closed_form.py": "bits and fed3r", "ops/bootstrap.py": "bits and (oracle or sfd)",
         "ops/matching.py": "bits and (creff or ratioloss)", "ops/moments.py": "bits and (ccvr or sfd or bpfed)"}
SHARE = 0.9
# what the tests import of others: in memory before processes fork from this one
HEAVY = ("hypothesis", "numpy", "pandas", "pydantic", "scipy.special", "scipy.stats", "sklearn.datasets", "torchvision",
         "yaml", "cloudpickle", "safetensors.torch", "matplotlib", "rich.console", "typer", "threadpoolctl")

# by file and by how their line begins
EXPLAINED: dict[tuple[str, str], str] = {
    ("raylt/methods/fedafa.py", "return chosen.to(y.device), a[:0]"): "a batch of which none is chosen: in no test"}


@dataclass(frozen=True)
class Transfer:
    """A place in a source, and what stands there without the transfer."""

    file: str
    start: int
    end: int
    becomes: str
    line: str

    def made(self, source: str) -> str:
        encoded = source.encode()
        return (encoded[:self.start] + self.becomes.encode() + encoded[self.end:]).decode()

    @property
    def tests(self) -> list[str]:
        """Arguments of pytest."""
        place = Path(self.file).relative_to("raylt")
        own = f"bits and {Path(place.parts[1]).stem}" if place.parts[0] == "methods" else WIDE
        word = WORDS.get(place.as_posix()) or WORDS.get(place.parent.as_posix()) or own
        # variants of methods in the second, how many copies a call takes in the third
        files = ["tests/test_accelerator.py", "tests/test_graphs.py", "tests/test_staging.py"]
        return [*(files[:1] if word == WIDE else files), "-m", "", "-k", word]


def transfers(file: Path) -> Iterator[Transfer]:
    """Every transfer of a source."""
    source = file.read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    name, lines = file.relative_to(ROOT).as_posix(), source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        becomes = _without(node)
        if becomes is not None:
            yield Transfer(name, *span(node), becomes, lines[node.lineno - 1].strip())


def _without(call: ast.Call) -> str | None:
    """The call without its transfer; None where it has none."""
    callee, target = ast.unparse(call.func), ast.unparse(call.args[0]) if call.args else ""
    if callee == "tree.to":
        return f"({ast.unparse(call.args[0])})"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cpu" and not call.args:
        return f"({ast.unparse(call.func.value)})"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "to" and "device" in target:
        return f"({ast.unparse(call.func.value)})"
    if callee == "torch.Generator" and "device" in target:
        return "torch.Generator()"
    devices = [word for word in call.keywords if word.arg == "device" and ast.unparse(word.value) != "'meta'"]
    if callee.startswith("torch.") and devices:
        rest = [ast.unparse(argument) for argument in call.args]
        rest += [f"{word.arg}={ast.unparse(word.value)}" for word in call.keywords if word not in devices]
        return f"{callee}({', '.join(rest)})"
    return None


def everything() -> list[Transfer]:
    """All transfers that are looked at, in the order of the files."""
    parts = [ROOT / "raylt" / part for part in PARTS]
    files = [file for part in parts for file in sorted(part.rglob("*.py")) or [part]]
    return [one for file in files if not file.as_posix().endswith(LEFT_OUT) for one in transfers(file)]


def main(number: str = "60", seed: str = "0", word: str = "") -> int:
    all_of_them = [one for one in everything() if word in f"{one.file}: {one.line}"]
    chosen = random.Random(int(seed)).sample(all_of_them, min(int(number), len(all_of_them)))
    noticed, unexplained = 0, 0
    for module in HEAVY:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_to(Path(folder))
        for one in chosen:
            file = copy / one.file
            source = file.read_text()
            file.write_text(one.made(source))
            code = outcome(copy, one.tests)
            file.write_text(source)
            noticed += code == 1
            why = next((why for (file, line), why in EXPLAINED.items()
                        if file == one.file and one.line.startswith(line)), None)
            unexplained += code != 1 and why is None
            print(f"{'noticed ' if code == 1 else f'SURVIVES ({code})'} {one.file}: {one.line}"
                  f"{f'   [{why}]' if code != 1 and why else ''}", flush=True)
    print(f"{noticed} of {len(chosen)} are noticed, drawn from {len(all_of_them)}; {unexplained} survivors unexplained")
    return int(noticed < SHARE * len(chosen) or unexplained > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)                    # threads do not survive a fork
    sys.dont_write_bytecode = True              # a mutant of the same second and size must not be taken for the last
    sys.exit(main(*sys.argv[1:]))
