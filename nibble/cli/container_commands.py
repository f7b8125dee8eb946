"""The container commands of README and docs, declared once for docs and tests."""

from __future__ import annotations

from collections.abc import Sequence

from nibble.serve.ready_message import QUESTION
from nibble.settings.options import default_of

VOLUME = "nibble-cache:/var/cache/nibble"
NAME = "nibble"
GPU_TARGET, GPU_MODEL = "gb10", "nvidia/Qwen3.6-35B-A3B-NVFP4"
CPU_MODEL = "nibble-demo-nvfp4"
AFTER_THE_DRAIN_S = 30
SHM_SIZE_OF_GPUS = "16g"  # NCCL's buffers for the GPUs of a large machine
TMPFS = "/tmp:exec,size=2g"  # torch.compile and Triton load what they built there
WIDTH = 110
TOKEN = "/var/cache/nibble/ray_auth_token"


def stop_timeout_s() -> int:
    """Seconds that a container may take to stop: the drain and a margin."""
    return int(default_of("drain_seconds")) + AFTER_THE_DRAIN_S


def serve_command(target: str, model: str, *options: str) -> str:
    """A server whose API only this machine reaches; `model` is empty for the default one."""
    words = ["docker run --rm", f"--name {NAME}", *options, "-p 127.0.0.1:8000:8000"]
    return wrapped(
        [
            *words,
            f"--stop-timeout {stop_timeout_s()}",
            f"-v {VOLUME}",
            f"nibble:{target}",
            f"serve {model}".rstrip(),
        ]
    )


def verb_command(words: str, *options: str) -> str:
    """The command for another verb of nibble, with the cache volume."""
    return wrapped(["docker run --rm", *options, f"-v {VOLUME}", "nibble:cpu", words])


def wrapped(parts: Sequence[str]) -> str:
    """One command, with a line break between parts where a line would be too long."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) > WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {part}")
        else:
            lines[-1] += f" {part}"
    return "\n".join(lines)


def cpu_commands() -> list[str]:
    """Quick start without a GPU, with Docker's own 64 MiB of shared memory."""
    ask = f'docker exec {NAME} nibble chat "{QUESTION}"'
    return ["./build.sh cpu", serve_command("cpu", ""), ask]


def gpu_commands() -> list[str]:
    """Quick start on a GPU."""
    build = f"./build.sh {GPU_TARGET} --from wheel"
    return [build, serve_command(GPU_TARGET, GPU_MODEL, "--gpus all", "--ipc host")]


def hardened_commands() -> list[str]:
    """A server without privileges that can write only the volume and /tmp."""
    options = ["--gpus all", "--read-only", f"--tmpfs {TMPFS}", f"--shm-size {SHM_SIZE_OF_GPUS}"]
    options += ["--cap-drop ALL", "--security-opt no-new-privileges"]
    return [serve_command(GPU_TARGET, GPU_MODEL, *options)]


def look_commands() -> list[str]:
    """Commands that inspect an image without a server."""
    return [
        verb_command(f"doctor {CPU_MODEL}"),
        verb_command(f"plan {CPU_MODEL}"),
        verb_command("cache ls"),
    ]


def owner_commands() -> list[str]:
    """Give a volume to another user: everything in it, and group 0."""
    script = "'chown -R 2000:0 /var/cache/nibble && chmod -R g+rwX /var/cache/nibble'"
    return [verb_command(f"bash -c {script}", "--user 0:0")]


def token_commands() -> list[str]:
    """Copy the cluster's token from the head's volume into another node's, each as the image's
    user.
    """
    store = f"'umask 027 && cat > {TOKEN}'"
    return [
        "# on the machine of the head",
        f"docker exec {NAME} cat {TOKEN} > ray_auth_token",
        "# on the other one, with a copy of that file",
        verb_command(f"bash -c {store} < ray_auth_token", "-i"),
    ]


BLOCKS = {
    "docker-cpu": cpu_commands,
    "docker-gpu": gpu_commands,
    "docker-hardened": hardened_commands,
    "docker-look": look_commands,
    "docker-owner": owner_commands,
    "docker-token": token_commands,
}


def block(name: str) -> str:
    """A code block of Markdown."""
    return "```\n" + "\n".join(BLOCKS[name]()) + "\n```"
