"""Downloads, caches and the settings file."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, SecretStr

from nibble.settings.declare import option


class FilesOptions(BaseModel):
    """The group `Files`."""

    hf_token: SecretStr | None = option(
        None,
        "Files",
        "Hugging Face token for gated or private models.",
        "HF_TOKEN",
        secret=True,
        expected="a token",
    )
    download_stall_seconds: int = option(
        60,
        "Files",
        "Seconds without a byte after which nibble retries a download; after three such"
        " attempts it stops.",
        "NIBBLE_DOWNLOAD_STALL_SECONDS",
        flag="--download-stall-seconds",
        expected="a whole number of seconds from 1 to 3600",
        ge=1,
        le=3600,
    )
    cache_dir: Path | None = option(
        None,
        "Files",
        "Folder of nibble's state; the image sets /var/cache/nibble.",
        "NIBBLE_CACHE_DIR",
        expected="a folder",
    )
    config: Path | None = option(
        None,
        "Files",
        "TOML file with any of these options, [args] and [env].",
        "NIBBLE_CONFIG",
        flag="--config",
        expected="a TOML file",
    )
