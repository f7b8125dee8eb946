"""What is checked before vLLM starts, as functions of facts."""

from __future__ import annotations

import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nibble.errors import ExitCode, NibbleError
from nibble.machine import disk
from nibble.machine.disk import folder_bytes, gib
from nibble.machine.host import bind_problem, cpu_problem, open_files_problem
from nibble.machine.targets import KnownBad, load_target
from nibble.serve.preflight.machine import (
    check_certificate,
    check_driver,
    check_folders,
    check_hardware,
    check_model_folder,
    check_port,
    vllm_port_warning,
)
from tests.support.hardware import CPU_HOST, GB10, H200
from tests.support.models.tiny_model import write_model
from tests.support.refusals import refusal_of


def refused(call, *args) -> NibbleError:
    return refusal_of(lambda: call(*args))


def test_the_gpu_of_the_target_is_accepted() -> None:
    check_hardware(load_target("gb10"), replace(CPU_HOST, gpus=(GB10,)))
    check_hardware(load_target("hopper"), replace(CPU_HOST, gpus=(H200, H200)))


def test_a_gpu_of_another_capability_exits_3_naming_both() -> None:
    error = refused(check_hardware, load_target("gb10"), replace(CPU_HOST, gpus=(H200,)))
    assert error.code is ExitCode.NO_HARDWARE
    assert "NVIDIA H200 has compute capability 9.0 but the target is gb10" in error.line()


def test_hardware_that_was_only_assumed_cannot_serve() -> None:
    error = refused(
        check_hardware, load_target("hopper"), replace(CPU_HOST, gpus=(H200,), assumed=True)
    )
    assert error.code is ExitCode.NO_HARDWARE
    assert "but this machine does not have its GPU" in error.line()


def test_a_driver_that_does_not_answer_is_the_reason_given() -> None:
    error = refused(
        check_hardware,
        load_target("hopper"),
        replace(CPU_HOST, nvml_error="Driver/library version mismatch"),
    )
    assert "Driver/library version mismatch" in error.line()


@pytest.mark.parametrize(
    ("arch", "flags", "is_bad"),
    [
        ("x86_64", {"sse4_2"}, True),
        ("x86_64", {"avx2"}, False),
        ("x86_64", set(), False),
        ("aarch64", {"asimd"}, False),
    ],
)
def test_cpu_without_avx2_is_no_hardware_for_vllm(arch: str, flags: set[str], is_bad: bool) -> None:
    assert (cpu_problem(arch, frozenset(flags)) is not None) == is_bad
    if is_bad:
        here = replace(CPU_HOST, cpu_arch=arch, cpu_flags=frozenset(flags))
        assert refused(check_hardware, load_target("cpu"), here).code is ExitCode.NO_HARDWARE


def test_known_bad_driver_of_gb10_is_refused_with_its_reason() -> None:
    error = refused(check_driver, load_target("gb10"), "590.44.01")
    assert error.code is ExitCode.NO_HARDWARE
    assert "CUDA graph capture" in error.line()
    assert check_driver(load_target("gb10"), "580.95.05") == []
    assert check_driver(load_target("hopper"), "590.44.01") == []


def test_driver_with_a_warning_is_named_and_not_refused() -> None:
    target = replace(
        load_target("hopper"), known_bad=(KnownBad("595.1", "warning", "is slow", "measured"),)
    )
    assert check_driver(target, "595.14") == ["driver 595.14 on hopper: is slow (measured)"]
    assert check_driver(target, None) == []


def test_port_in_use_is_found_on_its_address_and_on_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert bind_problem("127.0.0.1", port) == "in use"
        assert bind_problem("0.0.0.0", port) == "in use"
    assert bind_problem("127.0.0.1", port) is None


def test_port_of_a_server_that_just_ended_is_free() -> None:
    """TIME_WAIT of the old connections must not refuse a restart; vLLM listens with SO_REUSEADDR
    too.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            client.recv(1)
    assert bind_problem("127.0.0.1", port) is None


def test_foreign_address_is_refused_before_anything_listens() -> None:
    assert bind_problem("192.0.2.7", 8000) == "no address of this machine"
    assert (
        refused(check_port, "PORT", "192.0.2.7", 8000, "no address of this machine").code
        is ExitCode.CONFIG
    )


def test_a_read_only_file_system_asks_for_a_volume_and_not_for_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIBBLE_CACHE_DIR", str(tmp_path / "cache"))
    flags = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: flags)
    fix = disk.writable_fix(tmp_path / "cache" / "huggingface" / "hub", "HF_HOME")
    assert (
        f"docker run --volume nibble-cache:{tmp_path}/cache; --tmpfs {tmp_path}/cache:exec keeps"
        in fix
    )
    assert "chown" not in fix and "--user" not in fix and fix.endswith("with HF_HOME")
    assert f":{tmp_path}/other;" in disk.writable_fix(tmp_path / "other", "HF_HOME")


def test_a_secret_that_this_user_cannot_read_comes_with_the_command(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    assert disk.secret_fix(secret) == "correct the path"
    secret.write_text("x")
    assert f"chgrp {os.getegid()} {secret} && chmod g+r {secret}" in disk.secret_fix(secret)


def test_few_open_files_are_a_warning() -> None:
    assert open_files_problem(1024) is not None
    assert open_files_problem(65535) is None


def test_vllm_port_is_explained_and_a_clash_named() -> None:
    assert vllm_port_warning({}, 8000) == []
    assert "is PORT 8000 too" in vllm_port_warning({"VLLM_PORT": "8000"}, 8000)[0]
    assert "too" not in vllm_port_warning({"VLLM_PORT": "9000"}, 8000)[0]


def test_folder_that_cannot_be_written_exits_5_naming_its_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    error = refused(check_folders, tmp_path / "own", tmp_path / "file" / "vllm")
    assert error.code is ExitCode.CONFIG
    assert f"{tmp_path}/file is a file; name a folder with VLLM_CACHE_ROOT" in error.line()


def test_writable_folders_are_made_and_left_empty(tmp_path: Path) -> None:
    check_folders(tmp_path / "own", tmp_path / "vllm")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["own", "vllm"]


def test_a_cache_on_a_file_system_without_exec_exits_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: a tmpfs without `exec` ended vLLM at the first kernel it compiled."""
    here = os.statvfs(tmp_path)
    flags = os.statvfs_result([*here[:8], here.f_flag | os.ST_NOEXEC, *here[9:]])
    monkeypatch.setattr(disk.os, "statvfs", lambda path: flags)
    error = refused(check_folders, tmp_path / "own", tmp_path / "own/engine")
    assert error.code is ExitCode.CONFIG and f"{tmp_path}/own is mounted noexec" in error.line()
    assert "--tmpfs PATH:exec" in error.line()


def test_complete_model_folder_passes_and_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    check_model_folder(folder)
    (folder / "model.safetensors").unlink()
    error = refused(check_model_folder, folder)
    assert error.code is ExitCode.MODEL
    assert "*.safetensors" in error.line()


def test_dangling_link_in_a_model_folder_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")
    assert (
        "links to ../blobs/gone, which does not exist" in refused(check_model_folder, folder).line()
    )


def test_folder_size_counts_linked_blobs_once(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "blob", tmp_path / "again")
    (tmp_path / "link").symlink_to("blob")
    assert 1 << 20 <= folder_bytes(tmp_path) < (1 << 20) + 65536
    assert folder_bytes(tmp_path / "absent") == 0


def test_sizes_are_printed_in_the_unit_that_reads_best() -> None:
    assert (gib(3 << 30), gib(512 << 20), gib(5 << 20)) == ("3.0 GiB", "512.0 MiB", "5.0 MiB")


def test_a_certificate_that_vllm_could_not_take_after_the_load_is_refused_before_it(
    tmp_path: Path,
) -> None:
    def make(name: str, *words: str) -> dict[str, str]:
        files = {
            "--ssl-certfile": f"{tmp_path}/{name}.crt",
            "--ssl-keyfile": f"{tmp_path}/{name}.key",
        }
        request = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
        ]
        out = ["-out", files["--ssl-certfile"], "-keyout", files["--ssl-keyfile"], "-subj", "/CN=x"]
        subprocess.run([*request, *words, *out], check=True, capture_output=True)
        return files

    good = make("good", "-nodes")
    for fine in ({}, good, good | {"--ssl-ca-certs": good["--ssl-certfile"]}):
        check_certificate(fine)
    wrong = [
        good | {"--ssl-keyfile": "/nonexistent"},
        good | {"--ssl-keyfile": make("other", "-nodes")["--ssl-keyfile"]},
        make("locked", "-passout", "pass:secret"),
        good | {"--ssl-ca-certs": good["--ssl-keyfile"]},
        {"--ssl-certfile": good["--ssl-certfile"]},
        {"--ssl-keyfile": good["--ssl-keyfile"]},
    ]
    for args in wrong:
        assert refused(check_certificate, args).code is ExitCode.CONFIG
