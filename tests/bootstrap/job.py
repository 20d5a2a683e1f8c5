"""Ranks of a start-up test: builds the probe, runs it once per rank, looks for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
MPI_BIN = Path(sys.prefix) / "bin"
LIMIT = 40.0  # seconds, for any wait of a test
FOREIGN = ("PMIX_", "PMI_", "OMPI_", "OPAL_", "PRTE_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Programs:
    probe: Path
    server: Path


def mpi_tool(name: str) -> str | None:
    """The tool of the MPI that MPICC names, of this environment, or on PATH."""
    beside = os.environ.get("MPICC")
    folder = str(Path(shutil.which(beside) or beside).parent) if beside else str(MPI_BIN)
    return shutil.which(name, path=folder) or shutil.which(name)


def build(folder: Path) -> Programs:
    """Compiles the probe with the start-up sources, and the server."""
    mpicc = os.environ.get("MPICC") or mpi_tool("mpicc")
    assert mpicc is not None
    shown = subprocess.run([mpicc, "-show"], check=True, capture_output=True, text=True).stdout
    mpi_flags = shlex.split(shown)[1:]
    compiler = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-O0", "-g1", "-Wall", "-Wextra", "-Werror"]
    flags = [*shlex.split(os.environ.get("BOOTSTRAP_TEST_FLAGS", "")), "-I", str(ROOT / "csrc"), "-pthread"]
    sources = ROOT / "csrc" / "bootstrap"
    made = Programs(folder / "bootstrap_probe", folder / "multicomm-pmix-server")
    probe = [str(Path(__file__).parent / "bootstrap_probe.cpp"), *map(str, sorted(sources.glob("*.cpp")))]
    server = [str(path) for path in sorted((sources / "pmix_server").glob("*.cpp"))]
    subprocess.run([*compiler, *flags, *probe, *mpi_flags, "-o", str(made.probe)], check=True, timeout=300)
    subprocess.run([*compiler, *flags, *server, "-ldl", "-o", str(made.server)], check=True, timeout=300)
    return made


@dataclass
class Rank:
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def facts(self, name: str) -> list[str]:
        """What the probe has printed under this name."""
        lines = self.text.splitlines()
        return [line[len(name) + 1 :] for line in lines if line.startswith(name + " ")]


@dataclass
class Job:
    """One world of ranks. Use as a context manager: whatever happens, its processes are ended."""

    programs: Programs
    folder: Path
    mode: str
    size: int
    argument: int = -1
    timeout: float = 15.0  # of the start-up itself
    env: dict[str, str] = field(default_factory=dict)
    store: Path | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = self.store or self.folder / "store"
        self.store.mkdir(exist_ok=True, parents=True)
        self.tmp.mkdir(exist_ok=True)

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    def command(self, rank: int) -> list[str]:
        words = [self.programs.probe, self.mode, rank, self.size, self.store, self.programs.server]
        return [*map(str, words), str(int(self.timeout * 1000)), str(self.argument)]

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return {**kept, "TMPDIR": str(self.tmp), **self.env}

    def spawn(self, rank: int, command: list[str], env: dict[str, str] | None = None, group: int | None = None) -> Rank:
        log = self.folder / f"rank{rank}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment() | (env or {}),
                process_group=group,
            )
        self.ranks[rank] = Rank(process, log)
        return self.ranks[rank]

    def start(
        self,
        ranks: list[int] | None = None,
        prefix: dict[int, list[str]] | None = None,
        env: dict[int, dict[str, str]] | None = None,
    ) -> Job:
        """Starts these ranks, all by default, each behind its prefix and with its additions to the environment."""
        for rank in range(self.size) if ranks is None else ranks:
            self.spawn(rank, (prefix or {}).get(rank, []) + self.command(rank), (env or {}).get(rank))
        return self

    def await_fact(self, name: str, ranks: list[int] | None = None) -> None:
        deadline = time.monotonic() + LIMIT
        for rank in self.ranks if ranks is None else ranks:
            while name not in self.ranks[rank].text:
                assert self.ranks[rank].code is None, f"rank {rank} ended\n{self.report()}"
                assert time.monotonic() < deadline, f"no '{name}' from rank {rank}\n{self.report()}"
                time.sleep(0.01)

    def release(self) -> None:
        """Lets ranks that hold go on."""
        for rank in self.ranks.values():
            with contextlib.suppress(OSError):
                if rank.process.stdin is not None:
                    rank.process.stdin.close()

    def wait(self, limit: float = LIMIT) -> dict[int, int]:
        """Exit codes by rank, of all ranks."""
        deadline = time.monotonic() + limit
        for number, rank in self.ranks.items():
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {number} hangs\n{self.report()}") from None
        return {number: rank.process.returncode for number, rank in self.ranks.items()}

    def report(self) -> str:
        return "\n".join(f"--- rank {n}: exit {r.code}\n{r.text}" for n, r in self.ranks.items())

    def servers(self) -> list[int]:
        """Processes of the server program; a test session builds its own, so these are this session's."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if os.readlink(entry / "exe") == str(self.programs.server):
                    found.append(int(entry.name))
        return found

    def segments(self) -> list[str]:
        return [path for rank in self.ranks.values() for path in rank.facts("segment")]

    def leftovers(self) -> list[str]:
        files = [str(path) for path in self.tmp.iterdir()]
        shared = [path for path in self.segments() if os.path.exists(path)]
        return [*files, *shared, *(f"server process {pid}" for pid in self.servers())]

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 10
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left behind: {left}\n{self.report()}"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks.values():
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait()
            if rank.process.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.process.stdin.close()
        deadline = time.monotonic() + 5
        while (pids := self.servers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in self.segments():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
