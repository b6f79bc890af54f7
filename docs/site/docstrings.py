"""An extension of Griffe, which reads docstrings for the reference, for these."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Examples?:\n(.*)\Z", re.M | re.S)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Indents the text after `Example:`, the last section of a docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_section, obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Makes `data.shard` the function, as in Python, and not the module."""
        data = pkg["data"]
        for name in data.exports:
            module = data.members[name]
            if module.is_module:
                data.members[name] = griffe.Alias(name, module[name], parent=data)


def _section(found: re.Match) -> str:
    body = textwrap.dedent(found[1]).strip("\n")
    return "Examples:\n" + textwrap.indent(body, "    ")
