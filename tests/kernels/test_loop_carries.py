"""Triton carries a variable from round to round of a loop if its value after the first round is another than before it.

So with ``last = item`` before a loop and in it, where ``item`` changes afterwards, ``last`` stays the first item: nothing
says so, and only a GPU would show it. Here the sources of all kernels are read for that.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dilated_attention_pytorch.backends

BACKENDS = Path(dilated_attention_pytorch.backends.__file__).parent
SOURCES = sorted(path for name in ("gpu", "hopper") for path in (BACKENDS / name / "kernels").glob("*.py"))


class Values(ast.NodeVisitor):
    """Follows which names stand for the same value; ``lost`` are those that a loop assigns but does not carry."""

    def __init__(self):
        self.value_of = {}
        self.lost = []

    def is_assigned(self, target, source):
        if isinstance(target, ast.Tuple):
            sources = source.elts if isinstance(source, ast.Tuple) else [None] * len(target.elts)
            read = [self.value(x) for x in sources]  # all before any is assigned
            self.value_of |= {x.id: value for x, value in zip(target.elts, read, strict=True)}
        elif isinstance(target, ast.Name):
            self.value_of[target.id] = self.value(source)

    def value(self, source):
        return self.value_of.get(source.id, source.id) if isinstance(source, ast.Name) else object()

    def visit_Assign(self, node):
        self.is_assigned(node.targets[0], node.value)

    def visit_AugAssign(self, node):
        self.is_assigned(node.target, None)

    def visit_AnnAssign(self, node):
        self.is_assigned(node.target, node.value)

    def visit_If(self, node):
        before = self.value_of
        branches = []
        for body in (node.body, node.orelse):
            self.value_of = dict(before)
            self.visit_all(body)
            branches.append(self.value_of)
        one, other = branches
        # Different ones come together in a new one.
        self.value_of = {x: one[x] if one.get(x) == other.get(x) else object() for x in one.keys() | other.keys()}

    def visit_loop(self, node):
        before = dict(self.value_of)
        self.visit_all(node.body)
        assigned = {
            x.id for part in node.body for x in ast.walk(part) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
        }
        self.lost += [(node.lineno, x) for x in sorted(assigned) if x in before and self.value_of[x] == before[x]]
        self.value_of |= {x: object() for x in assigned}

    visit_For = visit_While = visit_loop  # noqa: N815

    def visit_all(self, body):
        for part in body:
            self.visit(part)

    def visit_FunctionDef(self, node):
        self.value_of = {}
        if any(ast.unparse(x).partition("(")[0] in ("gluon.jit", "triton.jit") for x in node.decorator_list):
            self.visit_all(node.body)


def lost_values(source):
    values = Values()
    values.visit(ast.parse(source))
    return values.lost


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_loops_carry_what_they_assign(path):
    assert lost_values(path.read_text()) == []


def test_lost_values_are_found():
    loop = "@gluon.jit\ndef f(item, other):\n    {}\n    while item >= 0:\n        {}\n        item = step(item)\n"
    assert lost_values(loop.format("last = item", "last = item")) == [(4, "last")]
    assert lost_values(loop.format("a, last = other, item", "last, a = item, other")) == [(4, "a"), (4, "last")]
    assert lost_values(loop.format("last = item * 0 - 1", "last = item")) == []
    assert lost_values(loop.format("pass", "last = item")) == []  # local to the loop
