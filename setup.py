"""The compiled kernels; everything else is in pyproject.toml."""

from setuptools import Extension, setup

_FOLDER = "hyper_parallel/platform/native"

setup(
    ext_modules=[
        Extension(
            "hyper_parallel.platform.native._rows",
            [f"{_FOLDER}/rows.c"],
            depends=[f"{_FOLDER}/rows_target.h", f"{_FOLDER}/rows_dtype.h"],
            extra_compile_args=["-O3", "-ffp-contract=fast"],
            # Without a C compiler the library installs all the same, and computes with the framework's operators.
            optional=True,
        )
    ]
)
