"""Pins what a timeline shows: every operation's life, on every rank, in a file that is whole at every moment; and what
`python -m multicomm timeline` makes of the ranks' files. The jobs are whole ones; their files are read here.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, needs_multicomm, raises
from harness.jobs import launch, say
from harness.settings import clean_environment

pytestmark = needs_multicomm("writes no timeline")
LIMIT = 40.0
Event = dict[str, Any]
STATES = ["queued", "offered", "posted", "agreed", "packing", "moving", "launching", "launched"]

if BACKEND == "multicomm":
    import multicomm
    from multicomm import _clocks, _merge, _trace


def folder() -> Path:
    return Path(os.environ["TIMELINE_TEST"])


def of_job(tmp_path: Path) -> dict[str, str]:
    return {"TIMELINE_TEST": str(tmp_path / "traces")}


def read(path: Path) -> list[Event]:
    """A file as any program reads it."""
    events: list[Event] = json.loads(path.read_text())
    return events


def operations(events: list[Event], name: str | None = None) -> list[Event]:
    return [e for e in events if e.get("cat") == "operation" and name in (None, e["name"])]


def check_lives(events: list[Event]) -> None:
    """Every operation's states are in order and fill its time, and no lane has two slices at a time."""
    lanes: dict[tuple[int, int], float] = {}
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        assert event["dur"] >= 0, event
        lane = event["pid"], event["tid"]
        assert event["ts"] >= lanes.get(lane, 0.0) - 0.002, event
        lanes[lane] = event["ts"] + event["dur"]
        if event["cat"] == "round":
            continue
        states = event["args"]["states"]
        assert [s for s in STATES if s in states] == list(states), event
        assert all(time >= 0 for time in states.values()), event
        assert abs(sum(states.values()) - event["dur"]) < 0.05, event


# --- what is in a file ---


def many_operations() -> None:
    dist.init_process_group(BACKEND)
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(group_desc=name) for name in ("left", "right")]
    path = multicomm.start_timeline(folder())
    assert path == folder() / f"rank{rank}.json", path
    for group in groups:
        works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for _ in range(20)]
        works.append(dist.broadcast(torch.ones(5), 0, group=group, async_op=True))
        works.append(dist.all_reduce(torch.ones(200_000, dtype=torch.int64), group=group, async_op=True))
        for work in works:
            work.wait()
    if world > 1:
        ends = [
            dist.isend(torch.ones(7), (rank + 1) % world, tag=3),
            dist.irecv(torch.ones(7), (rank - 1) % world, tag=3),
        ]
        for end in ends:
            end.wait()
    multicomm.stop_timeline()
    multicomm.stop_timeline()  # nothing to stop
    json.loads(path.read_text())
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_operation_has_its_life_on_every_rank(tmp_path: Path, ranks: int) -> None:
    launch(many_operations, ranks, tmp_path, environment=of_job(tmp_path)).check()
    seen = []
    for rank in range(ranks):
        events = read(tmp_path / "traces" / f"rank{rank}.json")
        check_lives(events)
        about = events[0]["args"]
        assert (about["rank"], about["world_size"]) == (rank, ranks), about
        mine = operations(events)
        assert {e["pid"] for e in mine} == {rank}
        for group in ("left", "right"):
            of_group = [e for e in mine if e["args"]["group"] == group]
            assert [e["args"]["sequence"] for e in sorted(of_group, key=lambda e: e["args"]["sequence"])] == [
                *range(22)
            ]
            big = [e for e in of_group if e["args"]["dtype"] == "int64"]
            assert len(big) == 1 and big[0]["args"]["bytes"] == 1_600_000 and big[0]["args"]["fused"] == 1, big
            assert {"queued", "offered", "agreed", "packing", "moving"} == big[0]["args"]["states"].keys(), big
            assert big[0]["args"]["op"] == "SUM"
            small = [e for e in of_group if e["name"] == "broadcast"]
            assert len(small) == 1 and small[0]["args"]["root"] == 0
            fused = [e for e in of_group if e["args"]["bytes"] == 4000]
            assert len(fused) == 20 and all(e["args"]["op"] == "SUM" for e in fused)
        messages = {e["name"]: e["args"] for e in mine if "peer" in e["args"]}
        assert ranks == 1 or messages["send"]["peer"] == (rank + 1) % ranks
        assert ranks == 1 or (messages["recv"]["tag"], messages["recv"]["bytes"]) == (3, 28), messages
        batches = [e for e in events if e.get("cat") == "batch"]
        for batch in batches:
            key = batch["args"]["number"], batch["args"]["batch"]
            inside = [e["args"] for e in mine if (e["args"]["number"], e["args"].get("batch")) == key]
            assert len(inside) == batch["args"]["operations"], batch
            assert all(args["fused"] == len(inside) and args["round"] == batch["args"]["round"] for args in inside)
            assert sum(args["bytes"] for args in inside) == batch["args"]["bytes"]
        rounds = {(e["args"]["group"], e["args"]["round"]): e for e in events if e.get("cat") == "round"}
        for event in mine:
            if "round" in event["args"]:
                ended = rounds[event["args"]["group"], event["args"]["round"]]
                assert event["ts"] + event["dur"] >= ended["ts"] + ended["dur"] - 0.002
        keys = ("group", "sequence", "bytes", "dtype", "round", "batch", "fused", "inline")
        seen.append({tuple(e["args"].get(key) for key in keys) for e in mine if "peer" not in e["args"]})
    assert all(other == seen[0] for other in seen), "the ranks show different operations"


def several_times() -> None:
    data = torch.ones(3)
    for number in range(4):
        dist.all_reduce(data)
        path = multicomm.start_timeline(folder() / str(number))
        raises(lambda: multicomm.start_timeline(folder()), "two", RuntimeError, "being written already, to", str(path))
        for _ in range(number):
            dist.all_reduce(data)
        multicomm.stop_timeline()
        assert len(operations(json.loads(path.read_text()))) == number


def equal_names() -> None:
    """Two groups that are called alike, and move alike."""
    groups = [dist.new_group(group_desc="twin") for _ in range(2)]
    multicomm.start_timeline(folder() / "twins")
    for group in groups:
        dist.all_reduce(torch.ones(3), group=group)
    multicomm.stop_timeline()


def mismatch_and_leftover() -> None:
    group = dist.new_group()
    multicomm.start_timeline(folder() / "errors")
    rank = dist.get_rank()
    raises(lambda: dist.all_reduce(torch.ones(2 + rank), group=group), "shapes", dist.DistBackendError)
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True) if rank == 0 else None
    multicomm.stop_timeline()
    dist.all_reduce(torch.ones(3), group=group) if work is None else work.wait()


def rounds_in_turn() -> None:
    """Small operations, which one rank and another comes to last."""
    multicomm.start_timeline(folder() / "rounds")
    data = torch.ones(2000)
    for _ in range(150):
        dist.all_reduce(data)
    multicomm.stop_timeline()


def one_after_the_other() -> None:
    dist.init_process_group(BACKEND)
    several_times()
    equal_names()
    mismatch_and_leftover()
    rounds_in_turn()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job of two ranks has written."""
    tmp_path = tmp_path_factory.mktemp("job")
    launch(one_after_the_other, 2, tmp_path, environment=of_job(tmp_path)).check()
    return tmp_path / "traces"


def test_groups_with_equal_names_stay_apart(traces: Path) -> None:
    for trace in _merge.merge([traces / "twins"]).traces:
        twins = {number: group for number, group in trace.groups.items() if group.label == "twin"}
        assert len(twins) == 2 and len({group.identity for group in twins.values()}) == 2, trace.groups
        found = [e for e in trace.of("operation") if e["args"]["number"] in twins]
        assert [e["args"]["sequence"] for e in found] == [0, 0]
        assert len({e["args"]["number"] for e in found}) == len({e["tid"] for e in found}) == 2


def test_it_can_be_started_and_stopped_several_times(traces: Path) -> None:
    sequences = [
        [e["args"]["sequence"] for e in operations(read(traces / str(number) / "rank1.json"))] for number in range(4)
    ]
    assert sequences == [[], [2], [4, 5], [7, 8, 9]]
    assert not list(traces.glob("*/.*")), "the file that is not seen is still there"


def test_errors_and_what_is_not_over_are_shown(traces: Path) -> None:
    for rank in range(2):
        events = read(traces / "errors" / f"rank{rank}.json")
        check_lives(events)
        first, *rest = operations(events)
        assert "disagree on collective 0" in first["args"]["error"], first
        assert [e["args"].get("unfinished") for e in rest] == [True] * (1 - rank)


def plain_program() -> None:
    dist.init_process_group(BACKEND)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def test_the_environment_asks_for_it(tmp_path: Path) -> None:
    launch(plain_program, 2, tmp_path, environment={"MULTICOMM_TIMELINE": str(tmp_path / "a" / "b")}).check()
    for rank in range(2):
        assert len(operations(read(tmp_path / "a" / "b" / f"rank{rank}.json"), "all_reduce")) == 1


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = launch(plain_program, 1, tmp_path, environment={"MULTICOMM_TIMELINE": str(tmp_path / "file")}).check(ok=False)
    job.says("multicomm: timeline: cannot make the folder")


# --- a file is whole, whatever happens ---


def writes_for_ever(rank: int, path: str, started: Any) -> None:
    importlib.import_module(BACKEND)
    dist.init_process_group(BACKEND, init_method=f"file://{path}/store", rank=0, world_size=1)
    multicomm.start_timeline(path)
    started.set()
    tensors = [torch.ones(3) for _ in range(100)]
    while True:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()


# The parts that write, without a job around them: killed many times, at any moment.
WRITER = r"""
#include <cstdio>
#include <string>
#include "timeline/trace_file.h"
int main(int, char** argv) {
  multicomm::timeline::TraceFile file(argv[1], "{\"first\":1}");
  std::puts("started");
  std::fflush(stdout);
  for (int i = 0;; ++i) {
    file.append("{\"number\":" + std::to_string(i) + ",\"text\":\"" + std::string(i * 37 % 1000, 'x') + "\"}");
    if (i % 3 == 0) file.flush();
  }
}
"""


def test_a_file_is_whole_when_its_writer_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    (tmp_path / "writer.cpp").write_text(WRITER)
    command = ["c++", "-std=c++20", "-O1", f"-I{root / 'csrc'}", str(tmp_path / "writer.cpp")]
    command += [str(root / "csrc/timeline/trace_file.cpp"), "-o", str(tmp_path / "writer")]
    subprocess.run(command, check=True, timeout=LIMIT)
    path = tmp_path / "trace.json"
    sizes = set()
    chance = random.Random(1)
    for _ in range(80):
        writer = subprocess.Popen([tmp_path / "writer", path], stdout=subprocess.PIPE)
        assert writer.stdout
        writer.stdout.readline()
        # Killed at one moment or another.
        moment = time.monotonic() + chance.uniform(0, 0.02)
        while time.monotonic() < moment:
            pass
        writer.kill()
        writer.wait()
        writer.stdout.close()
        events = read(path)
        assert [event["number"] for event in events[1:]] == [*range(len(events) - 1)]
        sizes.add(len(events))
    assert len(sizes) > 8, sizes


def test_a_killed_rank_leaves_a_whole_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=writes_for_ever, args=(0, str(tmp_path), started))
    process.start()
    assert started.wait(LIMIT)
    path = tmp_path / "rank0.json"
    before = path.read_bytes()
    while path.read_bytes() == before:
        process.join(0.05)
        assert process.is_alive()
    process.kill()
    process.join()
    check_lives(read(path))
    assert operations(read(path))


def waits_for_ever(rank: int, path: str) -> None:
    importlib.import_module(BACKEND)
    dist.init_process_group(
        BACKEND, init_method=f"file://{path}/store", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT)
    )
    dist.all_reduce(torch.ones(3))
    multicomm.start_timeline(path)
    if rank == 0:
        dist.all_reduce(torch.ones(77))
    signal.pause()


def test_what_a_killed_rank_was_waiting_for_is_shown(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=waits_for_ever, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    path = tmp_path / "rank0.json"
    while not path.exists() or "waits for long" not in path.read_text():
        processes[1].join(0.05)
        assert all(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
        process.join()
    assert not operations(read(path))
    (stuck,) = operations(_merge.merge([tmp_path]).events)
    assert stuck["args"]["unfinished"] and stuck["args"]["bytes"] == 308 and stuck["dur"] >= 1e6, stuck
    assert list(stuck["args"]["states"]) == ["queued", "offered"], stuck


# --- the ranks together ---


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line, as a user has it."""
    return subprocess.run(
        [sys.executable, "-m", "multicomm", "timeline", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=clean_environment(),
        check=False,
    )


@pytest.fixture(scope="module")
def rounds(traces: Path) -> Path:
    """The files with many rounds, and nothing else."""
    return traces / "rounds"


def test_the_ranks_are_merged_into_one_trace_and_one_page(rounds: Path, tmp_path: Path) -> None:
    done = call(rounds, "-o", tmp_path / "all.json", "--html", tmp_path / "all.html")
    assert done.returncode == 0 and not done.stdout and not done.stderr, done  # one clock: nothing to say of it
    whole = json.loads((tmp_path / "all.json").read_text())
    events = whole["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    check_lives([e for e in events if e.get("cat") != "state"])
    assert min(e["ts"] for e in events if "ts" in e) == 0
    for operation in operations(events):
        inside = [
            e
            for e in events
            if e.get("cat") == "state"
            and (e["pid"], e["tid"]) == (operation["pid"], operation["tid"])
            and operation["ts"] - 0.01 <= e["ts"] <= e["ts"] + e["dur"] <= operation["ts"] + operation["dur"] + 0.01
        ]
        assert {e["name"] for e in inside} >= operation["args"]["states"].keys()
    rounds = [e for e in events if e.get("cat") == "round"]
    assert {e["args"]["last_rank"] for e in rounds} <= {0, 1} and rounds
    page = (tmp_path / "all.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "rank 1, host" in page and "all_reduce(SUM) of 8,000 bytes" in page
    assert not re.search(r"(src|href)=", page), "the page needs something that is not in it"


def test_ranks_of_one_clock_are_left_as_they_are(rounds: Path) -> None:
    clocks = _clocks.align(_trace.read_all([rounds]))
    (clock,) = clocks.values()
    assert clock.time(123.5) == 123.5 and clock.error == 0


@pytest.mark.parametrize(("ahead", "drift"), [(0.0, 0.0), (-98_765_432_109.0, 0.0), (5e6, 0.01)])
def test_clocks_of_two_hosts_are_set_against_each_other(
    rounds: Path, tmp_path: Path, ahead: float, drift: float
) -> None:
    """`drift` is far more than any clock's, since the job is short."""
    for rank in range(2):
        events = read(rounds / f"rank{rank}.json")
        begin = next(e["ts"] for e in events if "ts" in e)
        for event in events:
            if rank == 1 and "ts" in event:
                event["ts"] += ahead + drift * (event["ts"] - begin)
        if rank == 1:
            events[0]["args"]["clock"] = "another host's"
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(events))
    shifted = _trace.read_all([tmp_path])
    clock = _clocks.align(shifted)["another host's"]
    assert clock.error is not None and clock.error < 10_000
    true = {name: event["ts"] for name, event in _trace.read(rounds / "rank1.json").rounds().items()}
    for name, event in shifted[1].rounds().items():
        # The bound is a proof while the clocks run alike; between knots a drift is only followed.
        assert abs(clock.time(event["ts"]) - true[name]) <= clock.error + (2000 if drift else 0.01)
    done = call(tmp_path, "-o", tmp_path / "all.json")
    assert re.fullmatch(
        r"clock of ranks 1: \S+ s from that of rank 0, within \d+ us, by \d+ common rounds\n", done.stdout
    )


def test_without_common_rounds_the_wall_clock_has_to_do(rounds: Path, tmp_path: Path) -> None:
    for rank in range(2):
        events = read(rounds / f"rank{rank}.json")
        if rank == 1:
            events = [e for e in events if e.get("cat") != "round"]
            events[0]["args"]["clock"] = "another host's"
            events[0]["args"]["steady_us"] += 7e6
            for event in events:
                if "ts" in event:
                    event["ts"] += 7e6
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(events))
    clock = _clocks.align(_trace.read_all([tmp_path]))["another host's"]
    assert clock.error is None and abs(clock.time(7e6)) < 1e5
    assert "wall clocks only" in call(tmp_path, "-o", tmp_path / "all.json").stdout


BROKEN = {
    "no such file": (None, "No such file or directory"),
    "not JSON": ("[{", "not JSON"),
    "no array": ('{"a": 1}', "not an array of events"),
    "merged": ('{"traceEvents": []}', "no rank's own file: a merged one"),
    "nobody's": ('[{"ph": "M", "name": "x"}]', "does not begin with who wrote it"),
    "too new": ('[{"ph": "M", "name": "multicomm", "args": {"version": 99}}]', "version 99; this multicomm reads"),
    "no rank": ('[{"ph": "M", "name": "multicomm", "args": {"version": 1}}]', "'rank'"),
    "no time": ('[HEAD, {"ph": "X", "name": "round"}]', "event 1 has no time"),
    "backwards": (
        '[HEAD, {"ph": "X", "cat": "round", "name": "x", "ts": 1, "dur": -1}]',
        "event 1 has no duration, or a negative",
    ),
    "unknown": ('[HEAD, {"ph": "X", "cat": "x", "name": "x", "ts": 1, "dur": 1}]', "event 1 is of an unknown category"),
    "no group": (
        '[HEAD, {"ph": "X", "cat": "round", "name": "x", "ts": 1, "dur": 1}]',
        r"event 1 \(round\) has no number",
    ),
}
HEAD = json.dumps(
    {
        "ph": "M",
        "name": "multicomm",
        "args": {
            "version": 1,
            "rank": 0,
            "world_size": 1,
            "place": "here",
            "clock": "c",
            "wall_us": 1.0,
            "steady_us": 1.0,
        },
    }
)


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, what: str) -> None:
    content, wrong = BROKEN[what]
    path = tmp_path / "rank0.json"
    if content is not None:
        path.write_text(content.replace("HEAD", HEAD))
    raises(lambda: _trace.read_all([path]), what, _trace.TraceError, f"{path}: ", wrong)


def test_the_command_says_what_is_wrong(rounds: Path, tmp_path: Path) -> None:
    raises(lambda: _merge.merge([tmp_path]), "empty", _trace.TraceError, f"{tmp_path}: has no rank")
    raises(lambda: _merge.merge([rounds, rounds / "rank0.json"]), "twice", _trace.TraceError, "are both of rank 0")
    for arguments, wrong in (
        ((rounds,), "say what to write: -o merged.json, --html page.html, or both"),
        ((rounds, "-o", tmp_path / "no" / "x"), "No such file or directory"),
    ):
        done = call(*arguments)
        assert done.returncode == 1 and wrong in done.stderr and done.stderr.startswith("multicomm: "), done
        assert "Traceback" not in done.stderr


# --- torch's own profiler ---


def profiled() -> None:
    dist.init_process_group(BACKEND)
    pair = dist.new_group([0, 1], group_desc="the pair")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(30), group=pair)
        dist.all_reduce(torch.ones(50, dtype=torch.int64), group=pair)
        if dist.get_rank() == 0:
            dist.send(torch.ones(9), 1, group=pair)
        else:
            dist.recv(torch.ones(9), 0, group=pair)
    path = Path(os.environ["TMPDIR"]) / f"profile{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    found = [e["args"] for e in events if e.get("name") == "record_param_comms"]
    assert len(found) == 3, found
    for args, name, count, dtype, sequence in zip(
        found, ("allreduce", "allreduce", "send/recv"), (30, 50, 9), ("Float", "Long", "Float"), (0, 1, 0), strict=True
    ):
        assert args["Collective name"] in name.split("/"), args
        assert (args["dtype"], args["Group size"], args["Process Group Description"]) == (dtype, 2, "the pair"), args
        assert args["Process Group Name"] and json.loads(args["Process Group Ranks"]) == [0, 1], args
        assert count in (args["In msg nelems"], args["Out msg nelems"]), args
        assert args.get("Seq", sequence) == sequence, args
    say("profiled")
    dist.destroy_process_group()


def test_the_profiler_is_told_of_group_and_sizes(tmp_path: Path) -> None:
    launch(profiled, 2, tmp_path).check().says("profiled", 2)
