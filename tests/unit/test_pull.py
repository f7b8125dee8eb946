"""`nibble pull` against a local Hub: what is fetched, what is refused, what a failed download
leaves.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nibble.cli.doctor import checks as doctor
from nibble.cli.doctor.checks import hub_check
from nibble.errors import ExitCode, NibbleError
from nibble.hub import pull as pull_module
from nibble.hub.access import access
from nibble.hub.files import RemoteFile, cached_snapshot, missing_weights, select
from nibble.hub.progress import Progress, as_lines
from nibble.hub.pull import check_disk, pull
from tests.support.other_users import open_to_others
from tests.support.refusals import refusal_of
from tests.support.servers.hub import GOOD_TOKEN, OTHER_TOKEN, Hub, Repo

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder shaped like a model repository; the bytes of the weights do not matter here."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(300_000))
    (folder / "pytorch_model.bin").write_bytes(b"duplicate")
    (folder / "photo.png").write_bytes(b"not needed")
    return folder


def refusal(model: str, environ: dict[str, str], revision: str | None = None) -> NibbleError:
    return refusal_of(lambda: pull(model, revision, environ))


def files(*paths: str) -> list[RemoteFile]:
    return [RemoteFile(path, 1, None, None) for path in paths]


def names(selected: tuple[RemoteFile, ...]) -> set[str]:
    return {file.path for file in selected}


# What is fetched


def test_pull_fetches_one_copy_of_the_weights_and_nothing_a_server_does_not_read(
    hub: Hub, model: Path, environ
) -> None:
    repo = hub.add("acme/demo", model)
    result = pull("acme/demo", None, environ)
    assert sorted(path.name for path in result.path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (result.path / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    assert result.revision == repo.sha
    assert result.bytes == sum(
        (result.path / name).stat().st_size for name in os.listdir(result.path)
    )


def test_pull_of_a_cached_pinned_revision_asks_the_hub_nothing(
    hub: Hub, model: Path, environ
) -> None:
    repo = hub.add("acme/demo", model)
    first = pull("acme/demo", repo.sha, environ)
    hub.requests.clear()
    again = pull("acme/demo", repo.sha, environ)
    assert (again.path, again.bytes, hub.requests) == (first.path, 0, [])


def test_pull_of_a_cached_branch_asks_only_which_commit_it_is(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/demo", model)
    pull("acme/demo", None, environ)
    hub.requests.clear()
    assert pull("acme/demo", None, environ).bytes == 0
    assert len(hub.requests) == 1


def test_pull_fetches_the_new_commit_of_a_branch_and_only_what_changed(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/demo", model)
    pull("acme/demo", None, environ)
    (model / "tokenizer.json").write_text('{"new": 1}')
    newer = hub.add("acme/demo", model)
    hub.requests.clear()
    result = pull("acme/demo", None, environ)
    assert result.revision == newer.sha
    assert [path.rsplit("/")[-1] for path in hub.downloads()] == ["tokenizer.json"]


def test_a_folder_needs_no_pull(hub: Hub, model: Path, environ) -> None:
    assert pull(str(model), None, environ).path == model
    assert hub.requests == []


def test_progress_counts_every_byte_of_download_and_verification(
    hub: Hub, model: Path, environ, monkeypatch
) -> None:
    monkeypatch.setattr(pull_module, "PROGRESS_SECONDS", 0.02)
    hub.add("acme/demo", model, faults={"model.safetensors": "slow"})
    seen: list[Progress] = []
    result = pull("acme/demo", None, environ, seen.append)
    downloads = [step.done_bytes for step in seen if step.stage == "download"]
    assert downloads == sorted(downloads)
    assert any(0 < count < result.bytes for count in downloads)
    assert downloads[-1] == result.bytes
    assert max(step.done_bytes for step in seen if step.stage == "verify") == result.bytes


def test_progress_as_lines_says_how_far_it_is_without_a_line_for_every_step() -> None:
    lines: list[str] = []
    report = as_lines(lines.append, every_seconds=60)
    for done in range(0, 11):
        report(Progress("download", done * GIB, 10 * GIB))
    report(Progress("download", 10 * GIB, 10 * GIB))
    report(Progress("verify", 10 * GIB, 10 * GIB))
    assert lines == [
        "download: 0.0 MiB of 10.0 GiB",
        "download: 10.0 GiB of 10.0 GiB",
        "verify: 10.0 GiB of 10.0 GiB",
    ]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["a.safetensors", "a.bin", "original/x.pth", "onnx/m.onnx", "x.gguf"], {"a.safetensors"}),
        (["pytorch_model.bin", "flax_model.msgpack", "x.gguf"], {"pytorch_model.bin"}),
        (["only.gguf", "config.json"], {"only.gguf", "config.json"}),
        (
            ["modeling_x.py", "chat_template.jinja", "m.safetensors"],
            {"modeling_x.py", "chat_template.jinja", "m.safetensors"},
        ),
        (["README.md", ".gitattributes", "cat.JPG", "cat.jpg"], {"README.md", "cat.JPG"}),
    ],
)
def test_select_keeps_the_weights_vllm_loads(given: list[str], kept: set[str]) -> None:
    assert names(select(files(*given))) == kept


@pytest.mark.parametrize(
    ("load_format", "has_params", "kept"),
    [
        ("auto", True, "consolidated"),
        ("auto", False, "model"),
        ("mistral", False, "consolidated"),
        ("safetensors", True, "model"),
    ],
)
def test_select_takes_mistrals_or_hugging_faces_copy_as_vllm_would(
    load_format: str, has_params: bool, kept: str
) -> None:
    given = [
        "consolidated.safetensors",
        "model-00001.safetensors",
        "model.safetensors.index.json",
        "config.json",
    ]
    chosen = names(select(files(*given, *(["params.json"] if has_params else [])), load_format))
    assert {name.split(".")[0].split("-")[0] for name in chosen if "safetensors" in name} == {kept}


# Who may read, and what is there


def test_unknown_model_exits_4_and_says_where_it_looked(hub: Hub, environ) -> None:
    error = refusal("acme/nope", environ)
    assert error.code is ExitCode.MODEL
    assert f"{hub.url} has no public model acme/nope" in error.line()


def test_a_misspelled_model_of_nibbles_is_suggested(hub: Hub, environ) -> None:
    for offline in ("0", "1"):
        with pytest.raises(NibbleError) as caught:
            pull("nibble-demo-nvfp", None, {**environ, "HF_HUB_OFFLINE": offline})
        assert "did you mean nibble-demo-nvfp4? else " in caught.value.line()


def test_unknown_model_with_a_token_blames_no_missing_token(environ) -> None:
    error = refusal("acme/nope", environ | {"HF_TOKEN": GOOD_TOKEN})
    assert "that this HF_TOKEN can read" in error.line()


def test_gated_model_without_token_exits_4_naming_the_variable_and_the_page(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/gated", model, gated=True)
    error = refusal("acme/gated", environ)
    assert error.code is ExitCode.MODEL
    assert "HF_TOKEN" in error.line()
    assert f"{hub.url}/acme/gated" in error.line()


def test_gated_model_with_a_token_on_no_list_says_so(hub: Hub, model: Path, environ) -> None:
    hub.add("acme/gated", model, gated=True)
    error = refusal("acme/gated", environ | {"HF_TOKEN": OTHER_TOKEN})
    assert "has no access to it" in error.line()
    assert OTHER_TOKEN not in error.line()


def test_gated_model_with_access_is_pulled_with_a_token_from_a_file(
    hub: Hub, model: Path, environ, tmp_path
) -> None:
    hub.add("acme/gated", model, gated=True)
    (tmp_path / "token").write_text(GOOD_TOKEN + "\n")
    assert pull("acme/gated", None, environ | {"HF_TOKEN_FILE": str(tmp_path / "token")}).bytes > 0


def test_private_model_looks_unknown_to_strangers_and_is_pulled_by_its_owner(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/private", model, private=True)
    assert "HF_TOKEN" in refusal("acme/private", environ).line()
    assert pull("acme/private", None, environ | {"HF_TOKEN": GOOD_TOKEN}).bytes > 0


def test_a_token_with_blanks_around_it_is_taken_without_them() -> None:
    assert access({"HOME": "/", "HF_TOKEN": f" {GOOD_TOKEN} "}).token == GOOD_TOKEN


def test_refused_token_is_named_not_shown(hub: Hub, model: Path, environ) -> None:
    hub.add("acme/demo", model)
    error = refusal("acme/demo", environ | {"HF_TOKEN": "hf_expired"})
    assert "refuses this HF_TOKEN" in error.line()
    assert "hf_expired" not in error.line()


def test_unknown_revision_exits_4(hub: Hub, model: Path, environ) -> None:
    hub.add("acme/demo", model)
    assert "does not have the revision 'v9'" in refusal("acme/demo", environ, "v9").line()


@pytest.mark.parametrize("text", ["a/b/c", "/no/such/folder", "http://x/y", "acme/de mo"])
def test_what_is_neither_folder_nor_id_is_refused_without_a_request(
    hub: Hub, environ, text: str
) -> None:
    error = refusal(text, environ)
    assert error.code is ExitCode.MODEL
    assert "neither a folder nor" in error.line()
    assert hub.requests == []


# Offline and outage


def test_offline_without_the_model_exits_4(hub: Hub, model: Path, environ) -> None:
    hub.add("acme/demo", model)
    error = refusal("acme/demo", environ | {"HF_HUB_OFFLINE": "1"})
    assert error.code is ExitCode.MODEL
    assert "HF_HUB_OFFLINE" in error.line()
    assert error.unreachable
    assert hub.requests == []


def test_offline_with_the_model_is_served_from_the_cache(hub: Hub, model: Path, environ) -> None:
    hub.add("acme/demo", model)
    first = pull("acme/demo", None, environ)
    assert pull("acme/demo", None, environ | {"HF_HUB_OFFLINE": "1"}).path == first.path


def test_outage_with_the_model_cached_uses_it_and_says_so(hub: Hub, model: Path, environ) -> None:
    hub.add("acme/demo", model)
    first = pull("acme/demo", None, environ)
    hub.outage = True
    result = pull("acme/demo", None, environ)
    assert result.path == first.path
    assert "does not answer" in result.notices[0]


def test_outage_without_the_model_exits_4_naming_the_endpoint(hub: Hub, environ) -> None:
    hub.outage = True
    error = refusal("acme/demo", environ)
    assert error.code is ExitCode.MODEL
    assert hub.url in error.line()
    assert error.unreachable


def test_nobody_listening_exits_4(environ) -> None:
    error = refusal("acme/demo", environ | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert error.code is ExitCode.MODEL
    assert "http://127.0.0.1:9 cannot be used (it refused the connection)" in error.line()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (socket.EAI_NONAME, "its name is not known to DNS"),
        (socket.EAI_AGAIN, "DNS does not answer"),
    ],
)
def test_a_hub_whose_name_is_not_found_is_told_in_words(
    environ, monkeypatch, number: int, told: str
) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "as the C library words it")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    error = refusal("acme/demo", environ | {"HF_ENDPOINT": "http://hub.invalid"})
    assert f"http://hub.invalid cannot be used ({told})" in error.line()
    check = hub_check("http://hub.invalid", doctor._head)
    assert check.what == f"http://hub.invalid does not answer ({told})"


def test_a_model_withdrawn_from_the_hub_is_not_served_silently_from_the_cache(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/demo", model)
    pull("acme/demo", None, environ)
    hub.repos.clear()
    assert "has no public model" in refusal("acme/demo", environ).line()


# Corruption


@pytest.mark.parametrize("fault", ["corrupt", "short"])
def test_a_corrupt_file_is_named_removed_and_fetched_again(
    hub: Hub, model: Path, environ, fault
) -> None:
    repo = hub.add("acme/demo", model, faults={"model.safetensors": fault})
    error = refusal("acme/demo", environ)
    assert error.code is ExitCode.MODEL
    assert "model.safetensors" in error.line()
    snapshot = Path(environ["HF_HOME"]) / "hub/models--acme--demo/snapshots" / repo.sha
    assert not (snapshot / "model.safetensors").is_symlink()
    repo.faults.clear()
    hub.requests.clear()
    result = pull("acme/demo", None, environ)
    assert (result.path / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    assert [path.rsplit("/")[-1] for path in hub.downloads()].count("model.safetensors") == 1


def test_a_corrupt_config_is_found_by_its_git_id(hub: Hub, model: Path, environ) -> None:
    hub.add("acme/demo", model, faults={"config.json": "corrupt"})
    assert "config.json (sha1" in refusal("acme/demo", environ).line()


def test_a_file_never_verified_because_the_pull_was_killed_is_verified_by_the_next(
    hub: Hub, model: Path, environ
) -> None:
    repo = hub.add("acme/demo", model)
    snapshot = pull("acme/demo", None, environ).path
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(b"x" * blob.stat().st_size)
    record = snapshot.parent.parent / f".nibble-unverified-{repo.sha}.json"
    record.write_text(json.dumps(["model.safetensors"]))
    assert "model.safetensors (sha256" in refusal("acme/demo", environ, repo.sha).line()
    assert pull("acme/demo", repo.sha, environ).bytes > 0
    assert not record.exists()


# Interruptions: parts are kept and gone on with, silence ends


def fetched(hub: Hub, name: str) -> list[str]:
    """The Range header of each download of a file, "" where it had none."""
    return [range_ for path, range_ in hub.ranges if path.endswith(name)]


def test_a_connection_cut_again_and_again_is_resumed_to_the_end(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/demo", model, faults={"model.safetensors": "cut"})
    path = pull("acme/demo", None, environ).path
    assert (path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert fetched(hub, "model.safetensors")[:3] == ["", "bytes=150000-", "bytes=225000-"]


def test_a_download_without_a_byte_is_tried_again_and_then_one_error_names_the_file(
    hub: Hub, model: Path, environ, monkeypatch
) -> None:
    monkeypatch.setattr("nibble.hub.transfer.BACKOFF_S", 0.0)
    hub.add("acme/demo", model, faults={"model.safetensors": "stall"})
    error = refusal("acme/demo", environ | {"NIBBLE_DOWNLOAD_STALL_SECONDS": "0.3"})
    assert error.code is ExitCode.MODEL and error.unreachable
    assert "model.safetensors did not grow in 3 tries of up to 0.3 s" in error.line()
    tries = fetched(hub, "model.safetensors")
    assert tries == ["", "bytes=100000-", "bytes=100000-", "bytes=100000-"]


def test_a_pull_that_gave_up_or_was_killed_goes_on_where_it_was(
    hub: Hub, model: Path, environ, monkeypatch
) -> None:
    monkeypatch.setattr("nibble.hub.transfer.BACKOFF_S", 0.0)
    repo = hub.add("acme/demo", model, faults={"model.safetensors": "stall"})
    refusal("acme/demo", environ | {"NIBBLE_DOWNLOAD_STALL_SECONDS": "0.2"})
    repo.faults.clear()
    hub.ranges.clear()
    seen: list[Progress] = []
    result = pull("acme/demo", None, environ, seen.append)
    assert fetched(hub, "model.safetensors") == ["bytes=100000-"]
    assert (result.path / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    small = sum((model / name).stat().st_size for name in ("config.json", "tokenizer.json"))
    assert result.bytes == 200_000 + small
    assert not list(result.path.parents[1].glob("blobs/*incomplete"))


def leave_a_part(repo: Repo, environ: dict[str, str], content: bytes) -> None:
    """Where an earlier pull would have left what it had of the weights."""
    blobs = Path(environ["HF_HOME"]) / "hub/models--acme--demo/blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{repo.entries['model.safetensors'].sha256}.nibble.incomplete"
    part.write_bytes(content)


def test_a_part_that_was_damaged_is_found_by_the_sha256_and_fetched_again(
    hub: Hub, model: Path, environ
) -> None:
    repo = hub.add("acme/demo", model)
    leave_a_part(repo, environ, b"x" * 1000)
    assert "model.safetensors (sha256" in refusal("acme/demo", environ).line()
    assert pull("acme/demo", None, environ).bytes == 300_000


@pytest.mark.parametrize(("length", "fault"), [(1000, "no-ranges"), (300_001, None)])
def test_a_part_longer_than_the_file_and_a_hub_without_ranges_start_again(
    hub: Hub, model: Path, environ, length: int, fault
) -> None:
    repo = hub.add("acme/demo", model, faults={"model.safetensors": fault} if fault else {})
    leave_a_part(repo, environ, b"x" * length)
    path = pull("acme/demo", None, environ).path
    assert (path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_pull_that_was_killed_with_all_of_a_file_fetches_no_byte_of_it(
    hub: Hub, model: Path, environ
) -> None:
    repo = hub.add("acme/demo", model)
    leave_a_part(repo, environ, (model / "model.safetensors").read_bytes())
    path = pull("acme/demo", None, environ).path
    assert fetched(hub, "model.safetensors") == []
    assert (path / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_two_pulls_of_one_model_fetch_it_once(hub: Hub, model: Path, environ) -> None:
    hub.add("acme/demo", model, faults={"model.safetensors": "slow"})
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: pull("acme/demo", None, environ).path, range(2)))
    assert paths[0] == paths[1] and len(fetched(hub, "model.safetensors")) == 1


# Disk and permissions


def test_download_larger_than_the_disk_exits_7_with_the_arithmetic(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/huge", model, huge={"model-00002.safetensors": 10**16})
    error = refusal("acme/huge", environ)
    assert error.code is ExitCode.NO_FIT
    assert "too little" in error.line()
    assert hub.downloads() == []


def test_disk_check_counts_the_download_and_one_gib_to_spare() -> None:
    check_disk("m", 4 * GIB, 5 * GIB, Path("/c"))
    with pytest.raises(
        NibbleError,
        match=r"the download of m needs 4.0 GiB and a margin of 1.0 GiB; /c has 4.5"
        r" GiB free, 512.0 MiB",
    ) as caught:
        check_disk("m", 4 * GIB, 4 * GIB + GIB // 2, Path("/c"))
    assert caught.value.code is ExitCode.NO_FIT


def test_a_cached_model_needs_no_free_disk() -> None:
    check_disk("m", 0, 0, Path("/c"))


def test_cache_under_a_file_exits_5_naming_it(hub: Hub, model: Path, environ, tmp_path) -> None:
    hub.add("acme/demo", model)
    (tmp_path / "file").write_text("")
    error = refusal("acme/demo", environ | {"HF_HOME": str(tmp_path / "file" / "hf")})
    assert error.code is ExitCode.CONFIG
    assert str(tmp_path / "file") in error.line()
    assert hub.downloads() == []


# The interpreter may lie in a folder closed to other users, so root's first pull loads every
# module.
PULL_AS_ANOTHER = """
import os, sys, tempfile
from nibble.errors import NibbleError
from nibble.hub.pull import pull
with tempfile.TemporaryDirectory() as other_cache:
    pull(sys.argv[1], None, dict(os.environ) | {"HF_HOME": other_cache})
os.setgroups([]); os.setgid(0); os.setuid(2000)
try:
    result = pull(sys.argv[1], None, os.environ)
    print(result.path, *result.notices)
except NibbleError as error:
    sys.exit(f"{int(error.code)} {error.line()}")
"""


def pull_as_another_user(model: str, environ: dict[str, str]) -> str:
    """Pull as uid 2000 (permission bits do not bind root) in a separate process; its path or its
    error.
    """
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    command = [sys.executable, "-c", PULL_AS_ANOTHER, model]
    env = dict(os.environ) | environ
    result = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in result.stderr
    return (result.stdout or result.stderr).strip()


@pytest.fixture
def open_tmp_path(tmp_path: Path) -> Path:
    open_to_others(tmp_path)
    return tmp_path


def test_cache_of_another_user_exits_5_with_the_command_that_mends_it(
    hub: Hub, model: Path, environ, open_tmp_path
) -> None:
    hub.add("acme/demo", model)
    cache = open_tmp_path / "hf"
    cache.mkdir(mode=0o755)
    message = pull_as_another_user("acme/demo", environ)
    assert message.startswith(f"5 cannot write to {cache}/hub")
    assert f"chown -R 2000:0 {cache}" in message


def test_complete_cache_that_is_read_only_is_usable(
    hub: Hub, model: Path, environ, open_tmp_path
) -> None:
    hub.add("acme/demo", model)
    path = pull("acme/demo", None, environ).path
    subprocess.run(["chmod", "-R", "a+rX,go-w", open_tmp_path / "hf"], check=True)
    assert pull_as_another_user("acme/demo", environ) == str(path)


def test_read_only_cache_with_an_older_commit_is_used_with_a_notice(
    hub: Hub, model: Path, environ, open_tmp_path
) -> None:
    hub.add("acme/demo", model)
    path = pull("acme/demo", None, environ).path
    subprocess.run(["chmod", "-R", "a+rX,go-w", open_tmp_path / "hf"], check=True)
    (model / "tokenizer.json").write_text('{"new": 1}')
    hub.add("acme/demo", model)
    said = pull_as_another_user("acme/demo", environ)
    assert said.startswith(str(path))
    assert "nibble uses the older" in said


def test_unreadable_model_file_exits_4_with_the_chmod_that_mends_it(
    hub: Hub, model: Path, environ, open_tmp_path
) -> None:
    hub.add("acme/demo", model)
    path = pull("acme/demo", None, environ).path
    blob = (path / "model.safetensors").resolve()
    blob.chmod(0o600)
    message = pull_as_another_user("acme/demo", environ)
    assert message.startswith(f"4 uid 2000 cannot read {blob}")
    assert f"chmod a+rX {blob}" in message


def test_cache_folder_closed_to_us_exits_4_with_the_chmod_that_mends_it(
    hub: Hub, model: Path, environ, open_tmp_path
) -> None:
    hub.add("acme/demo", model)
    storage = pull("acme/demo", None, environ).path.parent.parent
    storage.chmod(0o700)
    message = pull_as_another_user("acme/demo", environ)
    assert message.startswith(f"4 uid 2000 cannot read {storage}")
    assert f"chmod -R a+rX {storage}" in message


def test_a_dangling_link_of_a_partly_copied_cache_is_explained(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/demo", model)
    path = pull("acme/demo", None, environ).path
    (path / "model.safetensors").resolve().unlink()
    assert "copy the whole Hugging Face cache" in refusal("acme/demo", environ).line()


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_disk_full_in_the_middle_exits_7(hub: Hub, model: Path, environ, tmp_path: Path) -> None:
    """A real file system of 1 MiB fills up while the file comes (the pre-flight is told it is
    larger).
    """
    if os.getuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    (model / "model.safetensors").write_bytes(os.urandom(3 << 20))
    hub.add("acme/demo", model)
    cache = tmp_path / "hf"
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(cache)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mount is not permitted here")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pull_module, "free_bytes", lambda path: 100 * GIB)
            error = refusal("acme/demo", environ)
    finally:
        subprocess.run(["umount", "-l", cache], check=True)
    assert error.code is ExitCode.NO_FIT
    assert "is full" in error.line()


# A folder's own account of itself, where no listing is cached (caches of older versions, plain
# folders)


def test_missing_shard_of_an_index_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"x")
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_weights(tmp_path) == ["b.safetensors"]


def test_folder_without_weights_or_config_is_incomplete(tmp_path: Path) -> None:
    assert missing_weights(tmp_path) == ["config.json", "*.safetensors"]


def test_cache_of_an_older_huggingface_hub_without_listings_is_found(
    hub: Hub, model: Path, environ
) -> None:
    hub.add("acme/demo", model)
    path = pull("acme/demo", None, environ).path
    cache = Path(environ["HF_HOME"]) / "hub"
    for listing in (path.parent.parent / "trees").iterdir():
        listing.unlink()
    assert cached_snapshot("acme/demo", None, cache) == path
    (path / "model.safetensors").unlink()
    assert cached_snapshot("acme/demo", None, cache) is None
