"""Records everything that a refactoring must not change, and compares two recordings.

    python benchmarks/gate.py record before.json [--jobs 2] [--runs DIR]
    python benchmarks/gate.py compare before.json after.json [--old-runs DIR]

`record` runs every method on a tiny task in one process, resumes each run from each of its checkpoints, branches it at
each stage, and runs three methods on Ray. It also records the keys of run files, the commands with their options, the
settings, the fields of methods, the public names, the tables of result pages and the comparisons of recorded studies.
It keeps three run folders next to the recording. `compare --old-runs` lets the present tree read, resume, branch and
export those folders, and holds the result against what the tree that wrote them did with them.

Only public parts are used: the command line, names of `import raylt`, and files of run folders. The script therefore
measures any tree it is copied into, however its modules are arranged. Two recordings are comparable when the same
machine and the same libraries made them; both recordings must be made by the same version of this script.

Seconds, dates, hashes that cover dates, and prose (help texts, descriptions, messages of errors) are left out.
"""

import argparse
import hashlib
import inspect
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import chdir, contextmanager, suppress
from enum import Enum
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("fedavg", "sfd", "mupfl")  # methods whose run folders are kept, and which run on Ray
ACTORS = (1, 2)
TIMED = {
    "seconds",
    "evaluation_seconds",
    "seconds_per_round",
    "stages",
    "date",
    "previous",
    "made",
    "line",
    "sha256",
    "provenance",
}
SHOWN = 12  # differences that are printed of an item
PAGE_BLOCK = re.compile(r"<!-- raylt compare (.*?) -->\r?\n(.*?)<!-- end of raylt compare -->", re.DOTALL)
EXAMPLE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

# values of fields that only decide how long a method computes
QUICK: dict[str, dict[str, Any]] = {
    "sfd": {"rf_dim": 60, "m_min": 80, "m_max": 120, "synthesis_steps": 3, "retrain_epochs": 2},
    "creff": {"per_class": 5, "matching_steps": 3, "retrain_epochs": 2},
    "ccvr": {"virtual": 20, "retrain_epochs": 2},
    "clip2fl": {"per_class": 5, "matching_steps": 3, "retrain_epochs": 2, "kd": 0, "contrast": 0},
    "noisymeans": {"virtual": 20, "retrain_epochs": 2},
    "oracle": {"virtual": 20, "retrain_epochs": 2},
    "rucr": {"retrain_rounds": 1, "size": 5, "retrain_epochs": 2},
    "fedloge": {"steps": 20},
    "fedetf": {"turns": 1, "turn_epochs": 1},
    "fedrela": {"after": 0.5, "share": 0.2},
    "fedrep": {"head_epochs": 1},
    "fedafa": {"steps": 2},
    "mupfl": {"m": 5, "tau": 2, "matching_steps": 3},
    "fedsm": {"teacher": "none", "retrain_rounds": 1, "size": 5, "retrain_epochs": 2},
}

TINY = ["federation.rounds=2", "local.epochs=1", "local.batch=8", "output.keep=20", "output.checkpoint_every=1"]
PICTURES = [*TINY, "data.source=npz:pictures.npz", "data.clients=4", "data.imbalance=4"]
SCENES = [
    *TINY,
    "data.source=npz:scenes.npz",
    "data.clients=4",
    "data.imbalance=1",
    "data.partition=classes",
    "data.beta=2",
    "model=lraspp",
]
DIGITS = [*TINY, "data.source=digits", "data.clients=4", "data.imbalance=20", "federation.rounds=1", "local.batch=64"]

# settings other than methods' fields that change results: a method, and the changes to the tiny task
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "secure": ("fedavg", [*PICTURES, "federation.secure=true"]),
    "secure sfd": ("sfd", [*PICTURES, "federation.secure=true"]),
    "private": ("sfd", [*PICTURES, "privacy.epsilon=100"]),
    "private secure": ("fedncm", [*PICTURES, "privacy.epsilon=100", "federation.secure=true"]),
    "private updates": (
        "fedavg",
        [
            *PICTURES,
            "privacy.update_epsilon=500",
            "privacy.noise_multiplier=2",
            "federation.sampling=poisson",
            "federation.participation=0.9",
        ],
    ),
    **{
        f"robust {rule}": ("fedavg", [*PICTURES, f"federation.robust={rule}"])
        for rule in ("median", "trimmed_mean", "norm_clipped_mean")
    },
    "local batchnorm": ("fedavg", [*PICTURES, "federation.batchnorm=local"]),
    "participation": ("scaffold", [*PICTURES, "federation.participation=0.5"]),
    "poisson": ("fedavg", [*PICTURES, "federation.participation=0.9", "federation.sampling=poisson"]),
    "over_select": ("fedavg", [*PICTURES, "federation.participation=0.5", "federation.over_select=0.5"]),
    **{
        f"optimiser {name}": ("fedavg", [*PICTURES, f"local.optimiser={name}", "local.lr=0.001"])
        for name in ("adam", "adamw")
    },
    "cosine": ("fedavg", [*PICTURES, "local.schedule=cosine", "local.weight_decay=0.001", "local.momentum=0"]),
    "lr_decay": ("fedprox", [*PICTURES, "local.lr_decay=0.1", "local.epochs=2"]),
    "bfloat16": ("fedavg", [*PICTURES, "local.precision=bfloat16"]),
    "deterministic": ("fedavg", [*PICTURES, "resources.deterministic=true"]),
    "seed": ("fedavg", [*PICTURES, "seed=1", "data.seed=1"]),
    "sparse evaluation": ("ditto", [*PICTURES, "evaluation.every=2", "evaluation.personal=1", "evaluation.batch=7"]),
    **{f"model {name}": ("fedavg", [*DIGITS, f"model={name}"]) for name in ("resnet8", "resnet8_proj")},
    **{
        f"augment {name}": ("fedavg", [*DIGITS, f"augment={name}"])
        for name in ("crop_flip", "resized_crop_flip", "scale_crop_flip")
    },
    **{
        f"partition {name}": ("fedavg", [*DIGITS, f"data.partition={name}"])
        for name in ("dirichlet", "dirichlet_min", "hsu", "iid", "shards", "quantity")
    },
    "partition creff": ("fedavg", [*DIGITS, "data.partition=creff", "data.clients=10"]),
    "partition pathological": ("fedavg", [*DIGITS, "data.partition=pathological", "data.per_client=3"]),
    "tail local": ("fedavg", [*DIGITS, "data.tail=local"]),
    "tail mixed": ("fedavg", [*DIGITS, "data.tail=mixed"]),
    "data": ("fedavg", [*DIGITS, "data.validation=0.2", "data.new_clients=1", "data.auxiliary=2", "data.seed=3"]),
    "groups": ("fedavg", [*DIGITS, "data.normalise=false", "data.groups=[20,60]"]),
}


# what a recording holds of a run folder


def digest(value: Any) -> str:
    """Return a short hash of bytes, text or a JSON value."""
    content = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def untimed(value: Any) -> Any:
    """Return a JSON value without the keys that differ between two runs of the same code."""
    if isinstance(value, dict):
        return {key: untimed(inner) for key, inner in value.items() if key not in TIMED}
    return [untimed(inner) for inner in value] if isinstance(value, list) else value


def shallow(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object whose numbers and texts are unchanged, with a hash in place of every inner object."""
    return {
        key: value if isinstance(value, int | str) or (isinstance(value, float) and value == value) else digest(value)
        for key, value in untimed(tree).items()
    }


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Parse the JSON lines in a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def look(folder: Path) -> dict[str, Any]:
    """Return, by aspect, everything about a finished run that must not change."""
    summary = json.loads((folder / "summary.json").read_text())
    confusions = {}
    for file in sorted((folder / "confusions").glob("*.npz")):
        with np.load(file) as arrays:
            confusions[file.stem] = {name: digest(arrays[name].tolist()) for name in sorted(arrays)}
    tensors = {
        f"{file.parent.name}/{file.name}": digest(file.read_bytes())
        for file in sorted((folder / "checkpoints").rglob("*.safetensors"))
    }
    return {
        "model": {"sha256": summary["model_sha256"], "file": digest((folder / "model.safetensors").read_bytes())},
        "confusions": confusions,
        "metrics": {str(line["step"]): shallow(line) for line in lines_of(folder / "metrics.jsonl")},
        "summary": shallow(summary),
        "checkpoints": tensors,
        "identity": {
            name: digest((folder / name).read_bytes())
            for name in ("identity.json", "config.yaml", "split.json", "outline.json")
        },
    }


def key_paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the keys of a JSON value in the order of the file, with nested keys as `outer.inner`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{path}{key}"
            yield from key_paths(inner, f"{path}{key}.")
    elif isinstance(value, list):
        yield from dict.fromkeys(key for inner in value for key in key_paths(inner, f"{path}[]."))


def keys(folder: Path) -> dict[str, list[str]]:
    """Return the file names of a run, and the keys of each JSON and YAML file in order."""
    import yaml

    names = sorted(
        re.sub(r"events\.out\..*", "events.out", str(file.relative_to(folder)))
        for file in folder.rglob("*")
        if file.is_file()
    )
    found = {"files": names}
    for file in sorted(folder.rglob("*.json")):
        found[str(file.relative_to(folder))] = list(key_paths(json.loads(file.read_text())))
    for file in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(lines_of(file), 1):
            found[f"{file.name}:{number}"] = list(key_paths(line))
    found["config.yaml"] = list(key_paths(yaml.safe_load((folder / "config.yaml").read_text())))
    return found


# runs


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of a function, or a text if raylt refused the input or the function failed."""
    import raylt

    try:
        return work()
    except raylt.RayltError:
        return "refused"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def train(name: str, method: str, settings: list[str], fleet: Any = "local") -> Path:
    """Run a method in a folder called `name`; return the folder."""
    import raylt

    fields = [f"method.{field}={value}" for field, value in QUICK.get(method, {}).items()]
    config = raylt.load_config(None, [f"method={method}", *fields, *settings])
    return raylt.run(config, out=".", name=name, fleet=fleet, quiet=True).folder


def extra(method: str) -> list[str]:
    """Return settings without which a method cannot run."""
    return ["data.auxiliary=2"] if method == "ratioloss" else []


def cut(folder: Path, target: Path, step: int) -> Path:
    """Copy a run folder in the state that it had after a step."""
    shutil.copytree(folder, target)
    for name in ("summary.json", "model.safetensors"):
        (target / name).unlink()
    for later in [*(target / "checkpoints").iterdir(), *(target / "confusions").iterdir()]:
        if int(later.stem) > step:
            shutil.rmtree(later) if later.is_dir() else later.unlink()
    return target


def resumed(folder: Path, straight: dict[str, Any]) -> dict[str, Any]:
    """Resume a run from each checkpoint; return, by step, whether the result equals the uninterrupted run."""
    import raylt

    found = {}
    for step in sorted(int(kept.name) for kept in (folder / "checkpoints").iterdir()):
        copy = cut(folder, folder.parent / f"{folder.name}-from-{step}", step)
        again = attempt(lambda copy=copy: look(raylt.resume(copy, fleet="local", quiet=True).folder))
        differing = (
            [aspect for aspect in straight if again[aspect] != straight[aspect]] if isinstance(again, dict) else [again]
        )
        found[str(step)] = ", ".join(differing) or "equals the straight run"
        shutil.rmtree(copy)
    return found


def alternatives(method: str, field: str, entry: dict[str, Any]) -> list[str]:
    """Return the values in a field's range other than the value in the tiny run."""
    inside = re.search(r"[\[{](.*?)[\]}]", str(entry["range"]))
    present = str(QUICK.get(method, {}).get(field, entry["default"]))
    return [value for value in (inside[1].split(", ") if inside else []) if value not in (present, f"{present}.0")]


def branched(method: str, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Branch a run at each stage of its method, each time with another value of a field of the stage."""
    import raylt

    found: dict[str, Any] = {}
    for field, entry in fields.items():
        if entry["stage"] is None or isinstance(found.get(entry["stage"]), dict):
            continue
        for value in alternatives(method, field, entry):
            target = folder.parent / f"{folder.name}-{field}"
            result = attempt(
                lambda field=field, value=value, target=target: look(
                    raylt.branch(folder, [f"method.{field}={value}"], target, fleet="local", quiet=True).folder
                )
            )
            shutil.rmtree(target, ignore_errors=True)
            found[entry["stage"]] = (
                result
                if isinstance(result, str)
                else {"field": f"{field}={value}", "model": result["model"]["sha256"], "all": digest(result)}
            )
            if isinstance(result, dict):
                break
    return found


# tasks of the pool; each returns what it found by item

Items = dict[str, dict[str, Any]]


def by_aspect(suite: str, name: str, found: Any) -> Items:
    """Split the result of `look` into one item per aspect."""
    if not isinstance(found, dict):
        return {f"{suite}: model": {name: found}}
    return {f"{suite}: {aspect}": {name: value} for aspect, value in found.items()}


def do_method(name: str, about: dict[str, Any]) -> Items:
    """Run, resume and branch a method on images, and record the results."""
    folder = Path(name)
    found = attempt(lambda: look(train(name, name, [*PICTURES, *extra(name)])))
    items = by_aspect("methods", name, found)
    if isinstance(found, dict):
        items["resume from each checkpoint"] = {name: resumed(folder, found)}
        items["branch at each stage"] = {name: branched(name, folder, about["fields"])}
    shutil.rmtree(folder, ignore_errors=True)
    return items


def do_branches_to(methods: list[str]) -> Items:
    """Branch one FedAvg run to every other method, and record the results. Most methods refuse."""
    import raylt

    source, found = train("stem", "fedavg", PICTURES), {}
    for name in methods:
        fields = [f"method.{field}={value}" for field, value in QUICK.get(name, {}).items()]
        target = Path(f"stem-{name}")
        found[name] = attempt(
            lambda name=name, fields=fields, target=target: look(
                raylt.branch(source, [f"method={name}", *fields], target, fleet="local", quiet=True).folder
            )["model"]
        )
    return {"branch from fedavg to a method": found}


def do_segmentation(name: str) -> Items:
    """Run a method on label maps, and record the result."""
    items = by_aspect("segmentation", name, attempt(lambda: look(train(f"maps-{name}", name, SCENES))))
    shutil.rmtree(f"maps-{name}", ignore_errors=True)
    return items


def do_settings(name: str) -> Items:
    """Run one entry of SETTINGS, and record the result."""
    method, settings = SETTINGS[name]
    with seeded_noise():
        found = attempt(lambda: look(train(f"settings-{digest(name)}", method, settings)))
    return by_aspect("other settings", name, found)


@contextmanager
def seeded_noise() -> Iterator[None]:
    """Make the noise of private runs the same in every recording, although raylt draws it from `secrets`."""
    with mock.patch("secrets.randbits", random.Random(0).getrandbits):
        yield


def do_ray() -> Items:
    """Run three methods on Ray, with one and with two actors, and record the results."""
    items: Items = {}
    for method in KEPT:
        for actors in ACTORS:
            name = f"ray-{method}-{actors}"
            settings = [*PICTURES, f"resources.actors={actors}"]
            found = attempt(
                lambda name=name, method=method, settings=settings: look(train(name, method, settings, "ray"))
            )
            if isinstance(found, dict):
                found["identity"].pop("config.yaml")  # it names the actors
            for item, value in by_aspect("ray", f"{method} {actors}", found).items():
                items.setdefault(item, {}).update(value)
    return items


def do_keys() -> Items:
    """Run a plain, a personal, a secure and a private run; record the keys of their files."""
    kinds = {
        "plain": ("fedavg", []),
        "finish": ("ccvr", []),
        "personal": ("ditto", []),
        "secure": ("fedavg", ["federation.secure=true"]),
        "private": ("sfd", ["privacy.epsilon=100"]),
    }
    return {
        "keys of run files": {
            kind: attempt(
                lambda kind=kind, method=method, more=more: keys(train(f"keys-{kind}", method, [*PICTURES, *more]))
            )
            for kind, (method, more) in kinds.items()
        }
    }


# the command line and what it lists


def command(*arguments: str) -> str:
    """Return the output of a raylt command.

    Raises:
        RuntimeError: it failed.
    """
    from typer.testing import CliRunner

    from raylt.cli.main import app

    done = CliRunner().invoke(app, list(arguments))
    if done.exit_code != 0:
        raise RuntimeError(f"raylt {shlex.join(arguments)}: exit code {done.exit_code}, {done.exception}")
    return done.stdout


def listed(*arguments: str) -> Any:
    """Return the output of a raylt command, parsed as JSON."""
    return json.loads(command(*arguments, "--format", "json"))


def walk(node: Any, path: str = "raylt") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every option and argument of a command and its subcommands, with the accepted values.

    Arguments go by their number.
    """
    for number, parameter in enumerate(node.params, 1):
        names = [*parameter.opts, *parameter.secondary_opts]
        name = " ".join(names) if names[0].startswith("-") else f"argument {number}"
        descriptor = getattr(parameter, "type_descriptor", None)
        default = parameter.default
        yield (
            f"{path} {name}",
            {
                "default": str(getattr(default, "value", default)),
                "required": parameter.required,
                "takes": takes(descriptor.annotation if descriptor else parameter.type.name),
                "min": getattr(parameter, "min", None),
                "max": getattr(parameter, "max", None),
                "nargs": parameter.nargs,
                "multiple": getattr(parameter, "multiple", False),
                "flag": getattr(parameter, "is_flag", False),
                "env": parameter.envvar,
            },
        )
    for name, inner in sorted(getattr(node, "commands", {}).items()):
        yield f"{path} {name}", {"kind": "command"}
        yield from walk(inner, f"{path} {name}")


def takes(annotation: Any) -> Any:
    """Return the type of an option or its choices, whether declared by an enum or a Literal."""
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return [str(choice.value) for choice in annotation]
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is not None:
        return " | ".join(str(takes(inner)) for inner in get_args(annotation))
    return getattr(annotation, "__name__", str(annotation))


def do_commands() -> Items:
    """Record the tree of raylt commands, and the exit codes of the installed command."""
    import typer

    from raylt.cli.main import app

    tries = {
        "version": ["--version"],
        "unknown method": ["run", "method=nothing"],
        "unknown key": ["run", "no.key=1"],
        "unknown command": ["nothing"],
        "no such run": ["resume", "nowhere"],
        "damaged run": ["verify", "nowhere"],
    }
    start = [sys.executable, "-c", "from raylt.cli.main import main; main()"]
    codes = {
        name: subprocess.run([*start, *arguments], capture_output=True).returncode for name, arguments in tries.items()
    }
    return {"commands and options": dict(walk(typer.main.get_command(app))), "exit codes": codes}


def inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a JSON schema with definitions inlined, without descriptions and class names."""
    if isinstance(schema, list):
        return [inlined(inner, definitions) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **schema}
    return {
        key: inlined(value, definitions)
        for key, value in schema.items()
        if not (key in ("title", "description") and isinstance(value, str)) and key not in ("$defs", "$ref")
    }


def do_settings_listed() -> Items:
    """Record all configuration keys with defaults and types, and the shipped configurations."""
    import raylt

    schema = type(raylt.load_config(None, ["method=fedavg"])).model_json_schema()
    types = inlined(schema, schema.get("$defs", {}))["properties"]
    defaults = {key: json.dumps(entry["default"]) for key, entry in listed("settings").items()}
    recipes = {name: digest(raylt.load_config(f"recipe:{name}").model_dump(mode="json")) for name in listed("recipes")}
    return {
        "settings: defaults": defaults,
        "settings: order": {"keys": list(defaults)},
        "settings: types": types,
        "recipes": recipes,
    }


def do_methods_listed() -> Items:
    """Record fields, ranges and stages of all methods, and what each of their calls sends and costs."""
    prose = {"about", "notes", "privileged", "source"}

    def bare(value: Any) -> Any:
        return (
            {key: bare(inner) for key, inner in value.items() if key not in prose} if isinstance(value, dict) else value
        )

    measured = listed("methods", "--model", "small", "--image", "8x8x1", "--classes", "4")
    fields = {
        f"{name}.{field}": bare(entry) for name, about in measured.items() for field, entry in about["fields"].items()
    }
    about = {
        name: bare(about) | {"privileged": about["privileged"] is not None, "fields": list(about["fields"])}
        for name, about in measured.items()
    }
    return {"methods: fields": fields, "methods: about and calls": about, "methods: order": {"names": list(measured)}}


def do_public_names() -> Items:
    """Record public names, parameters of public functions, and public attributes of public classes."""
    import raylt

    found: dict[str, list[str]] = {"raylt": sorted(raylt.__all__)}
    for name in raylt.__all__:
        value = getattr(raylt, name)
        if inspect.isclass(value):
            own = {
                attribute
                for kind in value.__mro__
                if kind.__module__.startswith("raylt")
                for attribute in [*vars(kind), *vars(kind).get("__annotations__", {})]
            }
            found[name] = sorted(attribute for attribute in own if not attribute.startswith("_"))
        elif inspect.isroutine(value):  # aliases of types are callable and have no parameters
            found[name] = list(inspect.signature(value).parameters)
    return {"public names": found}


# pages and records of studies


def do_pages() -> Items:
    """Run `raylt page` on copies of all pages with tables; record unchanged pages and the tables."""
    unchanged, tables = {}, {}
    folders = [ROOT, *(ROOT / name for name in ("docs", "studies", "examples"))]
    pages = sorted(
        {page for folder in folders for page in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))}
    )
    copies = Path("pages").resolve()
    copies.mkdir()
    for page in pages:
        text = page.read_text()
        if not PAGE_BLOCK.search(EXAMPLE.sub("", text)):
            continue
        name = str(page.relative_to(ROOT))
        copy = copies / name.replace("/", "-")
        copy.write_text(text)
        with chdir(ROOT):
            printed = attempt(lambda copy=copy: command("page", str(copy)))
        unchanged[name] = copy.read_text() == text if "tables" in str(printed) else printed
        tables |= {arguments: digest(table) for arguments, table in PAGE_BLOCK.findall(copy.read_text())}
    return {"pages: unchanged": unchanged, "pages: tables": tables}


def do_records() -> Items:
    """Record the comparison of every recorded study, the verdicts on all of them, and every study's plan."""
    out = str(Path("studies-out").resolve())
    with chdir(ROOT):
        files = sorted(str(file) for file in Path("studies/results").glob("*.json"))
        compared = {
            Path(file).name: attempt(
                lambda file=file: {
                    "json": shallow(listed("compare", file, "--mix-versions")),
                    "markdown": digest(command("compare", file, "--mix-versions", "--format", "markdown")),
                }
            )
            for file in files
        }
        verdicts = attempt(lambda: shallow(listed("verdicts", *files)))
        plans = {}
        for file in sorted(Path("studies").glob("*.yaml")):
            plan = attempt(lambda file=file: listed("study", str(file), "--dry-run", "--out", out))
            # not their states: a recorded run counts as done only for the code that made it
            plans[file.name] = (
                {run["run"]: run["planned_steps"] for run in plan["runs"]} if isinstance(plan, dict) else plan
            )
    return {"records: comparisons": compared, "records: verdicts": {"all": verdicts}, "records: plans": plans}


# run folders of another tree


def keep_runs(folder: Path) -> None:
    """Make run folders and exported models that later versions must be able to read."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with chdir(folder):
        write_pictures()
        for method in KEPT:
            train(method, method, PICTURES)
            command("export", method, "--out", f"{method}.safetensors")
        command("export", "fedavg", "--format", "pt2", "--out", "fedavg.pt2")


def use_runs(folder: Path, fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Use a copy of kept run folders as users do with old runs; return the results.

    Args:
        fields: of each kept method, as `raylt methods` lists them.
    """
    import raylt

    found: dict[str, Any] = {}
    copied = Path(tempfile.mkdtemp(prefix="gate-old-"))
    shutil.copytree(folder, copied / "runs")
    with chdir(copied / "runs"):
        write_images(Path("images"))
        found["ls"] = attempt(
            lambda: {
                entry["name"]: digest({k: v for k, v in entry.items() if k != "age_s"}) for entry in listed("ls", ".")
            }
        )
        found["compare"] = attempt(lambda: shallow(listed("compare", *KEPT, "--mix-versions")))
        for name in KEPT:
            run, straight = raylt.Run.open(name), look(Path(name))
            found[name] = {
                "files": straight,
                "verify": attempt(lambda name=name: bool(command("verify", name))),
                "reads": attempt(
                    lambda run=run: {
                        "state": run.state,
                        "metrics": untimed_frame(run.metrics),
                        "clients": untimed_frame(run.clients),
                        "split": run.split.sha256,
                        "sha256": run.sha256,
                    }
                ),
                "resume": resumed(Path(name), straight),
                "more rounds": attempt(
                    lambda name=name: look(
                        raylt.resume(name, ["federation.rounds=3"], fleet="local", quiet=True).folder
                    )
                ),
                "branch": branched(name, Path(name), fields[name]),
                "evaluate": attempt(lambda name=name: digest(listed("evaluate", name, "--data", "folder:images"))),
                "export": attempt(
                    lambda name=name: (
                        command("export", name, "--out", f"new-{name}.safetensors"),
                        predictions(Path(f"new-{name}.safetensors")),
                    )[1]
                ),
                "exported before": attempt(lambda name=name: predictions(Path(f"{name}.safetensors"))),
            }
        found["pt2 exported before"] = attempt(lambda: predictions(Path("fedavg.pt2")))
    shutil.rmtree(copied)
    return found


def untimed_frame(frame: Any) -> dict[str, Any]:
    """Return the columns of a data frame of figures and a hash of each metric.

    Of metrics in seconds only the number of rows is returned.
    """
    columns: dict[str, Any] = {"columns": list(frame.columns)}
    for metric, rows in frame.groupby("metric", sort=True):
        columns[str(metric)] = len(rows) if "seconds" in str(metric) else digest(rows.to_csv(index=False))
    return columns


def predictions(file: Path) -> str:
    """Return a hash of the class probabilities that an exported model, or a client's model in it, predicts."""
    import raylt

    with np.load("pictures.npz") as arrays:
        images, client = arrays["x_test"], str(arrays["client_names"][0])
    try:
        model = raylt.load_model(file)
    except raylt.RayltError:  # it has several models
        model = raylt.load_model(file, client)
    return digest(model.predict(images).probabilities.tolist())


def do_kept_runs(folder: Path, fields: dict[str, dict[str, Any]]) -> Items:
    """Make run folders for later versions, use a copy of them, and record the results."""
    keep_runs(folder)
    return {"old runs": use_runs(folder, fields)}


# data


def write_pictures() -> None:
    """Write 8x8 images of 4 classes for 4 named clients.

    The last client lacks a class and has two test images.
    """
    rng, arrays = np.random.default_rng(0), {}
    for part, n in (("train", 96), ("test", 42)):
        y, ids = np.arange(n) % 4, np.arange(n) // 4 % 4
        ids[(y == 3) & (ids == 3)] = 0
        if part == "test":
            ids[np.flatnonzero(ids == 3)[2:]] = 1
        x = rng.integers(0, 160, (n, 8, 8, 1))
        for image, c in zip(x, y, strict=True):
            image[4 * (c // 2) :, 4 * (c % 2) :][:4, :4] += 60
        arrays |= {f"x_{part}": x.astype(np.uint8), f"y_{part}": y, f"id_{part}": ids}
    np.savez(
        "pictures.npz",
        **arrays,
        class_names=np.array(["up left", "up right", "low left", "low right"]),
        client_names=np.array(["wien", "graz", "linz", "bregenz"]),
    )


def write_scenes() -> None:
    """Write 16x16 images with label maps: blocks of 3 classes with unlabelled rows between them."""
    rng, arrays = np.random.default_rng(0), {}
    for part, n in (("train", 14), ("test", 6)):
        y = rng.choice(3, (n, 2, 2), p=(0.5, 0.3, 0.2)).astype(np.uint8).repeat(8, axis=1).repeat(8, axis=2)
        y[:, 7:9] = 255
        x = rng.integers(0, 60, (n, 16, 16, 3)) + 60 * np.where(y == 255, 2, y)[..., None]
        arrays |= {f"x_{part}": x.astype(np.uint8), f"y_{part}": y}
    np.savez("scenes.npz", **arrays, class_names=np.array(["a", "b", "c"]))


def write_images(folder: Path) -> None:
    """Write the test images as files into a folder for each client and class."""
    from PIL import Image

    with np.load("pictures.npz") as arrays:
        for number, (x, y, id) in enumerate(zip(*(arrays[f"{part}_test"] for part in ("x", "y", "id")), strict=True)):
            path = folder / str(arrays["client_names"][id]) / str(arrays["class_names"][y])
            path.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[..., 0]).save(path / f"{number}.png")


# recording


def prepare(folder: str) -> None:
    """Set up a process of the pool: work in `folder`, and check that raylt is imported from this source tree."""
    os.chdir(folder)
    import raylt

    if not Path(raylt.__file__).resolve().is_relative_to(ROOT):
        raise SystemExit(f"import raylt gives {raylt.__file__}, not the tree of {ROOT}")


def describe() -> dict[str, Any]:
    """Write the data of the runs; return the methods as `raylt methods` lists them."""
    write_pictures()
    write_scenes()
    return listed("methods")


def set_environment() -> None:
    """Give every process one thread, the source tree of this script, and tables of one width."""
    sys.path.insert(0, str(ROOT))
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "COLUMNS": "200",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def record(out: Path, runs: Path, jobs: int) -> None:
    """Record the present source tree."""
    began, items = time.monotonic(), {}
    set_environment()
    with (
        tempfile.TemporaryDirectory(prefix="gate-") as work,
        ProcessPoolExecutor(jobs, get_context("spawn"), initializer=prepare, initargs=(work,)) as pool,
    ):
        methods = pool.submit(describe).result()
        fields = {name: methods[name]["fields"] for name in KEPT}
        tasks: list[tuple[Any, ...]] = [(do_ray,), (do_kept_runs, runs, fields)]
        tasks += [(do_method, name, about) for name, about in methods.items()]
        tasks += [(do_segmentation, name) for name, about in methods.items() if "segmentation" in about["problems"]]
        tasks += [(do_settings, name) for name in SETTINGS]
        tasks += [
            (do_branches_to, list(methods)),
            (do_keys,),
            (do_commands,),
            (do_settings_listed,),
            (do_methods_listed,),
            (do_public_names,),
            (do_pages,),
            (do_records,),
        ]
        waiting = {pool.submit(*task): task for task in tasks}
        for number, future in enumerate(as_completed(waiting), 1):
            name = " ".join([waiting[future][0].__name__, *(a for a in waiting[future][1:] if isinstance(a, str))])
            print(f"{time.monotonic() - began:6.0f} s  {number}/{len(waiting)}  {name}", file=sys.stderr, flush=True)
            try:
                result = future.result()
            except Exception as error:
                result = {"tasks that failed": {name: f"failed: {type(error).__name__}: {error}"}}
            for item, found in result.items():
                items.setdefault(item, {}).update(found)
    content = {"commit": commit(), "seconds": round(time.monotonic() - began), "items": dict(sorted(items.items()))}
    out.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    for item, found in content["items"].items():
        leaves = flat(found)
        odd = Counter(
            str(value).partition(":")[0] for value in leaves.values() if str(value).startswith(("failed", "refused"))
        )
        odd["not as straight"] = (
            sum(value != "equals the straight run" for value in leaves.values()) if item.startswith("resume") else 0
        )
        print(f"{item:38} {len(leaves):6}  {', '.join(f'{n} {kind}' for kind, n in odd.items() if n)}")
    print(f"{out}: {content['seconds']} s; run folders are in {runs}")


def commit() -> str | None:
    """Return the commit of the source tree, with the suffix -dirty if files differ from it."""
    with suppress(OSError):
        return (
            subprocess.run(
                ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
                capture_output=True,
                text=True,
            ).stdout.strip()
            or None
        )


# comparing


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of a JSON value by path. A list counts as a leaf."""
    if not isinstance(value, dict) or (path and not value):
        return {path: value}
    return {
        key: leaf
        for name, inner in value.items()
        for key, leaf in flat(inner, f"{path} / {name}" if path else str(name)).items()
    }


def difference(before: Any, after: Any, additions_allowed: bool) -> str | None:
    """Describe how two leaves differ; return None if they are equal."""
    if before == after:
        return None
    if not (isinstance(before, list) and isinstance(after, list)):
        return f"{before} -> {after}"
    gone, new = [x for x in before if x not in after], [x for x in after if x not in before]
    if additions_allowed and not gone:
        return None
    return (
        "; ".join(f"{what} {', '.join(map(str, which))}" for what, which in (("without", gone), ("with", new)) if which)
        or "another order"
    )


def differences(item: str, before: dict[str, Any], after: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the number of leaves of an item, and a line for each leaf that differs."""
    then, now = flat(before), flat(after)
    additions_allowed = item == "public names"
    found = [f"{path}: gone" for path in then if path not in now]
    found += [f"{path}: new" for path in now if path not in then and not additions_allowed]
    found += [
        f"{path}: {text}"
        for path in then
        if path in now and (text := difference(then[path], now[path], additions_allowed)) is not None
    ]
    return len(then), found


def compare(before: Path, after: Path, old_runs: Path | None) -> int:
    """Compare two recordings item by item, print the result, and return the exit code."""
    then, now = (json.loads(file.read_text())["items"] for file in (before, after))
    if old_runs is not None:
        now["old runs, used by this tree"] = use_runs_apart(old_runs.resolve())
        then["old runs, used by this tree"] = then["old runs"]
    failed = False
    for item in sorted({*then, *now}):
        count, found = differences(item, then.get(item, {}), now.get(item, {}))
        failed |= bool(found)
        print(f"{item:38} {count:6}  {f'{len(found)} DIFFERENT' if found else 'equal'}")
        for line in found[:SHOWN]:
            print(f"    {line}")
        if len(found) > SHOWN:
            print(f"    and {len(found) - SHOWN} more")
    print("different" if failed else "all equal")
    return int(failed)


def use_runs_apart(folder: Path) -> dict[str, Any]:
    """Call `use_runs` in a separate process."""
    set_environment()
    with (
        tempfile.TemporaryDirectory(prefix="gate-") as work,
        ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare, initargs=(work,)) as pool,
    ):
        methods = pool.submit(describe).result()
        return pool.submit(use_runs, folder, {name: methods[name]["fields"] for name in KEPT}).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    recorder = commands.add_parser("record", help="record the present tree")
    recorder.add_argument("out", type=Path)
    recorder.add_argument(
        "--runs",
        type=Path,
        help="the folder of the kept runs, which is made anew; by default OUT without .json, and _runs",
    )
    recorder.add_argument("--jobs", type=int, default=1, help="processes at once")
    comparer = commands.add_parser("compare", help="compare two recordings; exit code 1 where they differ")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    comparer.add_argument("--old-runs", type=Path, help="kept runs of the first recording, for this tree to use")
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.before, given.after, given.old_runs)
    record(given.out, (given.runs or given.out.with_name(f"{given.out.stem}_runs")).resolve(), given.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
