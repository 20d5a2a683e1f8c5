"""Everything that parses what another process has sent or stored, fuzzed for a moment; and proof that each target finds
a fault. `make fuzz SECONDS=600` takes longer. `make test` builds the programs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "build" / "fuzz"
TARGETS = sorted(path.stem for path in (ROOT / "tests" / "fuzz").glob("*.cpp") if path.stem != "standalone")
SECONDS = 3
LONGEST = 45
SEED = 1

# One check per target, taken out. From the seeds each is found at once; by coverage alone, from nothing, these are.
FAULTS = {
    "record": ("coordinator/names.cpp", "std::min(in.fresh_count, kNewNames)", "in.fresh_count"),
    "settings": ("coordinator/settings.cpp", "s.chunk_elements == 0 || ", ""),
    "node_config": ("bootstrap/node_config.h", "parse_number(node, 0, nodes - 1", "parse_number(node, 0, nodes + 9"),
    "introductions": ("bootstrap/start_agreement.cpp", 'text == "go"', "!text.starts_with('-')"),
    "relay": ("bootstrap/relay.cpp", "blob.size() < sizeof(uint64_t)", "false"),
    "rank_watch": ("bootstrap/pmix_server/rank_watch.cpp", " && message.id < world_", ""),
}
FROM_NOTHING = ("record", "settings", "introductions")


def fuzz(program: Path, folder: Path, seconds: int, *, seeded: bool = True) -> subprocess.CompletedProcess[str]:
    assert program.exists(), f"{program} is missing: run the tests by `make test`, or `make fuzz-targets` first"
    corpus = folder / "corpus"
    corpus.mkdir()
    if seeded:
        subprocess.run([program], env=os.environ | {"FUZZ_WRITE_SEEDS": str(corpus)}, check=True, timeout=60)
        assert any(corpus.iterdir()), "no seeds"
    limits = ["-max_len=8192", "-timeout=10", "-rss_limit_mb=1024", "-malloc_limit_mb=128", f"-seed={SEED}"]
    command = [program, f"-max_total_time={seconds}", *limits, f"-artifact_prefix={folder}/", corpus]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + 60, check=False)


def has_libfuzzer(program: Path) -> bool:
    return b"libFuzzer" in program.read_bytes()


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_found(target: str, tmp_path: Path) -> None:
    done = fuzz(PROGRAMS / target, tmp_path, SECONDS)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert "Done " in output, output[-2000:]
    print("libFuzzer" if has_libfuzzer(PROGRAMS / target) else "blind mutation", output.splitlines()[-1])


@pytest.mark.parametrize("target", TARGETS)
def test_a_fault_is_found(target: str, tmp_path: Path) -> None:
    """With a check taken out, the target fails; so that the test above can."""
    file, check, nothing = FAULTS[target]
    sources = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", sources)
    text = (sources / file).read_text()
    assert text.count(check) == 1, f"{file} has changed: name another check of {target}'s"
    (sources / file).write_text(text.replace(check, nothing))
    program = tmp_path / "build" / target
    make = ["make", f"SRC={sources}", f"FUZZ={program.parent}", str(program)]
    subprocess.run(make, cwd=ROOT, check=True, capture_output=True, timeout=200)
    alone = target in FROM_NOTHING and has_libfuzzer(program)
    done = fuzz(program, tmp_path, LONGEST, seeded=not alone)
    assert done.returncode != 0, done.stderr[-3000:]
    assert "Sanitizer" in done.stderr or "not so:" in done.stderr or "runtime error" in done.stderr, done.stderr[-3000:]
