"""Finds the part of a value that cannot be pickled, and the file and line that use it."""

import dis
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

MAX_DEPTH = 8  # Levels of functions that use other functions.
REMEDY = "Create it inside the function that uses it, or at the top level of a module with its own file."

Dumps = Callable[[Any], bytes]


def fault_in(value: Any, dumps: Dumps) -> str | None:
    """Describe the innermost part of a value that cannot be pickled, in one line; return None if there is none."""
    for owner, part in _parts(value):
        refusal = _refusal(part, dumps)
        if refusal is None:
            continue
        if inspect.isclass(part):
            return _fault_in_class(part, dumps) or f"{owner} cannot be sent to another process ({refusal})"
        if isinstance(part, FunctionType | MethodType):
            inner = _fault_in_function(part, owner, dumps, set())
            return inner or f"{owner} cannot be sent to another process ({refusal})"
        inner = fault_in(part, dumps) if _has_parts(part) else None
        return inner or _sentence(f"{owner} is", part, refusal)
    return None


def _sentence(beginning: str, part: Any, refusal: str) -> str:
    return f"{beginning} a {type(part).__name__}, which cannot be sent to another process ({refusal}). {REMEDY}"


def _has_parts(part: Any) -> bool:
    return hasattr(part, "__dict__") or isinstance(part, tuple | list | dict)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the class of a value and the value's parts, each with a description."""
    name = type(value).__name__
    if isinstance(value, tuple | list):
        yield from ((f"item {index} of a {name}", each) for index, each in enumerate(value))
        return
    if isinstance(value, dict):
        yield from ((str(key), each) for key, each in value.items())
        return
    yield name, type(value)
    if hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        yield getattr(value.func, "__name__", "a function"), value.func
        yield from ((f"argument {key}", each) for key, each in value.keywords.items())
        yield from ((f"argument {index}", each) for index, each in enumerate(value.args))
    for key, each in list(getattr(value, "__dict__", {}).items()):
        yield f"{name}.{key}", each


def _fault_in_class(kind: type, dumps: Dumps) -> str | None:
    for owner in kind.__mro__:
        if owner is object or _refusal(owner, dumps) is None:
            continue
        for name, part in list(vars(owner).items()):
            for function in _functions(part):
                if (fault := _fault_in_function(function, f"{owner.__name__}.{name}", dumps, set())) is not None:
                    return fault
        for name, part in list(vars(owner).items()):
            if name.startswith(("__", "_abc")) or _functions(part):
                continue
            refusal = _refusal(part, dumps)
            if refusal is not None:
                return _sentence(f"{_line_of(owner)}{owner.__name__}.{name} is", part, refusal)
    return None


def _functions(part: Any) -> list[FunctionType]:
    if isinstance(part, property):
        return [each for each in (part.fget, part.fset, part.fdel) if isinstance(each, FunctionType)]
    part = getattr(part, "__func__", part)
    return [part] if isinstance(part, FunctionType) else []


def _fault_in_function(function: Any, owner: str, dumps: Dumps, seen: set[int], deep: int = 0) -> str | None:
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None or id(function) in seen or deep > MAX_DEPTH:
        return None
    seen.add(id(function))
    for name, line, part in _used(function, code):
        refusal = None if isinstance(part, ModuleType) else _refusal(part, dumps)
        if refusal is None:
            continue
        if isinstance(part, FunctionType):
            inner = _fault_in_function(part, part.__name__, dumps, seen, deep + 1)
        else:
            inner = _fault_in_class(part, dumps) if inspect.isclass(part) else None
        return inner or _sentence(f"{Path(code.co_filename).name}:{line}: {owner} uses {name},", part, refusal)
    return None


def _used(function: FunctionType, code: CodeType) -> Iterator[tuple[str, int | None, Any]]:
    """Yield the globals, closure variables and defaults that a function uses, as name, line and value."""
    closed = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
    for inner in _codes(code):
        for step in dis.get_instructions(inner):
            line = step.positions.lineno if step.positions else None
            name = step.argval
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and name in function.__globals__:
                yield name, line, function.__globals__[name]
            elif step.opname in ("LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF") and name in closed:
                try:
                    yield name, line, closed[name].cell_contents
                except ValueError:  # not set yet
                    continue
    for index, part in enumerate(function.__defaults__ or ()):
        yield f"default {index}", code.co_firstlineno, part


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _line_of(kind: type) -> str:
    """Return the file and first line of a class, followed by a colon; "" if the source is unknown."""
    try:
        return f"{Path(inspect.getsourcefile(kind) or '').name}:{inspect.getsourcelines(kind)[1]}: "
    except (OSError, TypeError):
        return ""


def _refusal(part: Any, dumps: Dumps) -> str | None:
    """Return the error from pickling a part, in one line; None if the part can be pickled."""
    try:
        dumps(part)
    except Exception as error:  # the user's __reduce__ may raise any exception
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None
