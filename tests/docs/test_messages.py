"""The tables of error messages in the guides are about messages that exist."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from tests.docs import messages, troubles
from tests.docs.pages import ROOT
from tests.harness import run_distributed


@pytest.mark.contract("D1")
def test_table_lists_the_messages_tried_here() -> None:
    text = (ROOT / "docs/guide/loss_parallel.md").read_text(encoding="utf-8")
    table = text.split("## Errors and what to do")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(.+?)` \|", table, re.M) == list(messages.CALLS)


@pytest.mark.contract("D1")
def test_troubleshooting_lists_the_messages_tried_here() -> None:
    text = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(.+?)` \|", text, re.M) == list(troubles.CALLS)


@pytest.mark.platform("torch")
@pytest.mark.parametrize("module", [messages, troubles], ids=["loss parallel", "troubleshooting"])
def test_each_message_comes_on_every_rank(module: ModuleType) -> None:
    for found in run_distributed(module.run_all, platform="torch", world_size=2, timeout=60):
        for fragment, message in found.items():
            assert fragment in message, message
