"""The docstrings below the fields of a settings class: the help of a field's flag, and its line in a page."""

from __future__ import annotations

import ast
import functools
import inspect


@functools.cache
def described(cls: type) -> dict[str, str]:
    """What is written below each field, as one line; fields without a docstring are left out.

    Python keeps no docstrings of attributes, so they come from the source. Where that is not at hand there are none.
    """
    try:
        (body,) = ast.parse(inspect.getsource(cls)).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                found[field.target.id] = " ".join(text.split())
    return found
