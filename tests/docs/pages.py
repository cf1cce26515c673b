"""What the documentation holds: code blocks with their directives, links and commands.

Directives are HTML comments in front of a block (or, for ``page``, on the first line of the page):

- ``<!-- page: ranks=2 -->``: the page's Python blocks run in order, in one namespace, on that many ranks.
- ``<!-- ranks: 4 -->``: this block runs by itself on that many ranks.
- ``<!-- script: NAME -->``: this block is a program of its own, run as a file of that name: by itself, and on two
  processes, as the page's commands say.
- ``<!-- file: NAME -->``: this block is a file that the page's programs need.
- ``<!-- mindspore -->``: this block is part of the page's MindSpore program, which runs as the other one does.
- ``<!-- mindspore: NAME -->``: this block is a MindSpore program of its own, run as a file of that name.
- ``<!-- output -->``: this block is what the Python block before it prints on rank 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\s*$")
_DIRECTIVE = re.compile(r"^<!-- (page|ranks|script|file|mindspore|output)(?:: (.*?))? -->$")


@dataclass
class Block:
    """A fenced block: its language, text, first line in the page, and the directive in front of it."""

    language: str
    text: str
    line: int
    directive: str = ""
    value: str = ""
    output: str | None = None


@dataclass
class Page:
    """A Markdown file."""

    path: Path
    text: str
    ranks: int = 1
    blocks: list[Block] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def python(self) -> list[Block]:
        """The blocks that run as part of the page."""
        return [b for b in self.blocks if b.language == "python" and not b.directive]

    def mindspore(self) -> list[Block]:
        """The blocks of its MindSpore program."""
        return [b for b in self.blocks if b.directive == "mindspore" and not b.value]


def read_page(path: Path) -> Page:
    """Read a page. Raises ValueError for a directive that belongs to nothing."""
    page = Page(path, path.read_text(encoding="utf-8"))
    lines = iter(enumerate(page.text.splitlines(), 1))
    directive = ("", "")
    for number, line in lines:
        if found := _DIRECTIVE.match(line):
            directive = (found[1], found[2] or "")
            if found[1] == "page":
                page.ranks, directive = int(directive[1].removeprefix("ranks=")), ("", "")
        elif found := _FENCE.match(line):
            body = []
            for _, inner in lines:
                if inner == "```":
                    break
                body.append(inner)
            block = Block(found[1], "\n".join(body) + "\n", number + 1, *directive)
            directive = ("", "")
            if block.directive == "output":
                page.blocks[-1].output = block.text
            else:
                page.blocks.append(block)
        elif directive != ("", "") and line.strip():
            raise ValueError(f"{page.name}, line {number}: the directive above stands before no block")
    return page


def all_pages() -> list[Page]:
    """The READMEs and everything under docs."""
    return [read_page(p) for p in sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")])]
