"""The table of error messages in the loss-parallel guide is about messages that exist."""

from __future__ import annotations

import re

import pytest

from tests.docs import messages
from tests.docs.pages import ROOT
from tests.harness import run_distributed


def test_table_lists_the_messages_tried_here() -> None:
    text = (ROOT / "docs/guide/loss_parallel.md").read_text(encoding="utf-8")
    table = text.split("## Errors and what to do")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(.+?)` \|", table, re.M) == list(messages.CALLS)


@pytest.mark.platform("torch")
def test_each_message_comes_on_every_rank() -> None:
    for found in run_distributed(messages.run_all, platform="torch", world_size=2, timeout=60):
        for fragment, message in found.items():
            assert fragment in message
