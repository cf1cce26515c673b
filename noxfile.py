"""The suite on several releases of the frameworks; each session writes its result into docs/versions.md.

    nox -s torch                 every PyTorch release in tools/releases.py
    nox -s "torch(2.12.0)"       one of them
    nox -s mindspore
    nox -s refused               older ones: the library says so, and nothing else happens
    nox -s unsupported           the suite on one of those, with the refusal taken out
    nox -s torch -- tests/core   a part of the suite, which is not written down

A release is installed with all that it depends on, for PyTorch several gigabytes.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox itself runs from elsewhere
from tools.releases import (  # noqa: E402
    PART,
    REFUSED,
    RELEASES,
    UNSUPPORTED,
    copy_without_refusal,
    write_refusal,
    write_result,
)

_ASK = """
import sys
from hyper_parallel import get_platform
try:
    get_platform(sys.argv[1])
    print("it is accepted")
except Exception as error:
    print(f"{type(error).__name__}: {error}".replace(chr(10), " "))
"""

nox.options.reuse_existing_virtualenvs = True


def _run(session: nox.Session, framework: str, release: str) -> None:
    session.install(f"{framework}=={release}")
    # The suite's own packages without the file of pinned versions, which pins the frameworks.
    session.install("-e", ".[train,test]")
    if session.posargs:
        session.run("python", "-m", "pytest", "--platform", framework, *session.posargs)
        return
    report = f"{session.create_tmp()}/results.xml"
    session.run(
        "python", "-m", "pytest", "-q", "--platform", framework, f"--junitxml={report}", *PART, success_codes=[0, 1]
    )
    failed = write_result(framework, release, report)
    if failed:
        session.error(f"{failed} tests failed with {framework} {release}")


@nox.session
@nox.parametrize("release", RELEASES["torch"], ids=RELEASES["torch"])
def torch(session: nox.Session, release: str) -> None:
    """PyTorch's tests."""
    _run(session, "torch", release)


@nox.session
@nox.parametrize("release", RELEASES["mindspore"], ids=RELEASES["mindspore"])
def mindspore(session: nox.Session, release: str) -> None:
    """MindSpore's tests."""
    _run(session, "mindspore", release)


@nox.session
@nox.parametrize("release", REFUSED, ids=REFUSED)
def refused(session: nox.Session, release: str) -> None:
    """What the library says of a release that is too old."""
    framework, number = release.split()
    session.install(f"{framework}=={number}")
    session.install("-e", ".")
    found = session.run("python", "-c", _ASK, framework, silent=True)
    message = str(found).strip().splitlines()[-1]
    if not message.startswith("PlatformError: "):
        session.error(f"{release} is not refused: {message}")
    write_refusal(framework, number, message.removeprefix("PlatformError: "))


@nox.session
@nox.parametrize("release", UNSUPPORTED, ids=UNSUPPORTED)
def unsupported(session: nox.Session, release: str) -> None:
    """The suite on a release that is refused: which tests fail there, and how many do not."""
    framework, number = release.split()
    sources = Path(session.create_tmp()).resolve() / "sources"
    shutil.rmtree(sources, ignore_errors=True)
    copy_without_refusal(framework, number, sources)
    session.install(f"{framework}=={number}")
    session.install("-e", f"{sources}[train,test]")
    report = sources / "results.xml"
    with session.chdir(sources):
        if session.posargs:
            session.run("python", "-m", "pytest", "--platform", framework, *session.posargs)
            return
        session.run(
            "python", "-m", "pytest", "-q", "--tb=line", "--platform", framework, f"--junitxml={report}",
            *PART, success_codes=[0, 1],
        )  # fmt: skip
    write_result(framework, number, str(report))
