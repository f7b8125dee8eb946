"""cgroups v2 of a guest."""

from __future__ import annotations

import re
from pathlib import Path


class Group:
    """A cgroup v2. `words` before a command run it there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(folder)]

    @classmethod
    def controlled(cls) -> Group:
        """The root of the hierarchy."""
        return cls(Path("/sys/fs/cgroup"))

    def set(self, name: str, value: str) -> None:
        (self.folder / name).write_text(value)

    def field(self, file: str, name: str) -> int:
        found = re.search(rf"^{name} (\d+)$", (self.folder / file).read_text(), re.M)
        assert found is not None
        return int(found[1])
