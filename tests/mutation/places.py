"""Find lines of source code into which a plausible fault can be put by changing that line only.

Mutations are found in the syntax tree and applied to the text, so that the rest of the file does not change.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import hashlib
from collections.abc import Iterator

REDUCTIONS = {"all_reduce_sum", "all_reduce_max", "host_max", "reduce_from", "broadcast"}
# Groups that replace each group. Without context parallelism dp_cp is dp.
GROUPS = {
    "tp": ("dp", "pp"),
    "pp": ("tp", "dp"),
    "dp": ("tp", "pp"),
    "dp_cp": ("tp", "pp"),
    "world": ("dp", "pp"),
    "embedding": ("dp", "tp"),
}
# Methods and functions that synchronize processes, threads, streams or disks.
WAITS = {
    "wait", "wait_stream", "record_stream", "synchronize", "join", "barrier", "finish",
    "sync", "sync_all", "sync_params", "fsync", "flush", "rename", "replace", "replace_text", "check",
}  # fmt: skip
OPPOSITES = {"min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax"}
OPPOSITES |= {opposite: name for name, opposite in OPPOSITES.items()}
COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
# Calls that only log or collect messages.
LOGGING_CALLS = {
    "advance", "append", "debug", "error", "exception", "info", "log", "log_times", "print", "report_fatal", "warn",
    "warning", "write",
}  # fmt: skip

Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault in one line of a file.

    Attributes:
        path: path of the file, relative to the checkout.
        line: line number, from 1.
        kind: one of the kinds that `mutations` finds.
        occurrence: number of lines before this one with the same text and the same fault.
    """

    path: str
    line: int
    kind: str
    before: str
    after: str
    occurrence: int = 0

    @property
    def area(self) -> str:
        """Package within megatron/, or "base" for its own modules."""
        parts = self.path.split("/")
        return parts[1] if len(parts) > 2 else "base"

    @property
    def id(self) -> str:
        """Identifier that does not depend on the other lines of the file."""
        key = (self.path, self.kind, self.before.strip(), self.after.strip(), str(self.occurrence))
        return hashlib.sha256("\0".join(key).encode()).hexdigest()[:10]

    @property
    def diff(self) -> str:
        return (
            f"{self.path}:{self.line}  {self.kind}\n    - {self.before.strip()}\n    + {self.after.strip()}"
        )

    def apply(self, source: str) -> str:
        """Source of the file with the fault."""
        lines = source.splitlines(keepends=True)
        assert lines[self.line - 1].rstrip("\n") == self.before
        lines[self.line - 1] = self.after + "\n"
        return "".join(lines)


def mutations(path: str, source: str) -> list[Mutation]:
    """Find all mutations of a file. Some are not valid Python: see `parses`."""
    lines = source.splitlines()
    changes: set[tuple[int, str, str, str]] = set()
    for kind, node, text in _Finder(source).edits():
        if node.lineno != node.end_lineno:
            continue
        before = lines[node.lineno - 1]
        encoded = before.encode()
        after = (encoded[: node.col_offset] + text.encode() + encoded[node.end_col_offset :]).decode()
        # Tests on a CPU do not cover code for GPUs.
        if after != before and "cuda" not in before and "nccl" not in before:
            changes.add((node.lineno, kind, before, after))
    occurrences: collections.Counter[tuple[str, str, str]] = collections.Counter()
    found = []
    for line, kind, before, after in sorted(changes):
        same = kind, before.strip(), after.strip()
        found.append(Mutation(path, line, kind, before, after, occurrences[same]))
        occurrences[same] += 1
    return found


def parses(mutation: Mutation, source: str) -> bool:
    """True if the mutated file is valid Python."""
    try:
        ast.parse(mutation.apply(source))
    except SyntaxError:
        return False
    return True


@dataclasses.dataclass
class _Span:
    """Part of a line, for an edit that is not a node of the syntax tree."""

    lineno: int
    end_lineno: int
    col_offset: int
    end_col_offset: int


Edit = tuple[str, "ast.AST | _Span", str]


class _Finder:
    """Finds kind, location and new text of each mutation of a file."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.lines = [line.encode() for line in source.splitlines()]

    def edits(self) -> Iterator[Edit]:
        for node in _executed(self.tree, in_init=False):
            yield from self._in_statement(node) if isinstance(node, ast.stmt) else self._in_expression(node)

    def _text(self, node: ast.AST) -> str:
        """Text of a node. Nodes of several lines are not edited, so their first line suffices."""
        end = node.end_col_offset if node.lineno == node.end_lineno else None
        return self.lines[node.lineno - 1][node.col_offset : end].decode()

    def _in_statement(self, node: ast.stmt) -> Iterator[Edit]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            kind = "missing wait" if _name(node.value.func).strip("_") in WAITS else "missing call"
            yield kind, node, "pass"
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets):
                yield "missing assignment", node, "pass"
        elif isinstance(node, ast.Raise) and (node.exc is None or node.cause is not None):
            yield "weaker check", node, "pass"
        elif isinstance(node, ast.Raise):
            # The exception is created but not raised: a change of one line even if the message takes several.
            end = node.col_offset + len("raise ")
            yield "weaker check", _Span(node.lineno, node.lineno, node.col_offset, end), ""
        elif isinstance(node, ast.If):
            yield "negated condition", node.test, self._negated(node.test)

    def _in_expression(self, node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.Call):
            yield from self._in_call(node)
        elif isinstance(node, ast.Attribute) and _name(node.value) == "mesh":
            for group in GROUPS.get(node.attr, ()):
                yield "another group", node, f"{self._text(node.value)}.{group}"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and _is_one(node.right):
            yield "off by one", node, self._text(node.left)
        elif isinstance(node, ast.Slice):
            bound = node.lower or node.upper
            if bound is not None:
                yield "off by one", bound, f"{self._text(bound)} + 1"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            if type(node.ops[0]) in COMPARISONS:
                yield from self._between(left, right, *COMPARISONS[type(node.ops[0])])
            if isinstance(right, ast.Constant) and type(right.value) is int:
                yield "off by one", right, str(right.value + 1)
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            operators = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from self._between(*node.values, *operators)
        elif isinstance(node, ast.IfExp):
            yield "negated condition", node.test, self._negated(node.test)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield "negated condition", test, self._negated(test)

    def _in_call(self, node: ast.Call) -> Iterator[Edit]:
        name, arguments = _name(node.func), node.args
        if any(isinstance(argument, ast.Starred) for argument in arguments):
            return
        if name in REDUCTIONS and len(arguments) >= 2:
            yield "dropped reduction", node, self._text(arguments[0])
            yield "rescaled reduction", node, f"2 * {self._text(node)}"
            yield "permuted reduction", node, f"{self._text(node)}.flip(0)"
        if name == "range" and arguments:
            end = arguments[min(1, len(arguments) - 1)]
            yield "off by one", end, f"{self._text(end)} - 1"
        if name in OPPOSITES:
            yield "min for max", node.func, self._text(node.func).removesuffix(name) + OPPOSITES[name]
        bounds = [keyword for keyword in node.keywords if keyword.arg in ("min", "max")]
        if name == "clamp" and len(bounds) == 1:
            yield "min for max", bounds[0], f"{OPPOSITES[str(bounds[0].arg)]}={self._text(bounds[0].value)}"
        if name == "stable_hash" and len(arguments) >= 3:
            rest = ", ".join(self._text(part) for part in (*arguments[:-1], *node.keywords))
            yield "another seed", node, f"{self._text(node.func)}({rest})"
        for value in (*arguments, *(keyword.value for keyword in node.keywords)):
            if _name(value) == "seed":
                yield "another seed", value, f"{self._text(value)} + 1"

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Edit]:
        """Replace the operator between two operands on the same line."""
        if left.end_lineno != right.lineno:
            return
        span = _Span(right.lineno, right.lineno, left.end_col_offset, right.col_offset)
        text = self._text(span)
        if text.count(old) == 1:
            yield "weaker check", span, text.replace(old, new)

    def _negated(self, test: ast.expr) -> str:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._text(test.operand)
        return f"not ({self._text(test)})"


def _executed(node: ast.AST, *, in_init: bool) -> Iterator[ast.AST]:
    """Nodes that affect behavior: no annotations, docstrings, decorators, messages or imports."""
    if isinstance(node, ast.stmt) and _is_logging(node):
        return
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Assert)):
        return
    if isinstance(node, Functions):
        in_init = node.name in ("__init__", "__post_init__")
        children: list[ast.AST] = [*node.body, *node.args.defaults]
    elif isinstance(node, ast.ClassDef):
        children = [child for child in node.body if isinstance(child, Functions)]
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value is not None else []
    elif isinstance(node, ast.Raise):
        children = []
    elif isinstance(node, ast.If) and _mentions(node.test, "cuda", "TYPE_CHECKING", "__main__"):
        children = [*node.orelse]
    else:
        children = list(ast.iter_child_nodes(node))
    # Assignments in __init__ are kept, since the first use of the attribute would fail at once.
    if not (in_init and isinstance(node, (ast.Assign, ast.AugAssign))):
        yield node
    for child in children:
        yield from _executed(child, in_init=in_init)


def _is_logging(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.Constant) or (
        isinstance(node.value, ast.Call) and _name(node.value.func) in LOGGING_CALLS
    )


def _mentions(node: ast.AST, *words: str) -> bool:
    return any(word in ast.dump(node) for word in words)


def _name(node: ast.AST) -> str:
    """Last component of a dotted name; empty if the node is not a name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1 and type(node.value) is int
