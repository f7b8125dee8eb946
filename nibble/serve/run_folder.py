"""The folder of one run of vLLM (gate state, workers' reports, sockets); its creator removes it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nibble.errors import ExitCode, NibbleError

if TYPE_CHECKING:
    from nibble.plan.plan import Plan

# A socket's path has 107 bytes at most (unix(7)), of which vLLM's name takes 37 (vllm 0.32
# utils/network_utils.py:177).
LONGEST_SOCKET_FOLDER = 70


def make_run_folder() -> Path:
    """Create a run folder. Raises CONFIG where no temporary folder can be written."""
    try:
        return Path(tempfile.mkdtemp(prefix="nibble-"))
    except OSError as error:
        what = f"no folder for temporary files is writable ({error.strerror or error})"
        raise NibbleError(
            ExitCode.CONFIG,
            what=what,
            expected="a writable /tmp",
            action="mount a tmpfs on /tmp or set TMPDIR",
        ) from None


def socket_environ(plan: Plan, folder: Path) -> dict[str, str]:
    """The folder of the sockets between vLLM's processes: after a kill they are removed with the
    run folder.

    Ray hands VLLM_* on to machines that do not have it (vllm 0.32 ray/ray_env.py:56).
    """
    if plan.topology.mode == "ray" or len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER:
        return {}
    return {"VLLM_RPC_BASE_PATH": str(folder)}
