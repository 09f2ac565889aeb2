"""Find and replace Python code by its syntax tree, so that layout, quotes and comments do not matter."""

import ast
import functools
import textwrap
from collections.abc import Iterator

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Code = ast.expr | ast.stmt


class NotFoundOnce(Exception):
    """The code to replace occurs never or several times."""


def replace(source: str, function: str, old: str, new: str) -> str:
    """Return `source` with `new` in place of `old`, which must occur once in `function`.

    Where both are an expression, the whole expression `old` is replaced. Otherwise both are statements, and `old` is
    replaced where its statements follow each other in one block. Parts of an f-string are not searched.

    Args:
        function: Qualified name as "Experiment.step", the name of a class, or "" for the whole module.
    """
    before, after = parse(old).body, parse(new).body
    scopes = definitions(source, function)
    if _is_expression(before) and _is_expression(after):
        found = [place for scope in scopes for place in _expressions(scope, before[0].value)]
        code = textwrap.dedent(new).strip()
        code = code if code.startswith("*") else f"({code})"
    else:
        found = [place for scope in scopes for place in _runs(scope, before)]
        code = textwrap.dedent(new).strip()
    if len(found) != 1:
        raise NotFoundOnce(f"the old code occurs {len(found)} times in {function or 'the module'}")
    start, end = span(source, *found[0])
    code = code.replace("\n", "\n" + " " * found[0][0].col_offset)
    return (source.encode()[:start] + code.encode() + source.encode()[end:]).decode()


@functools.cache
def parse(code: str) -> ast.Module:
    """Return the syntax tree of a source or a snippet. A snippet may be indented as a whole."""
    return ast.parse(textwrap.dedent(code).strip() + "\n") if code[:1].isspace() else ast.parse(code)


def definitions(source: str, name: str) -> list[ast.AST]:
    """Return the functions and classes with a qualified name, or the module for ""."""
    return [node for qualified, node in named(parse(source)) if qualified == name] if name else [parse(source)]


def named(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every function and class with its qualified name, outer ones first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, DEFINITIONS):
            yield prefix + node.name, node
            yield from named(node, f"{prefix}{node.name}.")
        else:
            yield from named(node, prefix)


def span(source: str, first: Code, last: Code) -> tuple[int, int]:
    """Return where the code from one node to another starts and ends in the encoded source."""
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)
    start, end = (sum(map(len, lines[: number - 1])) for number in (first.lineno, last.end_lineno))
    return start + first.col_offset, end + last.end_col_offset


def _is_expression(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, except the parts of f-strings: Python 3.11 gives these wrong positions."""
    yield tree
    if not isinstance(tree, ast.JoinedStr):
        for node in ast.iter_child_nodes(tree):
            yield from _nodes(node)


def _expressions(scope: ast.AST, wanted: ast.expr) -> Iterator[tuple[Code, Code]]:
    dumped = ast.dump(wanted)
    for node in _nodes(scope):
        if isinstance(node, ast.expr) and type(node) is type(wanted) and ast.dump(node) == dumped:
            yield node, node


def _runs(scope: ast.AST, wanted: list[ast.stmt]) -> Iterator[tuple[Code, Code]]:
    dumped = [ast.dump(statement) for statement in wanted]
    for node in _nodes(scope):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(block, list) or _is_elif(node, block):
                continue
            dumps = [ast.dump(statement) for statement in block]
            for start in range(len(dumps) - len(dumped) + 1):
                if dumps[start : start + len(dumped)] == dumped:
                    yield block[start], block[start + len(dumped) - 1]


def _is_elif(node: ast.AST, block: list[ast.stmt]) -> bool:
    """Return whether a block is an `elif`, whose text cannot be replaced by that of an `if`."""
    return (
        isinstance(node, ast.If)
        and block is node.orelse
        and len(block) == 1
        and isinstance(block[0], ast.If)
        and block[0].col_offset == node.col_offset
    )
