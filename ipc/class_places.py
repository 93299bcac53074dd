"""Where a class of a file writes its attributes, its methods, and their arguments (pure)."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def class_places(text: str, name: str) -> dict[str, str]:
    """`LINE:COLUMN` (both from 1) of the class `name` in a Python file's text: its own, as "", and
    of each attribute and method, as "predict", and argument, as "predict.image"; of those of its
    bases in the file, too. Nothing of a file that is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    places: dict[str, str] = {}
    waiting = [name]
    while waiting:
        found = classes.pop(waiting.pop(0), None)
        if found is not None:
            own = {"": _at(found), **dict(_members(found))}
            places = {**own, **places}
            waiting += [base.id for base in found.bases if isinstance(base, ast.Name)]
    return places


def _members(found: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for node in found.body:
        match node:
            case ast.FunctionDef(name=name, args=args) | ast.AsyncFunctionDef(name=name, args=args):
                yield name, _at(node)
                for each in (*args.posonlyargs, *args.args, *args.kwonlyargs):
                    yield f"{name}.{each.arg}", _at(each)
            case ast.Assign(targets=targets):
                yield from ((each.id, _at(node)) for each in targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, _at(node)


def _at(node: ast.stmt | ast.arg) -> str:
    return f"{node.lineno}:{node.col_offset + 1}"
