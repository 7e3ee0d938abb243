"""Pinned memory in pieces, and register_host: what a runtime is told, in which order, and what is undone.

The runtime is made up (fake_runtime.py): it refuses what a real one refuses, and can place the device's
addresses elsewhere, as HIP and WSL2 do.
"""

import gc
import itertools
import math
import mmap
import re
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from fake_runtime import FAR, FakeRuntime
from torch import Tensor

from torch_hicache import HostRegistration, device_view, empty_host, register_host
from torch_hicache.registrations import REGISTRARS, TABLE, Cuts, Registrar
from torch_hicache.shared_memory import SharedHostMemory
from torch_hicache.testing import check_transfer, fill_pool

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return FakeRuntime().install(monkeypatch)


def pinned(nbytes: int, **options: object) -> Tensor:
    return empty_host((nbytes,), torch.uint8, "cpu", "pinned", **options)  # type: ignore[arg-type]


class TestPieces:
    @pytest.mark.parametrize(
        ("nbytes", "unit", "largest"),
        [
            (10 * PAGE, PAGE, 3 * PAGE),
            (10 * PAGE + 5, 2 * PAGE, 5 * PAGE),
            (1 << 20, 3 * 1024, 100_000),
            (1 << 20, 656, 700_000),
            (9 << 20, 1, 4 << 20),
            (9 << 20, 3 << 20, 7 << 20),
            (5 * PAGE, 5 * PAGE, 5 * PAGE),
        ],
    )
    def test_no_unit_and_no_system_page_is_cut(
        self, runtime: FakeRuntime, nbytes: int, unit: int, largest: int
    ) -> None:
        memory = pinned(nbytes, piece_unit_bytes=unit, max_piece_bytes=largest)
        begin = memory.data_ptr()
        edges = [address - begin for address in sorted(runtime.registered)] + [nbytes]
        assert runtime.pieces() == [b - a for a, b in itertools.pairwise(edges)]
        assert edges[0] == 0
        assert all(edge % unit == 0 and edge % PAGE == 0 for edge in edges[:-1])
        assert max(runtime.pieces()) <= largest
        assert len(runtime.pieces()) == 1 or nbytes > largest

    def test_an_ordinary_pool_of_a_terabyte(self) -> None:
        """The default: 64 GiB at most, in whole pages of the pool and huge pages of the system."""
        unit = 61 * 64 * 1152
        pieces = Cuts(page_bytes=unit).pieces(0, 10**12, unit)
        assert len(pieces) == 15
        assert sum(size for _, size in pieces) == 10**12
        assert all(size <= 64 << 30 for _, size in pieces)
        assert all(start % unit == 0 and start % (2 * MIB) == 0 for start, _ in pieces)

    @pytest.mark.parametrize("offset", [0, 64, 4000])
    @pytest.mark.parametrize("unit", [1, 64, 96, 3 * PAGE])
    def test_memory_that_begins_anywhere(self, runtime: FakeRuntime, offset: int, unit: int) -> None:
        """Cut at pages of the system where multiples of the unit lie there."""
        memory = pinned(100 * PAGE)[offset:]  # a range of ours would be taken as it is
        pieces = Cuts(unit, 0, 40 * PAGE).pieces(memory.data_ptr(), memory.numel(), unit)
        assert [start for start, _ in pieces] == [0, *itertools.accumulate(n for _, n in pieces[:-1])]
        assert sum(nbytes for _, nbytes in pieces) == memory.numel()
        assert max(nbytes for _, nbytes in pieces) <= 40 * PAGE
        cuts = [start for start, _ in pieces[1:]]
        assert len(cuts) == 2
        assert all(cut % unit == 0 for cut in cuts)
        if -offset % math.gcd(unit, PAGE) == 0:
            assert all((memory.data_ptr() + cut) % PAGE == 0 for cut in cuts)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"piece_unit_bytes": 0}, "piece_unit_bytes must be positive, got 0."),
            ({"plane_unit_bytes": -1}, "plane_unit_bytes must not be negative, got -1."),
            ({"max_piece_bytes": 0}, "max_piece_bytes must be positive, got 0."),
            (
                {"piece_unit_bytes": 5 * PAGE, "max_piece_bytes": 4 * PAGE},
                "units of 20,480 bytes (20.00 KiB) (and whole pages of the system) do not fit into "
                "pieces of 16,384 bytes (16.00 KiB).",
            ),
        ],
    )
    def test_bad_units_are_refused_before_anything_is_done(
        self, runtime: FakeRuntime, options: dict[str, int], text: str
    ) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape('[empty_host] ' + text)}$"):
            pinned(8 * PAGE, **options)
        with pytest.raises(ValueError, match=f"^{re.escape('[register_host] ' + text)}$"):
            register_host(torch.empty(8 * PAGE, dtype=torch.uint8), "cpu", **options)
        assert not runtime.log

    @pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
    def test_a_failed_piece_undoes_those_before_it_last_to_first(
        self, runtime: FakeRuntime, fail_at: int
    ) -> None:
        runtime.fail_at = fail_at
        with pytest.raises(MemoryError) as raised:
            pinned(8 * PAGE, max_piece_bytes=2 * PAGE)
        begin = runtime.log[0][1]
        done = [begin + 2 * PAGE * piece for piece in range(fail_at - 1)]
        assert [address for verb, address, _ in runtime.log if verb == "unregister"] == done[::-1]
        assert not runtime.registered
        assert runtime.verbs() == ["register"] * fail_at + ["unregister"] * (fail_at - 1)
        text = (
            rf"^\[empty_host\] page-locking 32,768 bytes \(32\.00 KiB\) failed: piece {fail_at} of 4: "
            r"fakeErrorMemoryAllocation: out of memory\. All of it was given back; free for this process "
            r"are [0-9,]+ bytes .*: .* has a limit of [0-9,]+ bytes .* left, less a reserve of .*\.$"
        )
        assert re.match(text, str(raised.value)), raised.value
        assert pinned(8 * PAGE, max_piece_bytes=2 * PAGE).numel() == 8 * PAGE  # it can be tried again

    def test_a_failed_piece_gives_the_memory_back(self, runtime: FakeRuntime) -> None:
        def resident() -> int:
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * PAGE

        runtime.fail_at = 2
        nbytes = 64 * MIB
        errors = []  # their tracebacks hold the frames in which the memory was made
        before = resident()
        for _ in range(4):
            runtime.log.clear()
            try:
                pinned(nbytes, max_piece_bytes=nbytes // 2)
            except MemoryError as error:
                errors.append(error)
        assert len(errors) == 4
        assert resident() - before < nbytes

    def test_pieces_are_unregistered_last_to_first(self, runtime: FakeRuntime) -> None:
        memory = pinned(6 * PAGE, max_piece_bytes=2 * PAGE)
        begin = memory.data_ptr()
        del memory
        gc.collect()
        assert [(verb, (address - begin) // PAGE) for verb, address, _ in runtime.log] == [
            *(("register", page) for page in (0, 2, 4)),
            *(("unregister", page) for page in (4, 2, 0)),
        ]


class TestAlias:
    """The device's addresses are not the host's."""

    def test_pieces_that_follow_each_other_stay_as_they_are(self, runtime: FakeRuntime) -> None:
        runtime.alias = "far"
        memory = pinned(6 * PAGE, max_piece_bytes=2 * PAGE, plane_unit_bytes=PAGE)
        assert runtime.pieces() == [2 * PAGE] * 3
        registrar = REGISTRARS["cpu"](torch.device("cpu"))
        assert registrar.device_address(memory.data_ptr(), 6 * PAGE) == memory.data_ptr() + FAR

    def test_pieces_apart_are_cut_between_planes(self, runtime: FakeRuntime) -> None:
        """No plane in two pieces; what was tried before is undone."""
        runtime.alias = "scattered"
        memory = pinned(
            12 * PAGE, piece_unit_bytes=PAGE, max_piece_bytes=5 * PAGE, plane_unit_bytes=2 * PAGE
        )
        assert runtime.pieces() == [4 * PAGE] * 3
        assert runtime.verbs() == ["register"] * 3 + ["unregister"] * 3 + ["register"] * 3
        registrar = REGISTRARS["cpu"](torch.device("cpu"))
        distances = set()
        for plane in range(6):
            address = memory.data_ptr() + plane * 2 * PAGE
            distances.add(registrar.device_address(address, 2 * PAGE) - address)
        assert len(distances) == 3

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({}, "and no plane_unit_bytes says where planes end"),
            ({"plane_unit_bytes": 6 * PAGE}, "but units of 24,576 bytes .* do not fit into pieces of"),
        ],
    )
    def test_otherwise_the_memory_is_refused(
        self, runtime: FakeRuntime, options: dict[str, int], text: str
    ) -> None:
        runtime.alias = "scattered"
        with pytest.raises(MemoryError, match="at addresses that do not follow each other, " + text):
            pinned(12 * PAGE, max_piece_bytes=5 * PAGE, **options)
        assert not runtime.registered
        memory = torch.empty(13 * PAGE, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="at addresses that do not follow each other, " + text):
            register_host(memory, "cpu", max_piece_bytes=5 * PAGE, **options)
        assert not runtime.registered

    def test_a_view_is_at_the_devices_address(self, runtime: FakeRuntime) -> None:
        """And reads and writes the same bytes there."""
        runtime.alias = "mapped"
        shape = (6, 40)
        with SharedHostMemory.create(4 * PAGE) as shared:
            host = empty_host(shape, torch.int32, "cpu", "pinned", shared=shared)
        view = device_view(host, "cpu")
        assert view.data_ptr() != host.data_ptr()
        device = torch.empty(8, 40, dtype=torch.int32)
        fill_pool([host])
        assert torch.equal(view, host)
        fill_pool([device], seed=1)
        check_transfer([device], [view], torch.tensor([7, 0]), torch.tensor([1, 5]))
        check_transfer([view], [device], torch.tensor([2, 3]), torch.tensor([6, 7]))
        assert torch.equal(view, host)
        part = device_view(host[2:, ::3].t(), "cpu")
        assert torch.equal(part, host[2:, ::3].t())
        assert part.stride() == host[2:, ::3].t().stride()
        assert part.data_ptr() - view.data_ptr() == host[2:].data_ptr() - host.data_ptr()

    def test_unregistering_takes_the_hosts_address(self, runtime: FakeRuntime) -> None:
        runtime.alias = "scattered"
        memory = torch.empty(4 * PAGE, dtype=torch.uint8)
        register_host(memory, "cpu").close()
        assert runtime.log == [
            ("register", memory.data_ptr(), 4 * PAGE),
            ("unregister", memory.data_ptr(), 0),
        ]


class TestViews:
    def test_a_view_keeps_memory_and_registration(self, runtime: FakeRuntime) -> None:
        host = pinned(4 * PAGE)
        host.fill_(5)
        part = device_view(host, "cpu")[PAGE:].view(torch.int32)
        del host
        gc.collect()
        assert bool((part.view(torch.uint8) == 5).all())
        assert runtime.verbs() == ["register"]
        del part
        gc.collect()
        assert runtime.verbs() == ["register", "unregister"]

    def test_a_view_prolongs_a_registration(self, runtime: FakeRuntime) -> None:
        """Also one that was closed: the device may still use the view."""
        memory = torch.arange(PAGE)
        handle = register_host(memory, "cpu")
        view = device_view(memory, "cpu")
        handle.close()
        del memory
        gc.collect()
        assert runtime.verbs() == ["register"]
        assert torch.equal(view, torch.arange(PAGE))
        del view
        gc.collect()
        assert runtime.verbs() == ["register", "unregister"]

    def test_a_view_keeps_memory_that_others_registered(self, runtime: FakeRuntime) -> None:
        memory = torch.arange(PAGE)
        runtime.foreign.append((memory.data_ptr(), 8 * PAGE))
        view, owner = device_view(memory, "cpu")[1:], weakref.ref(memory)
        del memory
        gc.collect()
        assert owner() is not None
        del view
        gc.collect()
        assert owner() is None

    def test_pageable_memory_has_no_view(self, runtime: FakeRuntime) -> None:
        with pytest.raises(ValueError, match="pageable host memory"):
            device_view(torch.ones(4), "cpu")

    @pytest.mark.parametrize(
        "make", [lambda: torch.eye(3).to_sparse(), lambda: torch.empty(3, device="meta")]
    )
    def test_only_plain_memory_has_one(self, make: Callable[[], Tensor]) -> None:
        for name, use in (("device_view", device_view), ("register_host", register_host)):
            with pytest.raises(ValueError, match=rf"^\[{name}\] tensor must be .*, got "):
                use(make(), "cpu")


class TestRegisterHost:
    def test_it_registers_from_the_first_byte_to_the_last(self, runtime: FakeRuntime) -> None:
        base = torch.empty(8, PAGE, dtype=torch.uint8)
        view = base[2:7:2, 10:20]
        with register_host(view, "cpu") as handle:
            assert runtime.log == [("register", view.data_ptr(), 4 * PAGE + 10)]
            assert handle.is_ours
            assert handle.nbytes == 4 * PAGE + 10
        assert runtime.verbs() == ["register", "unregister"]
        assert not handle.is_ours

    def test_closing_is_done_once(self, runtime: FakeRuntime) -> None:
        handle = register_host(torch.empty(PAGE), "cpu")
        handle.close()
        handle.close()
        del handle
        gc.collect()
        assert runtime.verbs() == ["register", "unregister"]

    def test_a_lost_handle_is_closed_and_until_then_keeps_the_memory(self, runtime: FakeRuntime) -> None:
        memory = torch.empty(PAGE)
        handles = [register_host(memory, "cpu")]
        del memory
        gc.collect()
        assert runtime.verbs() == ["register"]
        handles.clear()
        gc.collect()
        assert runtime.verbs() == ["register", "unregister"]

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
    def test_the_same_range_and_parts_of_it_count(
        self, runtime: FakeRuntime, order: tuple[int, ...]
    ) -> None:
        memory = torch.empty(8 * PAGE, dtype=torch.uint8)
        handles = [register_host(part, "cpu") for part in (memory, memory, memory[PAGE : 3 * PAGE])]
        for which in order[:2]:
            handles[which].close()
            handles[which].close()
            assert runtime.verbs() == ["register"]
        handles[order[2]].close()
        assert runtime.verbs() == ["register", "unregister"]

    def test_memory_of_empty_host_counts_too(self, runtime: FakeRuntime) -> None:
        memory = pinned(4 * PAGE)
        handle = register_host(memory, "cpu")
        del memory
        gc.collect()
        assert runtime.verbs() == ["register"]
        handle.close()
        assert runtime.verbs() == ["register", "unregister"]

    def test_overlap_in_part_is_refused(self, runtime: FakeRuntime) -> None:
        memory = torch.empty(8 * PAGE, dtype=torch.uint8)
        with register_host(memory[2 * PAGE : 6 * PAGE], "cpu"):
            for part in (memory[PAGE : 3 * PAGE], memory[5 * PAGE :], memory):
                text = r"^\[register_host\] .* bytes .* overlap 16,384 bytes .* registered already\.$"
                with pytest.raises(ValueError, match=text):
                    register_host(part, "cpu")
            assert runtime.verbs() == ["register"]
        with register_host(memory, "cpu"):
            assert runtime.pieces() == [8 * PAGE]

    def test_memory_of_others_is_taken_and_left(self, runtime: FakeRuntime) -> None:
        memory = torch.empty(8 * PAGE, dtype=torch.uint8)
        runtime.foreign.append((memory.data_ptr(), 8 * PAGE))
        with register_host(memory, "cpu") as handle, register_host(memory[PAGE:], "cpu"):
            assert not handle.is_ours
            assert device_view(memory, "cpu").data_ptr() == memory.data_ptr()
        assert not runtime.log

    def test_memory_that_others_registered_in_part_is_an_error(self, runtime: FakeRuntime) -> None:
        memory = torch.empty(8 * PAGE, dtype=torch.uint8)
        runtime.foreign.append((memory.data_ptr(), 4 * PAGE))
        text = r"^\[register_host\] page-locking 32,768 bytes \(32.00 KiB\) failed: fakeErrorHostMemory"
        with pytest.raises(RuntimeError, match=text):
            register_host(memory, "cpu")
        assert not runtime.registered

    @pytest.mark.parametrize("shape", [(0,), (3, 0)])
    def test_zero_bytes_are_nothing_to_do(self, runtime: FakeRuntime, shape: tuple[int, ...]) -> None:
        with register_host(torch.empty(shape), "cpu") as handle:
            assert not handle.is_ours
        assert not runtime.log

    def test_the_cpu_needs_no_registration(self) -> None:
        with register_host(torch.ones(4), "cpu") as handle:
            assert not handle.is_ours

    def test_a_failure_leaves_nothing(self, runtime: FakeRuntime) -> None:
        runtime.fail_at = 3
        memory = torch.empty(8 * PAGE, dtype=torch.uint8)
        aligned = memory[-memory.data_ptr() % PAGE :][: 6 * PAGE]
        with pytest.raises(RuntimeError, match=r"failed: piece 3 of 3: fakeErrorMemoryAllocation"):
            register_host(aligned, "cpu", max_piece_bytes=2 * PAGE)
        assert not runtime.registered
        with register_host(aligned, "cpu"):
            assert runtime.pieces() == [6 * PAGE]

    def test_every_device_that_asked_is_waited_for(
        self, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Registered for one device, used by two: unregistering itself waits only for the first."""
        make = REGISTRARS["cpu"]
        devices = iter((torch.device("cpu", 0), torch.device("cpu", 1), torch.device("cpu", 1)))
        monkeypatch.setitem(REGISTRARS, "cpu", lambda device: make(next(devices)))
        memory = torch.empty(PAGE)
        handles = [register_host(memory, "cpu") for _ in range(3)]
        for handle in handles:
            assert runtime.waits == 0
            handle.close()
        assert runtime.waits == 1
        assert runtime.verbs() == ["register", "unregister"]

    def test_what_cannot_be_unregistered_keeps_its_memory_until_it_can(
        self, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = pinned(4 * PAGE)
        address = memory.data_ptr()
        entry = runtime.registered.pop(address)  # so that the runtime refuses to unregister it
        monkeypatch.setattr(TABLE, "_stranded", [])
        del memory
        gc.collect()
        assert runtime.verbs() == ["register", "unregister"]
        with open("/proc/self/maps") as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        assert any(int(a, 16) <= address and address + entry[0] <= int(b, 16) for a, b in ranges)
        assert len(TABLE._stranded) == 1
        runtime.registered[address] = entry
        other = pinned(PAGE)  # tries the old one again
        assert runtime.verbs() == ["register", "unregister", "unregister", "register"]
        assert list(runtime.registered) == [other.data_ptr()]
        assert not TABLE._stranded


class TestThreads:
    def test_many_threads_register_one_range(self, runtime: FakeRuntime) -> None:
        """While it is being closed or opened by another thread, a range is waited for."""
        memory = torch.empty(4 * PAGE, dtype=torch.uint8)
        failures: list[Exception] = []

        def work() -> None:
            try:
                for _ in range(50):
                    with register_host(memory, "cpu"):
                        assert runtime.pieces() == [4 * PAGE]
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert not runtime.registered
        assert runtime.verbs().count("register") == runtime.verbs().count("unregister")

    @pytest.mark.parametrize("verb", ["register", "unregister"])
    def test_a_range_that_is_being_opened_or_closed_is_waited_for(
        self, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, verb: str
    ) -> None:
        """A new claim neither takes what is not there yet, or no longer, nor holds up other ranges."""
        started, may_end = threading.Event(), threading.Event()
        fast = REGISTRARS["cpu"]
        pages = torch.empty(4 * PAGE, dtype=torch.uint8)
        pages = pages[-pages.data_ptr() % PAGE :]
        memory, other = pages[:PAGE], pages[PAGE : 2 * PAGE]

        def slow(device: torch.device) -> Registrar:
            registrar = fast(device)
            inner = getattr(registrar, verb)

            def wait_first(*arguments: int) -> None:
                started.set()
                assert may_end.wait(60)
                inner(*arguments)

            setattr(registrar, verb, wait_first)
            return registrar

        monkeypatch.setitem(REGISTRARS, "cpu", slow)
        handles: list[HostRegistration] = []
        if verb == "register":
            first = threading.Thread(target=lambda: handles.append(register_host(memory, "cpu")))
        else:
            first = threading.Thread(target=register_host(memory, "cpu").close)
        first.start()
        assert started.wait(60)
        monkeypatch.setitem(REGISTRARS, "cpu", fast)
        claim = threading.Thread(target=lambda: handles.append(register_host(memory, "cpu")), daemon=True)
        claim.start()
        register_host(other, "cpu").close()
        assert not handles
        while not TABLE._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.01)
        may_end.set()
        first.join()
        claim.join(60)
        assert not claim.is_alive()
        at = [done for done, address, _ in runtime.log if address == memory.data_ptr()]
        assert at == (["register"] if verb == "register" else ["register", "unregister", "register"])
        for handle in handles:
            handle.close()
        assert not runtime.registered
