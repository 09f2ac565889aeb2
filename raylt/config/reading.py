"""Reading of a configuration from a YAML file, `key=value` overrides or keyword arguments.

Mistakes raise a `ConfigError`. A keyword names a section (`local={"lr": 0.1}`), a source (`data="digits"`), or a
setting by the last part of its key. Recipes are YAML files under raylt/recipes, named by their path below that folder.
"""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from raylt.config.sections import UNSHOWN_BOUNDS, Config, DataConfig, allowed, branches, settings
from raylt.config.yaml_text import parse, read_file
from raylt.disk import as_path
from raylt.errors import ConfigError, did_you_mean, spoken

FOLDER = Path(__file__).parents[1] / "recipes"
DEMO = "demo"  # Recipe for `raylt run` without settings.


def recipes() -> dict[str, str]:
    """Return the names of all recipes (such as sfd/cifar10_if100_alpha0.05_k10), each with its first line."""
    return {name: file.read_text().partition("\n")[0].lstrip("# ") for name, file in _recipe_files().items()}


def recipe(name: str) -> Path:
    """Return the path of the named recipe's file.

    Raises:
        ConfigError: The recipe is unknown.
    """
    files = _recipe_files()
    name = name.removesuffix(".yaml")
    if name not in files:
        raise ConfigError(
            f"recipe:{name}: unknown recipe. {did_you_mean(name, files, 'recipe:')}Give one that raylt recipes lists.",
            code="config.unknown-name",
            key="recipe",
            value=name,
        )
    return files[name]


def _recipe_files() -> dict[str, Path]:
    """Return the recipes' files by the names of the recipes."""
    return {str(file.relative_to(FOLDER).with_suffix("")): file for file in sorted(FOLDER.rglob("*.yaml"))}


def load(path: Path | str | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration in a YAML file, changed by `key=value` overrides.

    The file or the overrides must name the method.

    Args:
        path: Path of the file, or recipe:NAME for a recipe of raylt; None reads no file.
        overrides: Settings as `key=value`, with the value in YAML. The last override of a key counts.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, a value has the wrong type or is out of range, or no
            method is named.
    """
    return check(Config, read(path, overrides))


def load_data(path: Path | str | None = None, overrides: Sequence[str] = ()) -> DataConfig:
    """Load only the data section of a configuration, which need not name a method."""
    return check(Config, read(path, overrides) | {"method": "none"}).data


def read(path: Path | str | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read the settings in a file, changed by overrides, without checking them; see `load`."""
    tree = {} if path is None else _read_file(path)
    override(tree, overrides)
    return tree


def override(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply `key=value` overrides to a mapping of settings, in place.

    Raises:
        ConfigError: `overrides` is a string instead of a list, or an override cannot be applied.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides: is a string ({overrides!r}). Give a list, as in overrides=[{overrides!r}].",
            code="config.wrong-type",
            key="overrides",
            value=overrides,
        )
    # the method first: its name drops fields of another method, but must not drop fields of the same call
    for text in sorted(overrides, key=lambda text: not text.startswith(("method=", "method.name="))):
        _set(tree, text)


def overlay(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Apply a mapping of changes to a mapping of settings, in place.

    The value of a section is a mapping, and changes only the settings that it names.
    """
    leaves: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping) and not (key == "method" and "name" in value):
            leaves |= {f"{key}.{inner}": each for inner, each in value.items()}
        else:
            leaves["method" if key == "method.name" else key] = dict(value) if isinstance(value, Mapping) else value
    for key in sorted(leaves, key=lambda key: key != "method"):
        assign(tree, key, leaves[key])


def _read_file(path: Path | str) -> dict[str, Any]:
    of_recipe = str(path).startswith("recipe:")
    path = recipe(str(path).removeprefix("recipe:")) if of_recipe else as_path(path, "path")
    tree = read_file(path)
    tree = {} if tree is None else tree  # an empty file
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: is not a mapping of settings (a {type(tree).__name__}). Use lines such as method: sfd.",
            code="file.malformed",
            path=str(path),
        )
    return _nested(tree, path)


def _nested(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a file's settings without empty sections, and with dotted keys, as in studies, moved into sections.

    Raises:
        ConfigError: A setting is in the file twice.
    """
    dotted = {key: value for key, value in tree.items() if "." in str(key)}
    nested = {
        key: value for key, value in tree.items() if key not in dotted and not (value is None and _is_section(key))
    }
    if nested.get("method", "") is None and any(key.startswith("method.") for key in dotted):
        del nested["method"]
    for key in dotted:
        section, _, name = key.partition(".")
        below = nested.get(section)
        below = {"name": below} if section == "method" and isinstance(below, str) else below
        if isinstance(below, dict) and name in below:
            raise ConfigError(
                f"{path}: {key} is in the file twice, also as {name} below {section}. Remove one of them.",
                code="file.malformed",
                path=str(path),
                key=key,
            )
    if "method.name" in dotted:  # `overlay` would replace the fields in the section
        given = nested.get("method")
        nested["method"] = {"name": dotted.pop("method.name"), **(given if isinstance(given, dict) else {})}
    overlay(nested, dotted)
    return nested


def _is_section(key: str) -> bool:
    field = Config.model_fields.get(key)
    kind = None if field is None else field.annotation
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def check(kind: type[BaseModel], tree: dict[str, Any], prefix: str = "") -> Any:
    """Build a pydantic model from a mapping.

    Args:
        kind: Class of the model.
        tree: Settings by name, with a mapping for each section.
        prefix: Prefix of the keys in errors.

    Raises:
        ConfigError: A value is wrong. The error describes the first mistake, with its key and value.
    """
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _refusal(kind, _first_of(error), prefix) from None


def assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the setting with a dotted key in a nested mapping of settings.

    Args:
        tree: The mapping, which is changed in place.
        key: Dotted key of the setting, such as "local.lr".
        value: The new value; a path is stored as text.

    Raises:
        ConfigError: A part of the key before its last one is not a section.
    """
    value = str(value) if isinstance(value, Path) else value
    whole = key
    *parents, last = key.split(".")
    for name in parents:
        below = tree.setdefault(name, {})
        if name == "method" and isinstance(below, str):  # method: fedprox, then method.mu=0.1
            below = tree[name] = {"name": below}
        if not isinstance(below, dict):
            raise ConfigError(
                f"{whole}: unknown setting, because {name} has a single value ({_short(below)}). Give {name} a value, "
                "or use a setting of a section.",
                code="config.unknown-key",
                key=whole,
            )
        tree = below
    if key == "method" and isinstance(value, str):  # another method: the fields of the previous method do not apply
        before = tree.get("method")
        fields = before if isinstance(before, dict) else {}
        value = {"name": value} | (fields if fields.get("name", value) == value else {})  # unnamed fields are its own
    tree[last] = value


def _set(tree: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    key = "method" if key == "method.name" else key
    if not equals or not key:
        raise ConfigError(
            f"override: does not have the form key=value ({setting!r}). Give it as in federation.rounds=50.",
            code="config.malformed",
            value=setting,
        )
    if text.lstrip().startswith("#"):
        raise ConfigError(
            f"{key}: the value is a YAML comment ({_short(text)}). Quote it.",
            code="config.malformed",
            key=key,
            value=text,
        )
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{key}: is not a YAML value ({_short(text)}: {error}). Quote it.",
            code="config.malformed",
            key=key,
            value=text,
        ) from None
    if isinstance(value, dict) and list(value.values()) == [None] and text.rstrip().endswith(":"):
        value = text.strip()  # such as model=torchvision:
    assign(tree, key, value)


def _short(value: Any) -> str:
    """Return a value shortened for a message."""
    try:
        return textwrap.shorten(repr(value), 200, placeholder=" ...")
    except (ValueError, RecursionError):  # a number with thousands of digits, or a mapping that contains itself
        return f"a {type(value).__name__}"


def _first_of(error: ValidationError) -> Any:
    """Return the first mistake, or a missing setting if there is no other: its name may be the one that is mistyped."""
    return min(error.errors(), key=lambda mistake: mistake["type"] == "missing")


def _refusal(kind: type[BaseModel], mistake: Any, prefix: str) -> ConfigError:
    """Convert a mistake that pydantic found to a ConfigError: key, what is wrong, value, what to do."""
    key, model, field = _place(kind, mistake["loc"])
    key = prefix + key
    if mistake["type"] == "missing" and isinstance(mistake["loc"][-1], int):  # an item of a list
        mistake = mistake | {"type": "too_short"}
    code = next((code for start, (code, _) in MISTAKES.items() if mistake["type"].startswith(start)), "")
    code = code or "config.wrong-type"
    if kind is Config and mistake["type"] == "missing" and mistake["loc"] == ("method",):
        example = spoken("method=sfd, or change the demonstration with recipe:demo", "raylt.run('sfd')")
        return ConfigError(
            f"method: is missing. Give one that raylt methods lists, as in {example}.", code=code, key=key
        )
    if mistake["type"] == "extra_forbidden":
        return ConfigError(_unknown_key(key, prefix, model), code=code, key=key)
    value = mistake["input"]
    shown = "" if mistake["type"] == "missing" else f" ({_short(value)})"
    message = f"{key}: {reason_of(mistake)}{shown}.{_remedy(field, mistake)}"
    plain = value if isinstance(value, str | int | float | None) else _short(value)
    return ConfigError(message, code=code, key=key, value=plain)


# Prefix of a pydantic error type: (error code, reason in raylt's words). With "", the reason is pydantic's message.
MISTAKES: dict[str, tuple[str, str]] = {
    "extra_forbidden": ("config.unknown-key", ""),
    "missing": ("config.missing", "is missing"),
    "no_name": ("config.wrong-type", ""),
    "conflict": ("config.conflict", ""),
    "literal_error": ("config.unknown-name", "is not an allowed value"),
    "greater_than": ("config.out-of-range", "is too small"),
    "less_than": ("config.out-of-range", "is too large"),
    "finite": ("config.out-of-range", "is not finite"),
    "int": ("config.wrong-type", "is not a whole number"),
    "float": ("config.wrong-type", "is not a number"),
    "bool": ("config.wrong-type", "is not true or false"),
    "string_type": ("config.wrong-type", "is not text"),
    "string_pattern": ("config.out-of-range", "has a character that is not allowed"),
    "string_too_long": ("config.out-of-range", "is too long"),
    "list": ("config.wrong-type", "is not a list"),
    "tuple": ("config.wrong-type", "is not a list"),
    "too_short": ("config.wrong-type", "has too few values"),
    "too_long": ("config.wrong-type", "has too many values"),
    "model": ("config.wrong-type", "is not a mapping of settings"),
    "dict": ("config.wrong-type", "is not a mapping"),
}


def reason_of(mistake: Any) -> str:
    """Return the reason why a value is wrong, in raylt's words or, if there are none, in pydantic's."""
    for start, (_, reason) in MISTAKES.items():
        if reason and mistake["type"].startswith(start):
            return reason
    message: str = mistake["msg"].removeprefix("Value error, ").rstrip(".")
    return message[0].lower() + message[1:]


def _remedy(field: FieldInfo | None, mistake: Any) -> str:
    """Return a sentence with the values that a field accepts, or "" if there is no field."""
    if field is None:
        return ""
    values = allowed(field)
    most = mistake.get("ctx", {}).get("le")
    if most in UNSHOWN_BOUNDS:  # `allowed` leaves it out
        values += f", at most {most:,}"
    is_list = ", " in values and not values.startswith(("[", "a ", "the "))
    return f" Give {'one of: ' if is_list else ''}{values}."


def _place(kind: type[BaseModel], location: Sequence[str | int]) -> tuple[str, type[BaseModel], FieldInfo | None]:
    """Return the dotted key of a mistake, the section that contains it, and its field, if any.

    Pydantic appends the branch of a union or the index of an item to a field's name; the key omits them.
    """
    names: list[str] = []
    model, field = kind, None
    for name in map(str, location):
        names.append(name)
        field = model.model_fields.get(name)
        kinds = branches(field.annotation) if field else ()
        inner = next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)
        if inner is None:
            break
        model = inner
    return ".".join(names), model, field


def _unknown_key(key: str, prefix: str, model: type[BaseModel]) -> str:
    """Return the message for an unknown key, with the most similar key and all keys of the section."""
    if not model.model_fields:
        return f"{key}: unknown setting, because {getattr(model, 'name', model.__name__)} has no fields. Leave it out."
    return f"{key}: unknown setting. {_hint(key, prefix, model)}Give one of: {', '.join(model.model_fields)}."


def _hint(key: str, prefix: str, model: type[BaseModel]) -> str:
    """Return a question such as "Did you mean X?" for an unknown key, or "" if no key is similar."""
    section, _, name = key.rpartition(".")
    below = f"{section}." if section else ""
    hint = did_you_mean(name, model.model_fields, below)
    longer = [field for field in model.model_fields if field.endswith(f"_{name}")]  # retrain_lr for lr
    if not hint and len(longer) == 1:
        return did_you_mean(longer[0], longer, below)
    elsewhere = [] if prefix or hint else [other for other, _ in settings() if other.rpartition(".")[2] == name]
    if elsewhere:
        return did_you_mean(elsewhere[0], elsewhere)
    return hint if prefix or section else f"{hint}For a field of the method, use method.{name}. "


def apply(tree: dict[str, Any], keywords: Mapping[str, Any], fields: Collection[str] = ()) -> None:
    """Apply keyword arguments to a mapping of settings, in place.

    The value of a section is a mapping of the settings to change; `data` may also be the name of a source. Any other
    keyword is the last part of a setting's key, such as `rounds` for federation.rounds, or a field of the method.

    Args:
        tree: The settings.
        keywords: Values by keyword.
        fields: Names of the method's fields.

    Raises:
        ConfigError: A keyword matches no setting or several settings, or a setting is given twice.
    """
    by_key: dict[str, Any] = {}
    for keyword, value in keywords.items():
        key = _key(keyword, value, fields)
        if key in by_key:
            raise _given_twice(key, value)
        by_key[key] = value
    for key, value in by_key.items():
        section, _, name = key.rpartition(".")
        below = by_key.get(section)
        if isinstance(below, Mapping) and name in below:
            raise _given_twice(key, value)
    overlay(tree, by_key)


def _given_twice(key: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{key}: is given twice, in two arguments ({value!r}). Leave one out.",
        code="config.conflict",
        key=key,
        value=value,
    )


def _key(name: str, value: Any, fields: Collection[str]) -> str:
    """Return the full key of the setting that a keyword argument names."""
    if name in Config.model_fields:
        return "data.source" if name == "data" and isinstance(value, str) else name
    keys = [key for key, _ in settings() if key.endswith(f".{name}")]
    keys += [f"method.{name}"] if name in fields else []
    if len(keys) > 1:
        ways = (f"{section}={{'{name}': ...}}" for section in (key.partition(".")[0] for key in keys))
        raise ConfigError(
            f"{name}: several settings have this name ({', '.join(keys)}). Use {' or '.join(ways)}.",
            code="config.unknown-key",
            key=name,
        )
    if not keys:
        names = [*(key.rpartition(".")[2] for key, _ in settings()), *fields]
        raise ConfigError(
            f"{name}: unknown setting. {did_you_mean(name, names)}Give one that raylt settings or raylt methods lists.",
            code="config.unknown-key",
            key=name,
        )
    return keys[0]
