"""Block of chat templates around the tokens that are trained on."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationBlock(Extension):
    """`{% generation %}` to `{% endgeneration %}`, which renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the content in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)
