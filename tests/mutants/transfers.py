"""Leave out device transfers one at a time; the tests on the pretend device must notice nine of ten.

    python tests/mutants/transfers.py [NUMBER] [SEED] [WORD]

NUMBER transfers are drawn at random, from those whose file, function or code contains WORD. A transfer is
`x.to(device)`, `x.cpu()`, `tree.to(x, device)`, `torch.Generator(device)`, or the argument `device=` of a torch
function. Without it a tensor stays where it was. On a GPU that is an error or, worse, a slow path without any sign.

The tests are those of the pretend device, including the slow ones. A method's file is judged by the tests of that
method, any other file by those of some methods that together use most of the code. The exit code is 1 if a survivor is
not in `EXPLAINED`, if more than one in ten survives, or if a table below names something that no longer exists. NUMBER
0 only checks the tables.

Last run in November 2026 on all transfers, and separately on those added with raylt/staging.py: only the one in
`EXPLAINED` survived.
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
from rewrite import named, span
from run import ROOT, copy_to, outcome

PARTS = ("raylt/core", "raylt/data", "raylt/methods", "raylt/models", "raylt/ops", "raylt/metrics.py", "raylt/tree.py")
# functions and classes that no test on the pretend device reaches: OpenCLIP itself, the search for a real GPU
LEFT_OUT = ("OpenClip", "_tower", "_on_gpu")
WIDE = "bits and classification and (fedavg or sfd or fedsm or mupfl or bpfed or fedadam)"
# tests of functions and classes that are reached in another way or by other methods
TESTS = {
    "augmentation or (bits and fedavg)": ("Client",),
    "augmentation or drawn or (bits and fedyoyo)": (
        "draw_crops",
        "draw_boxes",
        "draw_scaled_boxes",
        "cutout",
        "_sides",
        "_steps",
        "_draw_flips",
        "_centres",
        "apply_crops",
    ),
    "augmentation or not_recordable or (bits and fedyoyo)": ("ImagePolicy", "_sources", "_values"),
    "(bits and fedavg) or drawn or view_of_the_classes": ("Samples",),
    f"counted or ({WIDE})": ("Counts", "counts_of", "Evaluator"),
    "work_of_the_server": ("compute",),
    "servers_step or servers_model": ("Server",),
    "pixels or (bits and mupfl and segmentation)": ("pixel_features", "back_cross_entropy"),
    "bits and (fedavg or balancefl)": ("balanced", "perturb_along", "sgd"),
    "held_out": ("ValidationJudge",),
    "other_fields": ("FeatureFile",),
    "bits and (creff or clip2fl)": ("CReFF", "CLIP2FL", "new_classifier"),
    "bits and (ccvr or fed3r or fednpc or posthoc)": ("AfterTraining", "Calibrated", "FedNPC"),
    "bits and (oracle or sfd)": ("class_bootstrap",),
    "bits and (creff or ratioloss)": ("class_gradients",),
    "bits and (ccvr or sfd or bpfed)": ("pack", "unpack", "perturb"),
}
WORDS = {name: word for word, names in TESTS.items() for name in names}
SHARE = 0.9
# modules that the tests import, loaded before processes fork from this one
HEAVY = (
    "hypothesis",
    "numpy",
    "pandas",
    "pydantic",
    "scipy.special",
    "scipy.stats",
    "sklearn.datasets",
    "torchvision",
    "yaml",
    "cloudpickle",
    "safetensors.torch",
    "matplotlib",
    "rich.console",
    "typer",
    "threadpoolctl",
)

# transfers that may survive, by qualified function and code, and why
EXPLAINED = {("FedAFA.generate", "chosen.to(y.device)"): "a batch of which none is chosen: in no test"}


@dataclass(frozen=True)
class Transfer:
    """A transfer in a source.

    Attributes:
        file: The source, from the root of the project.
        function: Qualified name of the function, "" at module level.
        code: The call, as `ast.unparse` writes it.
        becomes: What replaces the call.
        start, end: Where the call is in the encoded source.
    """

    file: str
    function: str
    code: str
    becomes: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: {self.code}"

    def made(self, source: str) -> str:
        """Return a source without the transfer."""
        encoded = source.encode()
        return (encoded[: self.start] + self.becomes.encode() + encoded[self.end :]).decode()

    @property
    def definition(self) -> str:
        """Return the name of the function or class at module level."""
        return self.function.partition(".")[0]

    @property
    def explained(self) -> str | None:
        """Return why the transfer may survive, or None."""
        return EXPLAINED.get((self.function, self.code))

    @property
    def tests(self) -> list[str]:
        """Return the arguments of pytest."""
        place = Path(self.file).relative_to("raylt")
        own = f"bits and {Path(place.parts[1]).stem}" if place.parts[0] == "methods" else WIDE
        word = WORDS.get(self.definition, own)
        # the second file tests variants of methods, the third how many copies a call takes
        files = ["tests/test_accelerator.py", "tests/core/training/test_cuda_graphs.py", "tests/test_staging.py"]
        return [*(files[:1] if word == WIDE else files), "-m", "", "-k", word]


def transfers(file: Path) -> Iterator[Transfer]:
    """Yield every transfer of a source."""
    source = file.read_text()
    tree = ast.parse(source)
    # the innermost function
    functions = {node: name for name, definition in named(tree) for node in ast.walk(definition)}
    for node in ast.walk(tree):
        becomes = _without(node) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and becomes is not None:
            yield Transfer(
                file.relative_to(ROOT).as_posix(),
                functions.get(node, ""),
                ast.unparse(node),
                becomes,
                *span(source, node, node),
            )


def _without(call: ast.Call) -> str | None:
    """Return a call without its transfer, or None if it has none."""
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
    """Return all transfers to judge, in the order of the files."""
    parts = [ROOT / part for part in PARTS]
    files = [file for part in parts for file in sorted(part.rglob("*.py")) or [part]]
    return [one for file in files for one in transfers(file) if one.definition not in LEFT_OUT]


def faults() -> list[str]:
    """Return the names in this file's tables that no longer exist."""
    files = [*PARTS, *(file for one in everything() for file in one.tests if file.startswith("tests/"))]
    missing = [f"{file} does not exist" for file in dict.fromkeys(files) if not (ROOT / file).exists()]
    definitions = {one.definition for one in everything()}
    missing += [f"{name} holds no transfer" for name in WORDS if name not in definitions]
    existing = {(one.function, one.code) for one in everything()}
    return missing + [f"{function} holds no {code}" for function, code in EXPLAINED if (function, code) not in existing]


def main(number: str = "60", seed: str = "0", word: str = "") -> int:
    if found := faults():
        print("\n".join(found))
        return 1
    all_of_them = [one for one in everything() if word in str(one)]
    chosen = random.Random(int(seed)).sample(all_of_them, min(int(number), len(all_of_them)))
    noticed, unexplained = 0, 0
    for module in HEAVY if chosen else ():
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
            unexplained += code != 1 and one.explained is None
            print(
                f"{'noticed ' if code == 1 else f'SURVIVES ({code})'} {one}"
                f"{f'   [{one.explained}]' if code != 1 and one.explained else ''}",
                flush=True,
            )
    print(f"{noticed} of {len(chosen)} are noticed, drawn from {len(all_of_them)}; {unexplained} survivors unexplained")
    return int(noticed < SHARE * len(chosen) or unexplained > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    # bytecode of the previous mutant could be reused for a file of the same time and size
    sys.dont_write_bytecode = True
    sys.exit(main(*sys.argv[1:]))
