"""A registry with TLS and a login, and small images to push to it.

Debian's docker-registry, with a certificate of a test's own authority for this machine's address.
The Docker engine reads the authority from /etc/docker/certs.d, so these tests need root.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian import unpacked
from tests.support.docker.images import CACHE
from tests.support.once import once
from tests.support.paths import ROOT
from tests.support.servers.serving import free_port

USER, PASSWORD = "nibble", "registry-test-password"
CERTIFICATES = Path("/etc/docker/certs.d")
_START_S = 20
PLATFORMS = ("amd64", "arm64")

# Its files name the platform that really ran, and what the build got.
DOCKERFILE = """
FROM scratch
ARG TARGETARCH
COPY root-${TARGETARCH}/ /
ARG VERSION=unknown
ARG REVISION=unknown
RUN --mount=type=secret,id=ca --mount=type=secret,id=pip \\
    ["/bin/busybox", "sh", "-c", "/bin/busybox uname -m > /platform"]
LABEL org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION}
CMD ["/bin/busybox", "cat", "/platform"]
"""
# A stand-in for Docker Hub's scanner, which no registry here has: BuildKit runs it over each image.
SCANNER = """
FROM scratch
ARG TARGETARCH
COPY root-${TARGETARCH}/ /
COPY scan.sh /scan.sh
ENTRYPOINT ["/bin/sh", "/scan.sh"]
"""
SCAN = """
/bin/busybox cat > "$BUILDKIT_SCAN_DESTINATION/scan.spdx.json" <<END
{"_type": "https://in-toto.io/Statement/v0.1", "predicateType": "https://spdx.dev/Document",
 "predicate": {"spdxVersion": "SPDX-2.3", "SPDXID": "SPDXRef-DOCUMENT", "name": "nibble-scan",
  "files": []}}
END
"""


def address_of_this_machine() -> str:
    """Not loopback, for which engines skip the certificate."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # no packet is sent
        return probe.getsockname()[0]


@dataclass
class Registry:
    """`name` is HOST:PORT; `authority` the certificate that signs the registry's."""

    name: str
    authority: Path

    def trusted(self) -> Path:
        """Have this machine's engines trust it; the folder that says so."""
        folder = CERTIFICATES / self.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.authority, folder / "ca.crt")
        return folder


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[Registry]:
    """A registry that wants USER and PASSWORD, trusted by this machine's engines."""
    address, port = address_of_this_machine(), free_port()
    folder.mkdir(parents=True, exist_ok=True)
    _certificate(folder, address)
    (folder / "htpasswd").write_text(f"{USER}:{_bcrypt(PASSWORD)}\n")
    (folder / "registry.yaml").write_text(
        "version: 0.1\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '{address}:{port}', tls: {{certificate: {folder}/server.crt,"
        f" key: {folder}/server.key}}}}\n"
        f"auth: {{htpasswd: {{realm: nibble, path: {folder}/htpasswd}}}}\n"
    )
    program = (
        unpacked("docker-registry-trixie", "trixie", ("docker-registry",))
        / "usr/bin/docker-registry"
    )
    made = Registry(f"{address}:{port}", folder / "ca.crt")
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [program, "serve", folder / "registry.yaml"], stdout=log, stderr=log
        )
    try:
        _wait(made, server, folder / "log")
        made.trusted()
        yield made
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(CERTIFICATES / made.name, ignore_errors=True)


def _bcrypt(password: str) -> str:
    """The one form that the registry takes; Perl asks the C library, as Python 3.13 cannot."""
    script = 'print crypt(shift, q($2b$05$) . "nibbletestsnibbletests")'
    command = ["perl", "-e", script, password]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _certificate(folder: Path, address: str) -> None:
    """An authority, and a server's certificate of it for `address`."""
    (folder / "names").write_text(f"subjectAltName=IP:{address}\n")
    steps = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=tests -keyout ca.key -out ca.crt",
        f"req -newkey rsa:2048 -nodes -subj /CN={address} -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out server.crt"
        " -extfile names",
    )
    for step in steps:
        subprocess.run(["openssl", *step.split()], cwd=folder, check=True, capture_output=True)


def _wait(made: Registry, server: subprocess.Popen[bytes], log: Path) -> None:
    import ssl

    context = ssl.create_default_context(cafile=str(made.authority))
    deadline = time.monotonic() + _START_S
    while True:
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            urllib.request.urlopen(f"https://{made.name}/v2/", context=context, timeout=5)
        except urllib.error.HTTPError:  # 401: it wants a login
            return
        except OSError:
            time.sleep(0.1)


def busybox() -> Path:
    """A folder with root-amd64 and root-arm64: one static program each, Debian's."""

    def make(folder: Path) -> None:
        for architecture in PLATFORMS:
            package = unpacked(
                f"busybox-{architecture}", "trixie", ("busybox-static",), architecture
            )
            programs = folder / f"root-{architecture}" / "bin"
            programs.mkdir(parents=True)
            shutil.copy(package / "usr/bin/busybox", programs / "busybox")
            (programs / "sh").symlink_to("busybox")
            (folder / f"root-{architecture}" / "tmp").mkdir()

    return once(CACHE / "busybox-roots", make)


def checkout(folder: Path, dockerfile: str = DOCKERFILE) -> Path:
    """The repository's build files with a Dockerfile of seconds in place of each target's."""
    for name in ("build.sh", "pyproject.toml", "scripts/push.sh", "docker/docker-bake.hcl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "patches/vllm").mkdir(parents=True)
    shutil.copy(ROOT / "patches/vllm/series", folder / "patches/vllm/series")
    for target in ("cpu", "gb10", "sm120", "b200", "hopper"):
        (folder / f"docker/Dockerfile.{target}").write_text(dockerfile)
    shutil.copytree(busybox(), folder, symlinks=True, dirs_exist_ok=True)
    return folder


def login(made: Registry, client: str, environ: dict[str, str], password: str = PASSWORD) -> int:
    """The exit status of `docker login`."""
    done = subprocess.run(
        [client, "login", "--username", USER, "--password-stdin", made.name],
        input=password, env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode
