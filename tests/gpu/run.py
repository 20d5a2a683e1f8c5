"""multicomm's tests on real GPUs: `make test-gpu`. Standard library and torch alone; no network.

    python tests/gpu/run.py [--budget SECONDS] [--only TEXT] [--list] [--no-build]

Builds multicomm against the torch that is there (offline_build.py), starts jobs by torchrun, and prints one line per
check: its outcome, seconds, job and name. A job has a limit of its own, all of it a budget; checks that are left then
are named, as LATE. Ends with 0 only if none is and none has failed. After a check that fails, the rest of its job is
started anew. Only processes that it has started are ended, by a mark in their environment.

Without a GPU it says so and ends with 1. With GPU_DOUBLE=1 the same checks run on the simulated device and the double
of NCCL (tests/device), which shows that the checks themselves work and nothing about GPUs; GPU_DOUBLE=FOLDER takes
these from there instead of from build/device. So far that alone has ever run: no check has seen real hardware.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

from jobs import Job, all_jobs, chosen
from offline_build import FOLDER, ROOT, SITE, CannotBuild, build

MARK = "GPU_TEST_JOB"
BUDGET = 450.0
LEAVES_WITHIN = 15.0  # seconds from a rank's last line to its process's end
LEAVES_WITHIN_DOUBLE = 60.0  # on a machine with other work
TIDY_WITHIN = 8.0  # seconds after a job's end, for its helpers
RANK = Path(__file__).with_name("rank.py")
GRACE = 5.0  # of torchrun, when it is told to end
LAUNCHER_PREFIXES = (
    "TORCHELASTIC_",
    "OMPI_COMM_",
    "PMIX_",
    "PMI_",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "MULTICOMM_TEST_",
)
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE")
DOUBLE = os.environ.get("GPU_DOUBLE", "0")


def doubles() -> Path | None:
    """Where the simulated device and NCCL's double lie; None for real hardware."""
    if DOUBLE in ("", "0"):
        return None
    return ROOT / "build" / "device" if DOUBLE == "1" else Path(DOUBLE).resolve()


def environment() -> dict[str, str]:
    """What all jobs get: this process's environment without a launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), kept.get("PYTHONPATH", "")]))
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # Ranks in a container often run as root on purpose.
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    folder = doubles()
    if folder is not None:
        kept["SIM_LIBRARY"] = str(folder / "libsimulated_device.so")
        kept["SIM_DELAY_US"] = os.environ.get("SIM_DELAY_US", "20")
        kept["MULTICOMM_NCCL_LIBRARY"] = str(folder / "libnccl_double.so")
    return kept


def device_count() -> int:
    """Asked in a process of its own, so that this one holds no device."""
    if doubles() is not None:
        return int(os.environ.get("SIM_DEVICES", "8"))
    code = "import torch; print('devices', torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("devices ")]
    if not lines:
        print(done.stderr[-2000:], file=sys.stderr)
    return int(lines[-1].split()[1]) if lines else 0


def marked(mark: str) -> list[int]:
    """Live processes of a job."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def end(processes: list[int]) -> None:
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class Run:
    """A started job that has ended, or been ended."""

    def __init__(self, job: Job, folder: Path, common: dict[str, str], limit: float, script: Path = RANK) -> None:
        self.job, self.folder = job, folder
        folder.mkdir(parents=True)
        mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
        command += [str(script), "--out", str(folder), "--limit", str(limit)]
        command += ["--own"] * job.own + ["--leave"] * job.leave + list(job.checks)
        begin = time.monotonic()
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(
                command,
                env={**common, **job.environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as launcher,
        ):
            try:
                self.code: int | None = launcher.wait(limit)
            except subprocess.TimeoutExpired:
                self.code = None
                launcher.terminate()
                try:
                    launcher.wait(GRACE)
                except subprocess.TimeoutExpired:
                    end(marked(mark))
            except BaseException:  # an interrupt from the keyboard
                end(marked(mark))
                raise
        self.ended = time.time()
        self.seconds = time.monotonic() - begin
        deadline = time.monotonic() + TIDY_WITHIN
        while (left := marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.left = [self.describe(pid) for pid in left] if self.code is not None else []
        end(left)
        self.entries = [self.read(rank) for rank in range(job.ranks)]

    @staticmethod
    def describe(pid: int) -> str:
        try:
            return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
        except OSError:
            return f"{pid}"

    def read(self, rank: int) -> list[dict[str, object]]:
        file = self.folder / f"rank{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def outcome(self, check: str) -> tuple[str, float, str]:
        """Of one check: PASS if it passed on all ranks that should live; NONE if it was not begun."""
        last = check == self.job.checks[-1]
        found: dict[int, dict[str, object]] = {}
        begun = []
        for rank, entries in enumerate(self.entries):
            begun += [rank for entry in entries if entry.get("begin") == check]
            for entry in entries:
                if entry.get("check") == check:
                    found[rank] = entry
        seconds = max((float(str(entry["seconds"])) for entry in found.values()), default=0.0)
        failed = [f"rank {rank}: {entry['text']}" for rank, entry in found.items() if entry["outcome"] == "FAIL"]
        dead = self.job.dies if last else ()
        missing = [rank for rank in range(self.job.ranks) if rank not in found and rank not in dead]
        if not begun:
            return "NONE", 0.0, ""
        if failed:
            return "FAIL", seconds, failed[0]
        if missing:
            how = "hung until its limit" if self.code is None else f"ended with {self.code}"
            return "FAIL", self.seconds, f"no result of ranks {missing}: the job {how}"
        first = next(entry for entry in found.values())
        if any(entry["outcome"] == "SKIP" for entry in found.values()):
            return "SKIP", seconds, str(first["text"])
        return "PASS", seconds, str(first["text"])

    def ending(self) -> str | None:
        """What is wrong with how the job has ended; None if nothing is."""
        if self.code is None:
            return f"it had not ended after {self.seconds:.0f} s"
        if not self.job.dies and self.code != 0:
            return f"it ended with {self.code}"
        last = [float(str(entries[-1]["at"])) for entries in self.entries if entries]
        limit = LEAVES_WITHIN if doubles() is None else LEAVES_WITHIN_DOUBLE
        if not self.job.dies and last and self.ended - max(last) > limit:
            return f"its processes took {self.ended - max(last):.0f} s to end"
        return f"it left processes behind: {'; '.join(self.left)}" if self.left else None


class Session:
    """All jobs, and what is printed of them."""

    def __init__(self, budget: float, begin: float) -> None:
        self.budget, self.begin = budget, begin
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []
        self.common = environment()
        self.logs = FOLDER / "logs"

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.begin)

    def line(self, outcome: str, seconds: float, what: str, text: str = "") -> None:
        self.counts[outcome] += 1
        first, *more = text.splitlines() or [""]
        shown = f"  ({first})" if first else ""
        print(f"{outcome}  {seconds:6.1f} s  {what}{shown}", flush=True)
        for rest in more:
            print(f"{'':18}{rest}", flush=True)
        if outcome == "FAIL":
            self.failed.append(what)

    def run(self, job: Job) -> None:
        todo, start = job.checks, 0
        while todo:
            start += 1
            limit = min(job.limit, self.left() - GRACE - TIDY_WITHIN)
            if limit < 15:
                for check in todo:
                    self.line("LATE", 0.0, f"{job.name}: {check}", "not run: no time is left of the budget")
                return
            folder = self.logs / (job.name if start == 1 else f"{job.name}-{start}")
            run = Run(Job(**{**job.__dict__, "checks": todo}), folder, self.common, limit)
            outcomes = [(check, *run.outcome(check)) for check in todo]
            bad = False
            for check, outcome, seconds, text in outcomes:
                if outcome != "NONE":
                    self.line(outcome, seconds, f"{job.name}: {check}", text)
                    bad = bad or outcome == "FAIL"
            begun = [check for check, outcome, _, _ in outcomes if outcome != "NONE"]
            if not begun:
                bad = True
                for check in todo:
                    self.line("FAIL", run.seconds, f"{job.name}: {check}", "the job did not come to it")
            elif not bad and len(begun) == len(todo):
                wrong = run.ending()
                bad = wrong is not None
                self.line("FAIL" if bad else "PASS", run.seconds, f"{job.name}: start and end of the job", wrong or "")
            elif not bad:
                bad = True
                self.line("FAIL", run.seconds, f"{job.name}: the job ended with {run.code} after {begun[-1]}")
            if bad:
                self.show(folder / "log")
            todo = todo[len(begun) :] if begun else ()

    @staticmethod
    def show(log: Path) -> None:
        lines = log.read_text(errors="replace").splitlines()
        # torchrun's own account of a failure says nothing that is not above it.
        ends = [i for i, line in enumerate(lines) if "Sending process" in line or "failed (exitcode" in line]
        for line in lines[: ends[0] + 1 if ends else None][-40:]:
            print(f"    | {line[:220]}")
        print(f"    | all of it: {log}", flush=True)


def main() -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for everything, the build included")
    parser.add_argument("--only", help="jobs or checks whose names have this in them")
    parser.add_argument("--list", action="store_true", help="name the checks and run none")
    parser.add_argument("--no-build", action="store_true", help="take what build/gpu/site has")
    args = parser.parse_args()
    devices = device_count()
    double = doubles()
    if devices == 0:
        print("multicomm: test-gpu: there is no GPU here that torch sees, so nothing has been tested.\n")
        print("GPU_DOUBLE=1 make test-gpu tries the checks themselves on a simulated device.")
        return 1
    if double is not None:
        missing = [n for n in ("libsimulated_device.so", "libnccl_double.so") if not (double / n).exists()]
        if missing:
            print(f"multicomm: test-gpu: {missing} missing in {double}: make test-gpu GPU_DOUBLE=1 builds them")
            return 1
        print("GPU_DOUBLE: on a SIMULATED device. This shows that the checks run, and nothing about GPUs.")
    jobs = all_jobs(devices, double is not None)
    if args.only:
        jobs = chosen(jobs, lambda name: args.only in name)
    if args.list:
        for job in jobs:
            print(f"{job.name} ({job.ranks} ranks): {', '.join(job.checks)}")
        return 0
    session = Session(args.budget, begin)
    if not args.no_build:
        try:
            session.line("PASS", time.monotonic() - begin, "build", build(args.budget - 30))
        except CannotBuild as reason:
            session.line("FAIL", time.monotonic() - begin, "build", str(reason))
            return 1
    if session.logs.exists():
        session.logs.rename(FOLDER / f"logs-before-{int(time.time())}")
    for job in jobs:
        session.run(job)
    counts, what = session.counts, "simulated device" if double else "GPU"
    print(
        f"\n{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped, {counts['LATE']} not run in "
        f"{time.monotonic() - begin:.0f} s on {devices} {what}(s); logs: {session.logs}"
    )
    for what in session.failed:
        print(f"FAILED: {what}")
    return 0 if counts["FAIL"] == counts["LATE"] == 0 and counts["PASS"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
