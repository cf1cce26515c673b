"""Programs that write or check parts of the repository; run from its root with `python -m tools.<name>`."""
