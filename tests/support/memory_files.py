"""Files that say how much memory a machine has, as the kernel writes them."""

from __future__ import annotations

from pathlib import Path


def machine(root: Path, available_mib: int = 8000) -> Path:
    """A file system root with 16000 MiB of memory and no cgroup."""
    for folder in ("proc/pressure", "proc/self"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {16000 << 10} kB\nMemFree:        1 kB\nMemAvailable:  "
        f" {available_mib << 10} kB\n"
    )
    (root / "proc/pressure/memory").write_text(
        "some avg10=5.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=2.50 avg60=0.00 avg300=0.00"
        " total=1\n"
    )
    (root / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    return root
