"""What limits an arena is found out from the kernel's files, as containers of both kinds show them."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import psutil
import pytest

from kvtier.config import CpuConfig, machine
from kvtier.config.schema import GiB
from kvtier.memory import limits

MiB = 1 << 20


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A machine with 64 GiB to spare, without control groups yet."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GiB))
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path / "proc"


@pytest.fixture
def groups(proc, tmp_path):
    """Writes a tree of control groups: where this process is, and each group's files."""

    def write(version: int, path: str, tree: dict[str, dict[str, object]], *, root: str = "/") -> None:
        mounted = tmp_path / "cgroup"
        kind, options = ("cgroup2", "rw,nsdelegate") if version == 2 else ("cgroup", "rw,memory")
        (proc / "self/mountinfo").write_text(
            "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
            f"31 23 0:28 {root} {mounted} rw,nosuid shared:9 - {kind} cgroup {options}\n"
            "32 23 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        )
        controllers = "0:" if version == 2 else "7:cpu:/elsewhere\n4:memory"
        (proc / "self/cgroup").write_text(f"{controllers}:{path}\n")
        for folder, files in tree.items():
            (mounted / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (mounted / folder / name).write_text(f"{content}\n")

    return write


def v2(limit: object, used: int, cache: int = 0, **more: object) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 1\ninactive_file {cache}", **more}


def v1(limit: int, used: int, cache: int = 0) -> dict[str, object]:
    stat = f"inactive_file 7\nhierarchical_memory_limit 1\ntotal_inactive_file {cache}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def test_without_control_groups_the_machine_binds(proc):
    room = machine.memory(proc)
    assert room.nbytes == 64 * GiB
    assert "on this machine" in room.found


def test_a_limit_less_what_is_used_but_for_cache_that_the_kernel_gives_up(proc, groups):
    groups(2, "/app", {"": {}, "app": v2(8 * GiB, 3 * GiB, cache=GiB)})
    room = machine.memory(proc)
    assert room.nbytes == 6 * GiB
    assert "6,144 MiB are left of the 8,192 MiB" in room.found
    assert "app/memory.max" in room.found


def test_a_group_above_binds_what_is_in_it(proc, groups):
    groups(2, "/a/b/c", {"a": v2(4 * GiB, GiB), "a/b": v2("max", GiB), "a/b/c": v2(16 * GiB, GiB)})
    room = machine.memory(proc)
    assert room.nbytes == 3 * GiB
    assert "a/memory.max" in room.found


def test_above_its_high_mark_a_group_is_throttled(proc, groups):
    groups(2, "/app", {"app": v2("max", GiB) | {"memory.high": 2 * GiB}})
    assert machine.memory(proc).nbytes == GiB


def test_no_limit_is_none(proc, groups):
    groups(2, "/app", {"app": v2("max", GiB) | {"memory.high": "max"}})
    assert machine.memory(proc).nbytes == 64 * GiB


def test_version_1_says_the_same_in_other_files(proc, groups):
    groups(
        1, "/a/b", {"": v1(0x7FFFFFFFFFFFF000, 9 * GiB), "a": v1(10 * GiB, 4 * GiB, cache=GiB), "a/b": v1(1 << 62, 0)}
    )
    room = machine.memory(proc)
    assert room.nbytes == 7 * GiB
    assert "a/memory.limit_in_bytes" in room.found


@pytest.mark.parametrize(("version", "files"), [(1, v1(GiB, 0)), (2, v2(GiB, 0))])
@pytest.mark.parametrize("path", ["/docker/17/x", "/docker/17", "/../../elsewhere"])
def test_a_container_sees_its_own_group_as_the_top(proc, groups, version, files, path):
    groups(version, path, {"": files}, root="/docker/17")
    assert machine.memory(proc).nbytes == GiB


def test_a_group_that_is_over_its_limit_leaves_nothing(proc, groups):
    groups(2, "/app", {"app": v2(GiB, 2 * GiB)})
    assert machine.memory(proc).nbytes == 0


def test_a_quarter_of_what_a_container_leaves_is_the_default(proc, groups, monkeypatch):
    groups(2, "/app", {"app": v2(8 * GiB, 4 * GiB)})
    memory = machine.memory
    monkeypatch.setattr(machine, "memory", lambda: memory(proc))
    assert CpuConfig().capacity == GiB
    groups(2, "/app", {"app": v2(GiB, GiB)})
    assert CpuConfig().capacity == MiB


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=16 * GiB))


@pytest.mark.usefixtures("disk")
class TestFits:
    def test_the_file_system(self, proc, tmp_path):
        why = limits.fits(tmp_path, 16 * GiB, proc=proc)
        found = f"{tmp_path} has 16,384 MiB free, the arena needs 16,384 MiB"
        for part in (found, "14745MiB, or enlarge", "arena_dir"):
            assert part in why

    def test_a_control_group(self, proc, groups, tmp_path):
        groups(2, "/app", {"app": v2(8 * GiB, 4 * GiB)})
        why = limits.fits(tmp_path, 5 * GiB, proc=proc)
        assert "set cpu.capacity to at most 3686MiB, or raise the memory limit" in why

    def test_memory_of_the_machine(self, proc):
        assert "stop what takes memory" in limits.fits(None, 65 * GiB, proc=proc)
        assert limits.fits(None, 63 * GiB, proc=proc) == ""

    @pytest.mark.parametrize("left", [8 * MiB, 100 * MiB, 5 * GiB])
    def test_the_size_that_is_advised_fits(self, proc, groups, tmp_path, left):
        groups(2, "/app", {"app": v2(left, 0)})
        why = limits.fits(tmp_path, left, proc=proc)
        advised = int(why.partition("to at most ")[2].partition("MiB")[0]) * MiB
        assert left // 2 < advised < left
        assert limits.fits(tmp_path, advised, proc=proc) == ""
