"""What tests/test_simulated_device.py runs: the simulated device by itself. No sleeps: gates say what comes first."""

from __future__ import annotations

import copy
import ctypes
import os
import threading

import pytest
import torch

from device import simulated

simulated.load()


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Each check starts on device 0 with all streams at rest."""
    torch.sim.set_device(0)
    for device in range(torch.sim.device_count()):
        torch.sim.synchronize(device)


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def bytes_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_ubyte * count).from_address(address))


def test_loading_again_does_nothing() -> None:
    assert simulated.load() is simulated.load()
    assert torch.sim.is_available()
    assert torch.sim.device_count() == int(os.environ.get("SIM_DEVICES", "8"))
    assert torch.accelerator.current_accelerator() == torch.device("sim")


def test_copies_are_asynchronous() -> None:
    """From pinned memory, on the device, to pinned memory: nothing is there before the gate opens, all is after."""
    source, target = pinned(1, 2), pinned(0, 0)
    on_device = torch.zeros(2, device="sim")
    copies = [torch.zeros(2, device="sim") for _ in range(2)]
    torch.sim.synchronize()
    stream = torch.sim.current_stream()
    gate = simulated.block()
    on_device.copy_(source, non_blocking=True)
    on_device.mul_(3).add_(torch.ones(2, device="sim"))
    torch._foreach_copy_(copies, [on_device, on_device.clone() + 1])
    target.copy_(copies[1], non_blocking=True)
    done = torch.Event("sim")
    done.record(stream)
    assert not stream.query()
    assert not done.query()
    assert target.tolist() == [0, 0]
    gate.open()
    done.synchronize()
    assert done.query()
    assert target.tolist() == [5, 8]
    assert copies[0].tolist() == [4, 7]


def test_tensors_of_queued_operations_live_on() -> None:
    source = pinned(1, 2)
    target = torch.zeros(2, device="sim")
    with simulated.block():
        middle = torch.empty(2, device="sim")
        middle.copy_(source, non_blocking=True)
        target.copy_(middle)
        del source, middle
    assert target.tolist() == [1, 2]


def test_other_copies_wait() -> None:
    """Memory that is not pinned, and copies that are told to block."""
    gate = simulated.block()
    threading.Timer(0.05, gate.open).start()
    on_device = torch.zeros(2, device="sim")
    on_device.copy_(torch.ones(2), non_blocking=True)
    assert torch.sim.current_stream().query()
    assert on_device.cpu().tolist() == [1, 1]


def test_streams_are_independent() -> None:
    """Without an event a stream reads what another has not written yet; a blocked one holds up no one."""
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    data, early = torch.zeros(2, device="sim"), torch.full((2,), 5.0, device="sim")
    torch.sim.synchronize()
    with a:
        gate = simulated.block()
        data.fill_(1)
    with b:
        early.copy_(data)
        assert early.tolist() == [0, 0]
        assert (data @ data).item() == 0  # nor does an operation on the CPU wait for other streams
    gate.open()
    a.synchronize()
    assert data.tolist() == [1, 1]


def test_events_order_streams() -> None:
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    data, late = torch.zeros(2, device="sim"), torch.zeros(2, device="sim")
    torch.sim.synchronize()
    with a:
        gate = simulated.block()
        data.fill_(1)
        ready = a.record_event()
        data_again = simulated.block()  # recorded before: b does not wait for this
    with b:
        b.wait_event(ready)
        late.copy_(data)
        assert not b.query()
    gate.open()
    b.synchronize()
    assert not a.query()
    data_again.open()
    assert late.tolist() == [1, 1]


def test_a_wait_is_for_the_version_of_its_time() -> None:
    a, b, c = (torch.Stream(device="sim") for _ in range(3))
    event = torch.Event("sim", enable_timing=True)
    b.wait_event(event)  # never recorded
    b.synchronize()
    first, second = simulated.block(a), simulated.block(c)
    event.record(a)
    b.wait_event(event)
    event.record(c)
    first.open()
    b.synchronize()
    assert not event.query()
    second.open()
    event.synchronize()
    later = torch.Event("sim", enable_timing=True)
    later.record(c)
    later.synchronize()
    assert event.elapsed_time(later) >= 0


def test_the_current_stream_is_the_thread_s() -> None:
    stream, seen = torch.Stream(device="sim"), []
    with stream, torch.sim.device(1):
        thread = threading.Thread(
            target=lambda: seen.extend([torch.sim.current_stream(0).stream_id, torch.sim.current_device()])
        )
        thread.start()
        thread.join()
        assert torch.sim.current_stream(0) == stream
        assert torch.sim.current_stream().device_index == 1
    assert seen == [0, 0]


def test_freed_memory_is_poisoned() -> None:
    data = torch.ones(4, device="sim")
    torch.sim.synchronize()
    address = data.data_ptr()
    assert bytes_at(address, 4) != [simulated.POISON] * 4
    del data
    assert bytes_at(address, 16) == [simulated.POISON] * 16
    fresh = torch.empty(1, dtype=torch.uint8, device="sim")
    assert fresh.item() == simulated.POISON


def test_memory_is_freed_in_its_stream_s_order() -> None:
    """What its own stream does with it is still right after the host freed it; what others do only if recorded."""
    other = torch.Stream(device="sim")
    data = torch.ones(4, device="sim")
    recorded = torch.ones(4, device="sim")
    recorded.record_stream(other)
    torch.sim.synchronize()
    address, address_recorded = data.data_ptr(), recorded.data_ptr()
    gate, gate_other = simulated.block(), simulated.block(other)
    del data, recorded
    assert simulated.POISON not in bytes_at(address, 16)
    gate.open()
    torch.sim.current_stream().synchronize()
    assert bytes_at(address, 16) == [simulated.POISON] * 16
    assert simulated.POISON not in bytes_at(address_recorded, 16)
    gate_other.open()
    other.synchronize()
    assert bytes_at(address_recorded, 16) == [simulated.POISON] * 16


def test_pinned_memory() -> None:
    data = torch.empty(4, pin_memory=True)
    assert data.device.type == "cpu"
    assert data.is_pinned()
    assert data[2:].is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.empty(4).is_pinned()
    address = data.data_ptr()
    del data
    assert bytes_at(address, 16) == [simulated.POISON] * 16


def test_two_devices() -> None:
    """Each has its streams; a copy between them comes after both and before what follows on both."""
    here, there = torch.zeros(2, device="sim:0"), torch.zeros(2, device="sim:1")
    for device in (0, 1):
        torch.sim.synchronize(device)
    with torch.sim.device(1):
        gate = simulated.block()
        there.fill_(7)
        assert torch.ones(1, device="sim").device.index == 1
    assert torch.sim.current_device() == 0
    assert here.tolist() == [0, 0]
    here.copy_(there)
    there.fill_(8)
    assert not torch.sim.current_stream(0).query()
    gate.open()
    assert here.tolist() == [7, 7]
    assert there.tolist() == [8, 8]
    with pytest.raises(RuntimeError, match="no simulated device"):
        torch.sim.set_device(torch.sim.device_count())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_equals_the_cpu_s(optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    reference = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    )
    model = copy.deepcopy(reference)
    inputs, labels = torch.randn(3, 6, 4), torch.tensor([0, 1, 2, 0, 1, 2])

    def train(network: torch.nn.Module, device: str) -> list[torch.Tensor]:
        network = network.to(device)
        steps = optimizer(network.parameters(), lr=0.1)
        for batch in inputs:
            steps.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(batch.to(device)), labels.to(device))
            loss.backward()
            steps.step()
        return [parameter.detach().cpu() for parameter in network.parameters()]

    for mine, right in zip(train(model, "sim:1"), train(reference, "cpu"), strict=True):
        torch.testing.assert_close(mine, right)


def test_views_and_types() -> None:
    data = torch.arange(6.0, device="sim").view(2, 3)
    data.t()[1] = torch.tensor([10.0, 20.0], device="sim")
    data[0, 1:].add_(1)
    assert data.tolist() == [[0, 11, 3], [3, 20, 5]]
    assert "device='sim:0'" in repr(data)
    assert data.unfold(1, 2, 1).shape == (2, 2, 2)
    assert data.to(torch.int32).expand(2, 2, 3).sum().item() == 84
    numbers = torch.tensor([1 + 2j, 3 - 1j], device="sim")
    assert numbers.conj().cpu().tolist() == [1 - 2j, 3 + 1j]
    assert torch.view_as_real(numbers).tolist() == [[1, 2], [3, -1]]
    with pytest.raises(RuntimeError, match="expanded size"):
        data.copy_(torch.ones(4, device="sim"))


def test_capturing() -> None:
    a, b = torch.Stream(device="sim"), torch.Stream(device="sim")
    with simulated.capturing(a):
        assert a.is_capturing()
        assert not b.is_capturing()
    assert not a.is_capturing()


def test_a_forked_process_is_told() -> None:
    torch.ones(1, device="sim").add_(1)
    child = os.fork()
    if child == 0:
        told = torch.sim._is_in_bad_fork()
        try:
            torch.ones(1, device="sim").add_(1)
        except RuntimeError:
            os._exit(0 if told else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_the_process_ends_with_a_blocked_stream() -> None:
    """No hang, though nobody opens this one: it is the last."""
    simulated.block(torch.Stream(device="sim:2"))
    torch.ones(2, device="sim:2").add_(1)
