"""Debian 13's Compose and buildx for the docker client; Debian 12 has neither."""

from __future__ import annotations

from pathlib import Path

from tests.support.debian import unpacked


def docker_plugins(folder: Path) -> Path:
    """A folder for DOCKER_CONFIG in which the docker client finds Compose and buildx."""
    tools = unpacked("docker-plugins-trixie", "trixie", ("docker-compose", "docker-buildx"))
    plugins = folder / "cli-plugins"
    plugins.mkdir(parents=True)
    for program in (tools / "usr/libexec/docker/cli-plugins").iterdir():
        (plugins / program.name).symlink_to(program)
    return folder
