"""The page of supported releases says what the suite has found, and what the package and the platform demand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import releases

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")


def supported(framework: str) -> tuple[int, ...]:
    """The oldest supported release of a framework, by the page."""
    match = re.search(rf"^\| {framework} \| (\d+)\.(\d+)", PAGE, re.MULTILINE)
    assert match is not None
    return int(match[1]), int(match[2])


@pytest.mark.contract("V1")
@pytest.mark.platform("torch")
def test_supported_pytorch_has_been_tried() -> None:
    """Three supported releases at least, the oldest and the pinned one among them, all without failures."""
    found = {release: row for (name, release), row in releases.read_results(PAGE).items() if name == "PyTorch"}
    oldest = supported("PyTorch")
    good = {release: row for release, row in found.items() if releases.numbers(release)[:2] >= oldest}
    assert len(good) >= 3 and min(map(releases.numbers, good)) == (*oldest, 0)
    assert all(passed > 2500 and failed == 0 for passed, failed, _ in good.values()), good
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==(.+)$", pins, re.MULTILINE)
    assert pinned is not None and pinned[1] in good


def test_older_releases_are_refused_by_name() -> None:
    found = releases.read_refusals(PAGE)
    assert {f"{'torch' if name == 'PyTorch' else 'mindspore'} {release}" for name, release in found} == set(
        releases.REFUSED
    )
    for (name, release), message in found.items():
        oldest = supported(name)
        assert releases.numbers(release) < oldest
        expected = rf"{name} {re.escape(release)}\S* is too old; expected at least {oldest[0]}\.{oldest[1]}$"
        assert re.match(expected, message), message


def test_a_refusal_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "versions.md"
    others = "| MindSpore | 2.10 | operators |\n\n| PyTorch | 2.9.0 | 1 | 0 | 0 |\n\n"  # rows of the other tables
    page.write_text(f"{others}| MindSpore | 2.9.0 | MindSpore is too old |\n\nafter\n")
    monkeypatch.setattr(releases, "PAGE", page)
    releases.write_refusal("mindspore", "2.9.0", "2.9.0 is too old")
    releases.write_refusal("torch", "2.8.0", "2.8.0 is too old")
    assert page.read_text() == (
        f"{others}| PyTorch | 2.8.0 | 2.8.0 is too old |\n"
        "| MindSpore | 2.9.0 | 2.9.0 is too old |\n\nafter\n"
    )


def test_no_supported_release_has_failures() -> None:
    for (name, release), (_, failed, _) in releases.read_results(PAGE).items():
        assert (failed == 0) == (releases.numbers(release)[:2] >= supported(name)), (name, release, failed)


@pytest.mark.parametrize(
    ("framework", "package", "file"),
    [
        ("PyTorch", "torch", "hyper_parallel/platform/torch/platform.py"),
        ("MindSpore", "mindspore", "hyper_parallel/platform/mindspore/_versions.py"),
    ],
)
def test_one_lower_bound(framework: str, package: str, file: str) -> None:
    major, minor = supported(framework)
    assert f'"{package}>={major}.{minor},' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"_OLDEST = ({major}, {minor})" in (ROOT / file).read_text(encoding="utf-8")


def test_a_result_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, report = tmp_path / "versions.md", tmp_path / "results.xml"
    page.write_text("before\n\n| PyTorch | 2.9.0 | 1 | 0 | 0 |\n| PyTorch | 2.13.0 | 3 | 0 | 0 |\n\nafter\n")
    report.write_text(
        "<testsuites><testsuite><testcase/><testcase/><testcase><skipped/></testcase><testcase><failure/></testcase>"
        "</testsuite></testsuites>"
    )
    monkeypatch.setattr(releases, "PAGE", page)
    assert releases.write_result("mindspore", "2.10.0", str(report)) == 1
    assert releases.write_result("torch", "2.10.1", str(report)) == 1
    assert page.read_text() == (
        "before\n\n| PyTorch | 2.9.0 | 1 | 0 | 0 |\n| PyTorch | 2.10.1 | 2 | 1 | 1 |\n"
        "| PyTorch | 2.13.0 | 3 | 0 | 0 |\n| MindSpore | 2.10.0 | 2 | 1 | 1 |\n\nafter\n"
    )


@pytest.mark.parametrize("release", releases.UNSUPPORTED)
def test_the_refusal_can_be_taken_out(release: str, tmp_path: Path) -> None:
    framework, number = release.split()
    assert release in releases.REFUSED
    releases.copy_without_refusal(framework, number, tmp_path / "sources")
    file = releases._BOUNDS[framework]
    before, after = (ROOT / file).read_text().splitlines(), (tmp_path / "sources" / file).read_text().splitlines()
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [
        line.replace("(2, 10)", "(2, 9)") for line in before if line.startswith("_OLDEST")
    ]
    assert (tmp_path / "sources/tests/conformance").is_dir() and not (tmp_path / "sources/.git").exists()
