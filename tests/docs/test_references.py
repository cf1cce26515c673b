"""What the documentation names exists: commands, files, links, names of the package; generated parts are fresh."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex

import pytest

import hyper_parallel
from hyper_parallel import cli
from tests.docs.pages import ROOT, Page, all_pages
from tools import op_names, trap_table

PAGES = all_pages()
NAMES = [page.name for page in PAGES]
GENERATED = {"docs/support_matrix.md"}
"""Pages that a run of the whole suite writes."""

_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_PROGRAMS = ("make", "hyper-parallel", "python", "torchrun", "pip", "pytest")


def prose(page: Page) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.text, flags=re.S | re.M)


def commands(page: Page) -> list[str]:
    """Every line of a shell block, and inline code that starts with a program's name."""
    lines = [line for b in page.blocks if b.language == "bash" for line in b.text.splitlines()]
    lines += [code for code in _INLINE.findall(prose(page)) if code.split()[0] in _PROGRAMS and " " in code]
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_exists(page: Page) -> None:
    for command in commands(page):
        program, *arguments = shlex.split(re.sub(r"^[A-Za-z_]+=\S* ", "", command))
        check = globals().get(f"check_{program.replace('-', '_')}")
        assert check is not None, f"{page.name} names {command!r}, which no check here knows"
        check(page, arguments)


def check_make(page: Page, arguments: list[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        name = argument.split("=")[0]
        pattern = rf"^{name} +\?=" if "=" in argument else rf"^{name}:"
        assert re.search(pattern, text, re.M), f"{page.name}: the Makefile has no {argument!r}"


def check_hyper_parallel(page: Page, arguments: list[str]) -> None:
    command, *options = arguments
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        try:
            status = cli.main([command, "--help"])
        except SystemExit as stop:
            status = stop.code
    assert status in (0, None), f"{page.name}: hyper-parallel {command} --help gives {status}"
    for option in options:
        assert option == "--help" or not option.startswith("-") or option in shown.getvalue()


def check_python(page: Page, arguments: list[str]) -> None:
    if arguments[0] == "-c":
        compile(arguments[1], page.name, "exec")
        return
    if arguments[0] != "-m":
        assert arguments[0] in {b.value for b in page.blocks if b.directive in ("script", "mindspore")}
        return
    name = {"benchmarks": "benchmarks.__main__"}.get(arguments[1], arguments[1])
    assert name.split(".")[0] in ("benchmarks", "tools"), f"{page.name}: {name}"
    main = importlib.import_module(name).main
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert all(option in shown.getvalue() for option in arguments[2:] if option.startswith("-"))


def check_torchrun(page: Page, arguments: list[str]) -> None:
    assert arguments[:1] == ["--nproc-per-node"]  # test_snippets runs the script with it
    assert arguments[-1] in {b.value for b in page.blocks if b.directive == "script"}


def check_msrun(page: Page, arguments: list[str]) -> None:
    assert arguments[:6] == ["--worker_num", "2", "--local_worker_num", "2", "--join", "True"]
    if arguments[6:9] != ["python", "-m", "hyper_parallel"]:
        assert arguments[-1] in {b.value for b in page.blocks if b.directive == "mindspore"}


def check_pip(page: Page, arguments: list[str]) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert arguments[0] == "install"
    if arguments == ["install", "nox"]:
        return
    if arguments[1] == "-c":
        assert (ROOT / arguments[2]).is_file()
        arguments = arguments[2:]
    if f'"{arguments[1]}"' in text:  # a requirement of the project's own
        return
    extras = re.fullmatch(r"\.\[([\w,]+)\]", arguments[1])
    assert extras, f"{page.name}: {arguments}"
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", text, re.M), f"{page.name}: no extra {extra!r}"


def check_pytest(page: Page, arguments: list[str]) -> None:
    text = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    assert all(f'"{argument}"' in text for argument in arguments)


def check_export(page: Page, arguments: list[str]) -> None:
    source = (ROOT / "hyper_parallel/core/shard/parallel_ops_register.py").read_text(encoding="utf-8")
    assert all(f'"{argument.split("=")[0]}"' in source for argument in arguments)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Page) -> None:
    for target in _LINK.findall(prose(page)):
        assert "://" not in target, f"{page.name}: {target} leaves the repository"
        path, _, anchor = target.partition("#")
        file = (page.path.parent / path).resolve() if path else page.path
        if file.relative_to(ROOT).as_posix() in GENERATED and not file.exists():
            continue
        assert file.exists(), f"{page.name}: no {target}"
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), f"{page.name}: no {target}"


def anchors(text: str) -> set[str]:
    """Those that GitHub gives the headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_file_named_exists(page: Page) -> None:
    for code in _INLINE.findall(prose(page)):
        if re.fullmatch(r"(?!my_)[\w/]+/(\w+\.(py|yaml|md))?", code):
            roots = (ROOT, ROOT / "hyper_parallel", ROOT / "hyper_parallel" / "core" / "shard")
            assert any((root / code).exists() for root in roots), f"{page.name} names {code}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_import_in_prose_is_public(page: Page) -> None:
    for module, names in re.findall(r"from (hyper_parallel[\w.]*) import ([\w, ]+)", page.text):
        if module == "hyper_parallel":
            assert set(re.split(r", *", names.strip(", "))) <= set(dir(hyper_parallel)), page.name


def test_both_readmes_show_the_same_program() -> None:
    shown = [[b.text for b in p.blocks if b.language == "python"] for p in PAGES if p.name.startswith("README")]
    assert len(shown) == 2 and shown[0] == shown[1]


def test_no_page_promises_what_is_not_there() -> None:
    for page in PAGES:
        assert not re.search(r"TODO|FIXME|coming soon|not yet", page.text), page.name


def test_guide_lists_the_model_types_that_are_tested() -> None:
    """With "auto" beside one device, those of which also with sequence parallelism, and those refused."""
    pytest.importorskip("transformers")
    from tests.tensor_parallel import small_models, test_torch_refusals, test_transformers

    text = (ROOT / "docs/guide/tensor_parallel.md").read_text(encoding="utf-8")
    items = text.split("<!-- model types")[1].split("\n\n")[1].split("\n- ")
    listed = [re.findall(r"`(\w+)`", item.split(": ", 1)[1]) for item in items]
    refused = {case.split()[0] for case in test_torch_refusals.ATTENTION} | {"mixtral"}
    assert "mixture of experts" in test_torch_refusals.REFUSED
    expected = [{*small_models.KINDS, *test_transformers.OTHER_KINDS}, {*small_models.KINDS}, refused]
    assert listed == [sorted(names) for names in expected]


@pytest.mark.contract("D1")
def test_op_name_page_is_fresh() -> None:
    assert op_names.main(["--check"]) == 0, "run python -m tools.op_names --write"


@pytest.mark.parametrize("name", trap_table.LANGUAGES.values())
def test_trap_table_is_between_its_markers(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert trap_table.put_between_markers(text, trap_table.shown(text), name) == text
