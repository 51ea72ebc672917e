"""Small Python functions with a doctest, checked by running them in a restricted subset of Python."""

import ast
import doctest
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .base import Example, Skill, Task


@dataclass(frozen=True)
class _Family:
    """Functions `name_N`: what they do in words, their return expression, and the arguments a
    doctest may show."""

    name: str
    purpose: str
    expression: str
    argument: str
    sizes: range
    draw: Callable[[random.Random, int], Any]

    def code(self, size: int, rng: random.Random) -> str:
        value = self.draw(rng, size)
        result = self.apply(size, value)
        return (
            f"def {self.name}_{size}({self.argument}):\n"
            f'    """Return {self.argument} {self.purpose.format(size)}.\n\n'
            f"    >>> {self.name}_{size}({value!r})\n    {result!r}\n"
            f'    """\n    return {self.expression.format(size)}\n'
        )

    def apply(self, size: int, value: Any) -> Any:
        return eval(
            self.expression.format(size), {self.argument: value}
        )  # our own expressions only


def _small(rng: random.Random, size: int) -> int:
    return rng.randint(1, 3)


def _beyond(rng: random.Random, size: int) -> int:
    return size + rng.randint(1, 3)


def _around(rng: random.Random, size: int) -> int:
    return max(0, size + rng.choice((-2, -1, 1, 2)))


def _digits(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(1, 9) for _ in range(3)]


def _longer(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(1, 9) for _ in range(size + rng.randint(1, 2))]


_FAMILIES = {
    family.name: family
    for family in (
        _Family("add", "plus {}", "x + {}", "x", range(2, 60), _small),
        _Family("subtract", "minus {}", "x - {}", "x", range(2, 60), _beyond),
        _Family("multiply", "times {}", "x * {}", "x", range(2, 10), _small),
        _Family(
            "greater_than", "compared: is it greater than {}", "x > {}", "x", range(2, 60), _around
        ),
        _Family("less_than", "compared: is it less than {}", "x < {}", "x", range(2, 60), _around),
        _Family("equals", "compared: is it equal to {}", "x == {}", "x", range(2, 60), _around),
        _Family("at_least", "raised to at least {}", "max(x, {})", "x", range(2, 60), _around),
        _Family("at_most", "cut to at most {}", "min(x, {})", "x", range(2, 60), _around),
        _Family(
            "add_to_all",
            "with {} added to each",
            "[x + {} for x in items]",
            "items",
            range(2, 10),
            _digits,
        ),
        _Family(
            "keep_above",
            "without those up to {}",
            "[x for x in items if x > {}]",
            "items",
            range(2, 9),
            _digits,
        ),
        _Family("first", "cut to the first {}", "items[:{}]", "items", range(2, 6), _longer),
        _Family("skip", "without the first {}", "items[{}:]", "items", range(2, 6), _longer),
    )
}


def _draw_function(rng: random.Random) -> Task:
    family = rng.choice(list(_FAMILIES.values()))
    size = rng.choice(family.sizes)
    slots = {
        "name": f"{family.name}_{size}",
        "argument": family.argument,
        "purpose": family.purpose.format(size),
    }
    return Task(
        "function", f"```python\n{family.code(size, rng)}```", slots, facts=(family.name, str(size))
    )


_BUILTINS = {
    "max": max,
    "min": min,
    "len": len,
    "sum": sum,
    "sorted": sorted,
    "bool": bool,
    "list": list,
}
_NODES = (
    ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.Name, ast.Constant, ast.BinOp,
    ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.ListComp, ast.comprehension, ast.Subscript,
    ast.Slice, ast.List,
)  # fmt: skip


def _harmless(expression: ast.expr) -> bool:
    """Whether evaluating the expression is fast and without side effects: no nested loops, no large
    products."""
    nodes = list(ast.walk(expression))
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return (
        all(
            isinstance(node, _NODES) and not isinstance(node, (ast.Pow, ast.LShift))
            for node in nodes
        )
        and all(isinstance(value, int) and value <= 1000 for value in constants)
        and all(isinstance(called, ast.Name) and called.id in _BUILTINS for called in calls)
        and sum(isinstance(node, (ast.comprehension, ast.Mult)) for node in nodes) <= 1
    )


def _definition(reply: str, name: str) -> ast.FunctionDef | None:
    """The reply's function, if it is just a documented return of a harmless expression."""
    fenced = re.search(r"```(?:python)?\n(.*?)```", reply, re.DOTALL)
    try:
        body = ast.parse(fenced[1] if fenced else reply).body
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # what ast.parse may raise on odd text
        return None
    match body:
        case [
            ast.FunctionDef(
                name=found,
                args=arguments,
                body=[
                    ast.Expr(value=ast.Constant(value=str())),
                    ast.Return(value=ast.expr() as value),
                ],
                decorator_list=[],
                returns=None,
            ) as function
        ] if found == name and _harmless(value):
            # One bare parameter: defaults and annotations would be evaluated too.
            return function if re.fullmatch(r"\w+", ast.unparse(arguments)) else None
    return None


def _shows_only_calls(examples: list[doctest.Example], name: str) -> bool:
    """Whether each doctest line is a call of the function with one literal."""
    return all(
        re.fullmatch(rf"{name}\((-?\d{{1,4}}|\[[\d, ]*\])\)\s*", example.source)
        for example in examples
    )


def _trials(argument: str, size: int) -> list[Any]:
    """Arguments on which a function of a neighbouring size gives another result."""
    if argument == "x":
        return [0, 1, size - 1, size, size + 1, size + 9]
    return [list(range(10)), [9, 3, 1, 7]]


def _judge_function(example: Example, reply: str) -> bool:
    """The function must pass its own doctest and give its family's results on our arguments."""
    family, size = _FAMILIES[example.facts[0]], int(example.facts[1])
    name = f"{family.name}_{size}"
    function = _definition(reply, name)
    if function is None:
        return False
    examples = doctest.DocTestParser().get_examples(ast.get_docstring(function) or "")
    if not examples or not _shows_only_calls(examples, name):
        return False
    space: dict[str, Any] = {"__builtins__": dict(_BUILTINS)}
    exec(
        compile(ast.Module([function], []), "<reply>", "exec"), space
    )  # only a harmless expression is inside
    try:
        if any(
            space[name](value) != family.apply(size, value)
            for value in _trials(family.argument, size)
        ):
            return False
    except Exception:  # whatever the reply's code raises, it is a wrong answer
        return False
    test = doctest.DocTest(examples, space, name, None, None, None)
    return doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None).failed == 0


SKILLS = (Skill("function", _draw_function, _judge_function),)
