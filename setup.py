"""Builds the optional C kernels; everything else is declared in pyproject.toml.

The extension is a plain shared library that `core/model/kernels/__init__.py` opens with ctypes, so it
needs no Python headers. `optional=True`: without a compiler the install succeeds and torch serves.
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("core/model/kernels")


class BuildKernels(build_ext):
    """Compiles the kernels as a shared library without a Python module's init symbol."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols or [])


if sys.platform == "win32":
    compile_args, link_args = ["/O2", "/openmp"], []
else:
    # No -march=native: a wheel must run on any machine; hot functions pick their instruction set at load
    # time (target_clones). -ffast-math stays off where the order of sums is promised; see kernels.c.
    compile_args, link_args = ["-O3", "-std=gnu11", "-fopenmp"], ["-fopenmp", "-lm"]

sources = sorted(str(path) for path in KERNELS.glob("*.c"))
setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "core.model.kernels._kernels",
            sources=sources,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            optional=True,
        )
    ]
    if sources
    else [],
)
