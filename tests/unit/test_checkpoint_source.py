"""A checkpoint is read from a folder, the cache or the Hub by headers only; what is broken is
named.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nibble.checkpoint import Checkpoint, read_checkpoint
from nibble.errors import ExitCode, NibbleError
from tests.support.models.tiny_checkpoint import tensors, write_checkpoint
from tests.support.models.tiny_model import write_safetensors
from tests.support.refusals import refusal_of
from tests.support.servers.hub import GOOD_TOKEN, Hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", tensors("bf16"))


def refusal(
    model: str, environ: dict[str, str] | None = None, revision: str | None = None
) -> NibbleError:
    return refusal_of(
        lambda: read_checkpoint(model, revision, environ=environ or {}), ExitCode.MODEL
    )


def shards(folder: Path) -> Path:
    """The checkpoint in two shards and an index."""
    whole = tensors("bf16")
    names = list(whole)
    parts = {"model-1.safetensors": names[:4], "model-2.safetensors": names[4:]}
    for file, part in parts.items():
        write_safetensors(folder / file, {name: whole[name] for name in part})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def facts(found: Checkpoint) -> tuple[Any, ...]:
    return (found.weights, found.scheme, found.layers, found.config, found.download_bytes)


def test_folder_is_read_with_its_facts(folder: Path) -> None:
    found = read_checkpoint(str(folder), environ={})
    assert (found.source_kind, found.is_local, found.path, found.revision) == (
        "local",
        True,
        folder,
        None,
    )
    assert (found.architecture, found.model_type, found.dtype) == (
        "Qwen3ForCausalLM",
        "qwen3",
        "bfloat16",
    )
    assert (
        found.hidden_size,
        found.head_dim,
        found.num_attention_heads,
        found.num_key_value_heads,
    ) == (
        64,
        16,
        4,
        2,
    )
    assert (found.num_layers, found.vocab_size, found.max_model_len, found.num_experts) == (
        1,
        128,
        1024,
        None,
    )
    assert (found.custom_code, found.has_mtp, found.has_vision) == (False, False, False)
    assert found.download_bytes == sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"type": "dynamic", "factor": 2.0}, 2048),
        (
            {"rope_type": "yarn", "factor": 4.0},
            1024,
        ),  # vllm 0.32: the length in config.json is the scaled one
        ({"rope_type": "llama3", "factor": 8.0}, 1024),
        (
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            },
            8192,
        ),
    ],
)
def test_context_is_scaled_where_vllm_scales_it(
    scaling: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", config={"rope_scaling": scaling})
    assert read_checkpoint(str(folder), environ={}).max_model_len == expected


def test_path_keeps_the_id(folder: Path) -> None:
    found = read_checkpoint("acme/demo", path=folder, environ={})
    assert (found.id, found.path) == ("acme/demo", folder)


def test_shards_of_an_index_are_joined_and_files_outside_it_ignored(folder: Path) -> None:
    whole = read_checkpoint(str(folder), environ={}).weights
    write_safetensors(shards(folder) / "old.safetensors", {"leftover": ("BF16", [1000])})
    assert read_checkpoint(str(folder), environ={}).weights == whole


def test_folder_without_weights_has_unknown_weights(tmp_path: Path) -> None:
    found = read_checkpoint(str(write_checkpoint(tmp_path / "model")), environ={})
    assert found.weights is None
    assert found.layers is not None


def test_hub_gives_the_same_facts_as_the_folder_without_writing_or_downloading(
    hub: Hub, environ: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    repo = hub.add("acme/demo", shards(folder))
    found = read_checkpoint("acme/demo", environ=environ)
    assert facts(found) == facts(read_checkpoint(str(folder), environ={}))
    assert (found.source_kind, found.revision, found.path) == ("hub", repo.sha, None)
    assert not (tmp_path / "hf").exists()


def test_large_shard_on_the_hub_costs_its_header_only(
    hub: Hub, environ: dict[str, str], folder: Path
) -> None:
    sent: list[int] = []
    big = folder / "model.safetensors"
    write_safetensors(big, {"model.embed_tokens.weight": ("BF16", [1 << 12, 1 << 12])})
    hub.add("acme/demo", folder)
    original = hub.server.RequestHandlerClass._file  # type: ignore[attr-defined]

    def counting(self: Any, sha: str, entry: Any, fault: Any) -> None:
        wanted = self.headers.get("Range", "")
        if entry.path.endswith(".safetensors"):
            start, stop = wanted.removeprefix("bytes=").split("-")
            sent.append(int(stop) - int(start) + 1)
        original(self, sha, entry, fault)

    hub.server.RequestHandlerClass._file = counting  # type: ignore[attr-defined]
    found = read_checkpoint("acme/demo", environ=environ)
    assert found.weights is not None
    assert found.weights.total_bytes == 1 << 25
    assert sum(sent) <= 128 << 10


def test_header_beyond_the_first_request_is_fetched_whole(
    hub: Hub, environ: dict[str, str], folder: Path
) -> None:
    many = {f"model.layers.0.mlp.experts.{i}.down_proj.weight": ("BF16", [4]) for i in range(3000)}
    write_safetensors(folder / "model.safetensors", many)
    hub.add("acme/demo", folder)
    found = read_checkpoint("acme/demo", environ=environ)
    assert found.weights is not None
    assert found.weights.total_bytes == 3000 * 8


def test_gated_model_without_token_names_token_and_page(
    hub: Hub, environ: dict[str, str], folder: Path
) -> None:
    hub.add("acme/gated", folder, gated=True)
    line = refusal("acme/gated", environ).line()
    assert "HF_TOKEN" in line
    assert f"{hub.url}/acme/gated" in line


def test_token_opens_a_gated_model(hub: Hub, environ: dict[str, str], folder: Path) -> None:
    hub.add("acme/gated", folder, gated=True)
    found = read_checkpoint("acme/gated", environ=environ | {"HF_TOKEN": GOOD_TOKEN})
    assert found.weights is not None


def test_unknown_id_says_so(environ: dict[str, str]) -> None:
    error = refusal("acme/nothing", environ)
    assert "no public model acme/nothing" in error.line()
    assert not error.unreachable


def test_word_that_is_neither_folder_nor_id_is_refused(environ: dict[str, str]) -> None:
    assert "neither a folder nor a Hugging Face id" in refusal("a b/c/d", environ).line()


def test_path_that_is_no_folder_is_refused(environ: dict[str, str]) -> None:
    assert refusal("./nowhere", environ).line().startswith("./nowhere is not a folder")


def test_unknown_revision_is_named(hub: Hub, environ: dict[str, str], folder: Path) -> None:
    hub.add("acme/demo", folder)
    assert "does not have the revision 'v9'" in refusal("acme/demo", environ, "v9").line()


def test_offline_and_not_cached_says_pull_and_is_unreachable(environ: dict[str, str]) -> None:
    error = refusal("acme/demo", environ | {"HF_HUB_OFFLINE": "1"})
    assert error.unreachable
    assert "nibble pull acme/demo" in error.line()


def test_unreachable_hub_is_unreachable(environ: dict[str, str]) -> None:
    error = refusal("acme/demo", environ | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert error.unreachable
    assert "http://127.0.0.1:9 cannot be used" in error.line()


COMMIT = "a" * 40


def cache(tmp_path: Path, folder: Path, *names: str) -> None:
    """The cache of `environ` holding the named files of `folder` as main."""
    storage = tmp_path / "hf" / "hub" / "models--acme--demo"
    snapshot = storage / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    for name in names or [path.name for path in folder.iterdir()]:
        shutil.copy(folder / name, snapshot / name)


@pytest.mark.parametrize(("revision", "offline"), [(None, "1"), (COMMIT, "1"), (COMMIT, "0")])
def test_cached_snapshot_is_read_without_the_hub(
    revision: str | None,
    offline: str,
    hub: Hub,
    environ: dict[str, str],
    tmp_path: Path,
    folder: Path,
) -> None:
    cache(tmp_path, folder)
    found = read_checkpoint("acme/demo", revision, environ=environ | {"HF_HUB_OFFLINE": offline})
    assert (found.source_kind, found.revision, found.is_local) == ("cache", COMMIT, False)
    assert found.weights is not None
    assert hub.requests == []


def test_cached_snapshot_serves_when_the_hub_is_down(
    hub: Hub, environ: dict[str, str], tmp_path: Path, folder: Path
) -> None:
    cache(tmp_path, folder)
    hub.outage = True
    assert read_checkpoint("acme/demo", environ=environ).source_kind == "cache"


def test_cached_config_alone_leaves_weights_unknown(
    environ: dict[str, str], tmp_path: Path, folder: Path
) -> None:
    cache(
        tmp_path,
        shards(folder),
        "config.json",
        "model.safetensors.index.json",
        "model-1.safetensors",
    )
    found = read_checkpoint("acme/demo", environ=environ | {"HF_HUB_OFFLINE": "1"})
    assert (found.weights, found.architecture) == (None, "Qwen3ForCausalLM")


# --- broken files ---------------------------------------------------------------------------------


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(folder: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def changed(**entry: Any) -> Callable[[Path], None]:
    """One tensor's header entry with other values."""

    def apply(folder: Path) -> None:
        header, data = header_of(folder)
        header["model.norm.weight"] |= entry
        rewrite(folder, header, data)

    return apply


def cut(count: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:count])

    return apply


def lengthen(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"tail")


def web_page(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html>" * 9)


def hole(folder: Path) -> None:
    header, data = header_of(folder)
    del header["model.norm.weight"]
    rewrite(folder, header, data)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (cut(0), "it has 0 bytes; expected at least the 8 bytes"),
    "shorter than its header": (cut(100), "it has 100 bytes; expected at least"),
    "truncated": (cut(-50), "it is truncated: "),
    "longer": (lengthen, "longer than its header says"),
    "length of a web page": (web_page, "no safetensors file?"),
    "header is not JSON": (lambda f: rewrite(f, b"{not json", b""), "its header is not JSON"),
    "header is a list": (lambda f: rewrite(f, [], b""), "not a JSON object"),
    "unknown dtype": (changed(dtype="F13"), "unknown dtype 'F13'"),
    "wrong shape": (
        changed(shape=[65]),
        "model.norm.weight of dtype BF16 and shape [65] has 128 bytes; expected 130 bytes",
    ),
    "negative shape": (changed(shape=[-64]), "its header entry for model.norm.weight is malformed"),
    "no offsets": (
        changed(data_offsets=None),
        "its header entry for model.norm.weight is malformed",
    ),
    "a hole between tensors": (hole, "lm_head.weight begins at byte"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_safetensors_names_the_file_and_what_is_wrong(name: str, folder: Path) -> None:
    damage, expected = BROKEN[name]
    damage(folder)
    line = refusal(str(folder)).line()
    assert line.startswith(f"{folder}/model.safetensors is corrupt: ")
    assert expected in line


def test_truncated_file_states_both_sizes(folder: Path) -> None:
    _, data = header_of(folder)
    cut(-50)(folder)
    assert (
        f"{len(data) - 50} bytes of tensors; expected {len(data)} bytes"
        in refusal(str(folder)).line()
    )


def test_a_folder_with_an_index_and_no_shard_is_refused(folder: Path) -> None:
    for shard in shards(folder).glob("model-*.safetensors"):
        shard.unlink()
    with pytest.raises(NibbleError, match="which is not there") as caught:
        read_checkpoint(str(folder))
    assert caught.value.code == ExitCode.MODEL


def test_index_that_names_a_missing_shard_names_both(folder: Path) -> None:
    (shards(folder) / "model-2.safetensors").unlink()
    line = refusal(str(folder)).line()
    assert "model.safetensors.index.json names model-2.safetensors, which is not there" in line


def test_index_without_weight_map_is_named(folder: Path) -> None:
    (shards(folder) / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json has no weight_map" in refusal(str(folder)).line()


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_config_that_is_not_json_is_named(text: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert refusal(str(folder)).line().startswith(f"{folder}/config.json is not JSON")


def test_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(str(folder)).line().startswith(f"{folder}/config.json is missing")


def test_dangling_link_in_a_folder_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/nowhere/blob")
    assert "links to /nowhere/blob, which does not exist" in refusal(str(folder)).line()


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], bytes]) -> None:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(json.loads(data[8 : 8 + length]))
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            lambda found: json.dumps(found | {"x": {"dtype": ["F32"], "shape": [], "data_offsets": [0, 4]}}).encode(),  # noqa: E501
            "its header entry for x is malformed",
        ),
        (lambda found: json.dumps(found).encode("utf-16"), "its header is not JSON"),
        (lambda found: b"[" * 100_000, "its header is not JSON"),
    ],
    ids=["a list as dtype", "UTF-16", "nested without end"],
)  # fmt: skip
def test_a_header_that_safetensors_would_refuse_is_corrupt(folder: Path, change, what: str) -> None:
    rewrite_header(folder / "model.safetensors", change)
    assert f"model.safetensors is corrupt: {what}" in refusal(str(folder)).line()


def test_json_is_read_as_utf_8_alone_as_vllm_reads_it(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text(), encoding="utf-16")
    assert "config.json is not JSON" in refusal(str(folder)).line()


@pytest.mark.parametrize(
    ("key", "value"),
    [("architectures", 5), ("head_dim", "x"), ("num_experts", float("inf")), ("num_hidden_layers", 10**40),  # noqa: E501
     ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": 1})],
)  # fmt: skip
def test_a_config_with_values_of_another_kind_is_one_error(
    folder: Path, key: str, value: Any
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert "has a value that cannot be read" in refusal(str(folder)).line()


def test_a_home_of_an_unknown_user_is_no_folder() -> None:
    assert (
        "~nobody-of-that-name/model is not a folder" in refusal("~nobody-of-that-name/model").line()
    )
