"""The metadata-only `vllm` wheel, with which vLLM finds itself if its code came from vllm-cpu.

vllm 0.32 platforms/__init__.py asks importlib.metadata for the version of "vllm", and a "cpu" in it
marks a CPU build. vllm-cpu 0.32.0 has metadata only under its own name.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

METADATA_FILE = Path(__file__).parent / "vllm_cpu_shim" / "METADATA"
WHEEL_TEXT = "Wheel-Version: 1.0\nGenerator: nibble\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# The earliest date that zip can store. A fixed date gives equal bytes for equal input.
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def build(folder: Path, metadata_file: Path = METADATA_FILE) -> Path:
    """Write the wheel into `folder`; its path. The same METADATA gives the same bytes."""
    metadata = metadata_file.read_text(encoding="utf-8")
    headers = dict(re.findall(r"^(Name|Version): (\S+)$", metadata, re.MULTILINE))
    stem = f"{headers['Name']}-{headers['Version']}"
    files = {f"{stem}.dist-info/METADATA": metadata, f"{stem}.dist-info/WHEEL": WHEEL_TEXT}
    record = f"{stem}.dist-info/RECORD"
    files[record] = (
        "".join(_record_line(name, text) for name, text in files.items()) + f"{record},,\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name, ZIP_EPOCH)
            entry.external_attr = 0o644 << 16
            wheel.writestr(entry, text)
    return path


def _record_line(name: str, text: str) -> str:
    data = text.encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"
