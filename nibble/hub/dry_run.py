"""`nibble pull --dry-run`: what a pull would fetch, with permission and free disk.

It requests listings and headers only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nibble.errors import ExitCode, NibbleError
from nibble.hub.access import access, is_model_id, not_an_id, not_cached
from nibble.hub.files import COMMIT, cached_snapshot, select
from nibble.hub.pull import MARGIN_BYTES, Pull, check_disk, list_files, missing_bytes, stall_seconds
from nibble.machine.disk import free_bytes, gib, is_folder


@dataclass(frozen=True)
class PullPlan:
    """A planned pull; `is_pinned`: the requested revision is a commit, which cannot move."""

    model: str
    asked_revision: str | None
    revision: str
    is_pinned: bool
    files: int
    total_bytes: int
    fetch_bytes: int
    cache: Path
    free_bytes: int
    access: str

    @property
    def fits(self) -> bool:
        """Whether the download and the margin fit on the cache's file system."""
        return not self.fetch_bytes or self.fetch_bytes + MARGIN_BYTES <= self.free_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data for --json."""
        return asdict(self) | {"cache": str(self.cache), "fits": self.fits}

    def lines(self) -> list[str]:
        """For people."""
        moving = (
            f"{self.asked_revision or 'main'} is this commit; pin it with"
            f" NIBBLE_REVISION={self.revision}"
        )
        here = self.total_bytes - self.fetch_bytes
        room = (
            "fits"
            if self.fits
            else f"{gib(self.fetch_bytes + MARGIN_BYTES - self.free_bytes)} too little"
        )
        return [
            f"model     {self.model}",
            f"revision  {self.revision} ({'pinned' if self.is_pinned else moving})",
            f"access    {self.access}",
            f"files     {self.files}, {gib(self.total_bytes)}, of which {gib(here)} are in the"
            f" cache",
            f"download  {gib(self.fetch_bytes)}",
            (
                f"disk      {gib(self.free_bytes)} free for {self.cache}, {gib(MARGIN_BYTES)} to"
                f" spare: {room}"
            ),
        ]


def plan_pull(
    model: str, revision: str | None, environ: Mapping[str, str], load_format: str = "auto"
) -> PullPlan:
    """Plan a pull without a download.

    Raises USAGE for a folder, MODEL as a pull would: unknown, gated without access, not cached.
    """
    if is_folder(Path(os.path.expanduser(model))):
        raise NibbleError(
            ExitCode.USAGE,
            what=f"{model} is a folder",
            expected="the id of a model",
            action="serve the folder; it needs no pull",
        )
    if not is_model_id(model):
        raise not_an_id(model)
    hub = access(environ)
    pinned = bool(COMMIT.fullmatch(revision or ""))
    if hub.offline:
        if (cached := cached_snapshot(model, revision, hub.cache, load_format)) is None:
            raise not_cached(model, hub)
        sizes = [path.stat().st_size for path in cached.rglob("*") if path.is_file()]
        here = (len(sizes), sum(sizes), 0)
        return PullPlan(
            model,
            revision,
            cached.name,
            pinned,
            *here,
            hub.cache,
            free_bytes(hub.cache),
            "offline: not checked",
        )
    commit, files = list_files(model, revision, hub)
    wanted = select(files, load_format)
    pull = Pull(model, revision, commit, wanted, hub, None, stall_seconds(environ))
    total = sum(file.size for file in wanted)
    return PullPlan(
        model,
        revision,
        commit,
        pinned,
        len(wanted),
        total,
        missing_bytes(pull),  # requests each file's header: a gated model refuses here
        hub.cache,
        free_bytes(hub.cache),
        "granted to this HF_TOKEN" if hub.token else "granted without a token",
    )


def refuse_what_does_not_fit(plan: PullPlan) -> None:
    """Raise NO_FIT as the pull itself would."""
    check_disk(plan.model, plan.fetch_bytes, plan.free_bytes, plan.cache)
