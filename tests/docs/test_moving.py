"""The pages for those who come from elsewhere: what they call ours exists, and the jobs they show are jobs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import hyper_parallel
import hyper_parallel.trainer
from hyper_parallel.trainer.command_line import parse_train_options
from hyper_parallel.trainer.options import TrainOptions
from tests.docs.pages import ROOT, Block, read_page

PAGES = {name: read_page(ROOT / f"docs/guide/{name}.md") for name in ("from_torchtitan", "from_mindformers")}
JOBS = [(name, block) for name, page in PAGES.items() for block in page.blocks if block.language == "yaml"]

SECTIONS = {
    field.name: {f.name for f in dataclasses.fields(type(getattr(TrainOptions(), field.name)))}
    for field in dataclasses.fields(TrainOptions)
    if dataclasses.is_dataclass(getattr(TrainOptions(), field.name))
}
OPTION = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.\w+)`")
PUBLIC = {*dir(hyper_parallel), *hyper_parallel.trainer.__all__}


def rows(name: str) -> list[list[str]]:
    """The cells of every row of a page's tables."""
    lines = [line for line in PAGES[name].text.splitlines() if line.startswith("| ") or line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.contract("D1")
@pytest.mark.parametrize("name", PAGES)
def test_what_is_called_ours_exists(name: str) -> None:
    for theirs, ours, *_ in rows(name):
        for option in OPTION.findall(theirs if ours == "the same" else ours):
            section, _, field = option.partition(".")
            assert field in SECTIONS[section], f"{name}: {option}"
        for called in re.findall(r"`(\w+)\(", ours):
            assert called in PUBLIC, f"{name}: {called}"
        for called in re.findall(r"`([A-Z]\w+|\w+_\w+_\w+)`", ours):
            assert called in PUBLIC or called in {"NoParallel"}, f"{name}: {called}"


@pytest.mark.contract("D1")
@pytest.mark.parametrize("name, block", JOBS, ids=[name for name, _ in JOBS])
def test_the_job_is_a_job(name: str, block: Block, tmp_path: Path) -> None:
    config = tmp_path / block.value
    config.write_text(block.text, encoding="utf-8")
    options = parse_train_options([str(config)])
    degrees = options.parallelism.data_parallel_degree * options.parallelism.tensor_parallel_degree
    assert options.nproc == degrees == 4
