"""The process that MindSpore's workers meet at. Started as `python -m tests.harness.scheduler`."""

from __future__ import annotations

from tests.harness.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    import mindspore.communication

    mindspore.communication.init()  # serves until all workers are gone, or until the parent ends this process
