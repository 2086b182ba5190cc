"""Cores, hardware threads and quotas, read from made-up /proc and /sys trees."""

from pathlib import Path

import pytest

from ringdl._cores import Cores, count_physical, read_cores, read_quota


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_this_machine_has_cores() -> None:
    cores = read_cores()
    assert 1 <= cores.usable <= cores.cores <= cores.cpus <= cores.online


def test_hardware_threads_count_once(tmp_path: Path) -> None:
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    write(
        tmp_path,
        {
            f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{text}\n"
            for cpu, text in siblings.items()
        },
    )
    assert count_physical({0, 4}, tmp_path) == 1
    assert count_physical({0, 1, 4, 5}, tmp_path) == 2
    assert count_physical({0, 7, 8}, tmp_path) == 3  # 7 and 8 do not say


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            1.5,
        ),
        (
            {  # in a container, the path is the host's and only the mount itself exists
                "proc/self/cgroup": "3:cpuset:/\n4:cpu,cpuacct:/docker/123\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path, files)
    assert read_quota(tmp_path) == quota


def test_usable_cores() -> None:
    assert Cores(cpus=8, cores=4, online=8).usable == 4
    assert Cores(cpus=8, cores=4, online=8).whole_machine
    assert Cores(cpus=8, cores=8, online=8, quota=2.5).usable == 2
    assert Cores(cpus=8, cores=8, online=8, quota=0.5).usable == 1
    assert not Cores(cpus=8, cores=8, online=8, quota=2.5).whole_machine
    assert not Cores(cpus=2, cores=2, online=8).whole_machine
