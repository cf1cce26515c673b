"""How the site reads docstrings: a griffe extension, named in mkdocs.yml.

Docstrings have Sphinx roles and ``::`` in them, which a Python reader knows; the site is Markdown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import griffe

__all__ = ["DocstringMarkup", "to_markdown"]

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?([\w.]+)`")
_TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +\S.*)*)", re.M)
"""``dtype, device: of the parameters``."""


class DocstringMarkup(griffe.Extension):
    """Rewrites every docstring of a package when it has been read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """See :func:`to_markdown`."""
        exports = ast.literal_eval(str(pkg["_EXPORTS"].value)) if "_EXPORTS" in pkg.members else {}
        _rewrite(pkg, exports)


def to_markdown(text: str, exports: Mapping[str, str]) -> str:
    """A docstring with links in the place of roles, and with sections as griffe knows them.

    Args:
        text: the docstring.
        exports: public name -> the module that defines it; other names become plain code.
    """

    def link(found: re.Match[str]) -> str:
        name = found[1].lstrip(".")
        return f"[`{name}`][{exports[name]}.{name}]" if name in exports else f"`{name}`"

    def each(found: re.Match[str]) -> str:
        return "\n".join(f"{found[1]}{name}: {found[3]}" for name in found[2].split(", "))

    text = _TOGETHER.sub(each, _ROLE.sub(link, text))
    text = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.M)
    text = re.sub(r"^\s*::$", "", text, flags=re.M)
    return re.sub(r"::$", ":", text, flags=re.M)


def _rewrite(obj: Any, exports: Mapping[str, str]) -> None:
    if obj.docstring is not None:
        obj.docstring.value = to_markdown(obj.docstring.value, exports)
    for member in obj.members.values():
        if not member.is_alias:
            _rewrite(member, exports)
