"""Every Python block of the documentation runs, and prints what the page says."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, Page, all_pages
from tests.docs.run_blocks import run_blocks
from tests.harness import run_distributed

PAGES = {page.name: page for page in all_pages()}
SEPARATE = [(p, b) for p in PAGES.values() for b in p.blocks if b.directive == "ranks"]
SECONDS = 120


def scripts(directive: str, launcher: str) -> list[tuple[Page, Block, int]]:
    """Programs, each with the numbers of processes that the page starts it with."""
    return [
        (page, block, ranks)
        for page in PAGES.values()
        for block in page.blocks
        if block.directive == directive and block.value and page.name != "README.zh-CN.md"  # it shows README.md's
        for ranks in processes(page, block.value, launcher)
    ]


def processes(page: Page, script: str, launcher: str) -> list[int]:
    lines = [line for block in page.blocks if block.language == "bash" for line in block.text.splitlines()]
    launched = any(launcher in line and line.endswith(script) for line in lines)
    alone = f"python {script}" in lines or not launched
    return [1] * alone + [2] * launched


def names(found: list[tuple[Page, Block, int]]) -> list[str]:
    return [f"{page.name}:{block.value}-{ranks}" for page, block, ranks in found]


SCRIPTS, MINDSPORE_SCRIPTS = scripts("script", "torchrun"), scripts("mindspore", "msrun")


def check_run(page: Page, blocks: list[Block], ranks: int, platform: str = "torch") -> None:
    sources = [(block.line, block.text) for block in blocks]
    printed = run_distributed(run_blocks, page.name, sources, platform=platform, world_size=ranks, timeout=SECONDS)[0]
    for block, text in zip(blocks, printed, strict=True):
        assert text == (block.output or ""), f"{page.name}, line {block.line} prints something else"


@pytest.mark.platform("torch")
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if page.python()])
def test_page_runs_as_one_program(name: str) -> None:
    check_run(PAGES[name], PAGES[name].python(), PAGES[name].ranks)


@pytest.mark.platform("mindspore")
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if page.mindspore()])
def test_mindspore_blocks_run_as_one_program(name: str) -> None:
    check_run(PAGES[name], PAGES[name].mindspore(), PAGES[name].ranks, "mindspore")


@pytest.mark.platform("torch")
@pytest.mark.parametrize("page, block", SEPARATE, ids=[f"{p.name}:{b.line}" for p, b in SEPARATE])
def test_block_runs_by_itself(page: Page, block: Block) -> None:
    check_run(page, [block], int(block.value))


@pytest.mark.platform("torch")
@pytest.mark.parametrize("page, block, ranks", SCRIPTS, ids=names(SCRIPTS))
def test_script_runs_alone_and_under_torchrun(page: Page, block: Block, ranks: int, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    (tmp_path / block.value).write_text(block.text, encoding="utf-8")
    command = [sys.executable, block.value]
    if ranks > 1:  # what ranks print at once may get mixed up: each writes to a file of its own
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--redirects", "1"]
        command[1:1] = [*launcher, "--log-dir", "logs", "--master-port", str(free_port())]
    printed = [run(command, tmp_path, environment(page)).stdout]
    if ranks > 1:
        printed = [path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("logs/**/stdout.log"))]
        assert len(printed) == ranks
    for said in printed:
        assert block.output is None or said.splitlines() == block.output.splitlines()


@pytest.mark.platform("mindspore")
@pytest.mark.parametrize("page, block, ranks", MINDSPORE_SCRIPTS, ids=names(MINDSPORE_SCRIPTS))
def test_mindspore_script_runs_alone_and_under_msrun(page: Page, block: Block, ranks: int, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    (tmp_path / block.value).write_text(block.text, encoding="utf-8")
    env = environment(page) | {"HYPER_PARALLEL_PLATFORM": "mindspore"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # where msrun finds its python
    if ranks == 1:
        said = run([sys.executable, block.value], tmp_path, env).stdout
    else:
        msrun = shutil.which("msrun", path=env["PATH"])
        assert msrun is not None
        number = str(ranks)
        line = ["--worker_num", number, "--local_worker_num", number, "--join", "True", "--log_dir", "logs"]
        run([msrun, *line, "--master_port", str(free_port()), block.value], tmp_path, env)
        said = (tmp_path / "logs" / "worker_0.log").read_text(encoding="utf-8")
    lines = (block.output or "").splitlines()
    assert [line for line in said.splitlines() if line in lines] == lines, said


def run(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def write_files(page: Page, folder: Path) -> None:
    for block in page.blocks:
        if block.directive == "file":
            path = folder / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


def environment(page: Page) -> dict[str, str]:
    """This process's, with what the page exports, and without a launcher's variables."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    for block in page.blocks:
        if block.language == "bash":
            for line in block.text.splitlines():
                if line.startswith("export "):
                    name, value = line.removeprefix("export ").split("=", 1)
                    env[name] = value
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HYPER_PARALLEL_PLATFORM": "torch"}
    return env


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
