"""Memory as the machine and its cgroups have it, read from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

from nibble.machine.cgroups import cgroups
from nibble.machine.memory import Memory, MemorySource
from tests.support.memory_files import machine

MIB = 1 << 20


def mount(root: Path, kind: str, mount_root: str, point: str, options: str, cgroup: str) -> None:
    line = f"35 31 0:32 {mount_root} {point} rw,relatime - {kind} cgroup {options}\n"
    (root / "proc/self/mountinfo").write_text(f"20 1 8:1 / / rw - ext4 /dev/vda rw\n{line}")
    (root / "proc/self/cgroup").write_text(cgroup)


def v2(
    folder: Path,
    limit: str,
    used_mib: int,
    inactive_mib: int = 0,
    active_mib: int = 0,
    high: str = "max",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\ninactive_file {inactive_mib * MIB}\nactive_file {active_mib * MIB}\n"
    )
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 4\noom 1\noom_kill 2\n")


def v1(folder: Path, limit: int, used_mib: int, inactive_mib: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(
        f"inactive_file 0\ntotal_inactive_file {inactive_mib * MIB}\n"
    )
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")


def test_without_a_cgroup_the_machine_counts_by_what_is_available_not_free(tmp_path: Path) -> None:
    found = MemorySource(machine(tmp_path)).read()
    assert found == Memory(16000 * MIB, 8000 * MIB, "MemAvailable", 2.5)


def test_a_v2_limit_counts_and_the_page_cache_is_available(tmp_path: Path) -> None:
    machine(tmp_path)
    mount(tmp_path, "cgroup2", "/", "/sys/fs/cgroup", "rw", "0::/nibble\n")
    v2(tmp_path / "sys/fs/cgroup/nibble", str(2000 * MIB), 1500, inactive_mib=200, active_mib=200)
    (tmp_path / "sys/fs/cgroup/nibble/memory.pressure").write_text("full avg10=40.00 avg60=0.0\n")
    found = MemorySource(tmp_path).read()
    assert (found.total_bytes, found.available_bytes) == (2000 * MIB, 800 * MIB)
    assert found.limited_by.endswith("/sys/fs/cgroup/nibble") and found.stalled_percent == 40.0


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    machine(tmp_path)
    mount(tmp_path, "cgroup2", "/", "/sys/fs/cgroup", "rw", "0::/nibble\n")
    v2(tmp_path / "sys/fs/cgroup/nibble", "max", 500, high=str(1000 * MIB))
    assert MemorySource(tmp_path).read().available_bytes == 500 * MIB


def test_the_tightest_of_the_cgroups_above_counts(tmp_path: Path) -> None:
    machine(tmp_path)
    mount(tmp_path, "cgroup2", "/", "/sys/fs/cgroup", "rw", "0::/user/nibble\n")
    v2(tmp_path / "sys/fs/cgroup/user/nibble", str(4000 * MIB), 100)
    v2(tmp_path / "sys/fs/cgroup/user", str(3000 * MIB), 2900)
    found = MemorySource(tmp_path).read()
    assert found.available_bytes == 100 * MIB and found.limited_by.endswith("/user")


def test_v1_in_a_container_that_sees_its_own_cgroup_at_the_mount_point(tmp_path: Path) -> None:
    machine(tmp_path)
    mount(
        tmp_path,
        "cgroup",
        "/docker/abc",
        "/sys/fs/cgroup/memory",
        "rw,memory",
        "4:memory:/docker/abc\n",
    )
    v1(tmp_path / "sys/fs/cgroup/memory", 3000 * MIB, 2500, 500)
    assert MemorySource(tmp_path).read().available_bytes == 1000 * MIB
    assert MemorySource(tmp_path).kernel_kills() == 8


def test_the_huge_number_of_v1_is_no_limit(tmp_path: Path) -> None:
    machine(tmp_path)
    mount(tmp_path, "cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory", "4:memory:/\n")
    v1(tmp_path / "sys/fs/cgroup/memory", 9223372036854771712, 2500, 0)
    found = MemorySource(tmp_path).read()
    assert (found.available_bytes, found.limited_by) == (8000 * MIB, "MemAvailable")


def test_a_cgroup_outside_the_namespace_is_taken_at_the_mount_point(tmp_path: Path) -> None:
    machine(tmp_path)
    mount(tmp_path, "cgroup2", "/", "/sys/fs/cgroup", "rw", "0::/../../elsewhere\n")
    v2(tmp_path / "sys/fs/cgroup", str(1000 * MIB), 100)
    files = ("memory.max", "memory.limit_in_bytes")
    assert cgroups("memory", files, tmp_path) == [tmp_path / "sys/fs/cgroup"]


def test_every_look_reads_anew_and_a_cgroup_that_went_away_is_no_error(tmp_path: Path) -> None:
    source = MemorySource(machine(tmp_path))
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert source.read().available_bytes == 50 << 10
    source.close()


def test_this_machine_can_be_read() -> None:
    found = MemorySource().read()
    assert found.total_bytes > found.available_bytes > 0
