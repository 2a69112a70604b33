"""Builds the optional C kernels; everything else is declared in pyproject.toml.

The extension is a plain shared library that `core/model/kernels/__init__.py` opens with ctypes, so it
needs no Python headers. `optional=True`: without a compiler the install succeeds and torch serves.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("core/model/kernels")


class BuildKernels(build_ext):
    """Compiles the kernels as a shared library without a Python module's init symbol."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols or [])

    def build_extensions(self) -> None:
        """Compiles the variants side by side: one after the other they would be most of an installation."""
        compile_serially = self.compiler.compile

        def compile_together(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                parts = pool.map(lambda source: compile_serially([source], **options), sources)
                return [path for part in parts for path in part]

        self.compiler.compile = compile_together
        super().build_extensions()


# No -march=native: a wheel must run on any machine; the sources are compiled once per instruction set and the best
# one is picked at load. No -ffast-math: the order of sums is promised. No OpenMP on macOS, whose clang lacks it.
openmp = [] if sys.platform == "darwin" else ["-fopenmp"]
sources = [] if sys.platform == "win32" else sorted(str(path) for path in KERNELS.glob("*.c"))
setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "core.model.kernels._kernels",
            sources=sources,
            depends=sorted(str(path) for path in KERNELS.glob("*.h")),
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-fno-math-errno",
                "-fno-trapping-math",
                *openmp,
            ],
            extra_link_args=[*openmp, "-lm"],
            optional=True,
        )
    ]
    if sources
    else [],
)
