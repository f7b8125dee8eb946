"""The Hub fixture answers the real huggingface_hub client as the Hub does; tests that use it
rest on this.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.support.servers.hub import GOOD_TOKEN, OTHER_TOKEN, Hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository with a real safetensors file of one 2x4 float32 tensor, and a file in a
    subfolder.
    """
    folder = tmp_path / "repo"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "note.txt").write_text("hi")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with Hub() as server:
        server.add("acme/demo", folder)
        server.add("acme/gated", folder, gated=True)
        server.add("acme/private", folder, private=True)
        yield server


def test_model_info_lists_sizes_and_hashes(hub: Hub, folder: Path) -> None:
    info = HfApi(endpoint=hub.url).model_info("acme/demo", files_metadata=True)
    weights = next(file for file in info.siblings or () if file.rfilename == "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    assert weights.size == len(content)
    assert weights.lfs is not None
    assert weights.lfs.sha256 == hashlib.sha256(content).hexdigest()


def test_snapshot_download_and_the_clients_own_verification_agree(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    plan = snapshot_download("acme/demo", endpoint=hub.url, cache_dir=cache, dry_run=True)
    assert sum(file.file_size or 0 for file in plan if file.will_download) == sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file()
    )
    path = Path(snapshot_download("acme/demo", endpoint=hub.url, cache_dir=cache))
    assert (path / "sub" / "note.txt").read_text() == "hi"
    checked = HfApi(endpoint=hub.url).verify_repo_checksums("acme/demo", cache_dir=cache)
    assert (checked.checked_count, checked.mismatches, checked.missing_paths) == (3, [], [])


def test_headers_of_safetensors_are_read_by_range(hub: Hub) -> None:
    meta = HfApi(endpoint=hub.url).get_safetensors_metadata("acme/demo")
    assert meta.files_metadata["model.safetensors"].tensors["w"].shape == [2, 4]


def test_paths_info_answers_for_existing_paths_only(hub: Hub) -> None:
    found = HfApi(endpoint=hub.url).get_paths_info("acme/demo", ["config.json", "absent"])
    assert [entry.path for entry in found] == ["config.json"]


def test_a_stranger_is_told_nothing_about_unknown_and_private_models(hub: Hub) -> None:
    for model in ("acme/nope", "acme/private"):
        with pytest.raises(HfHubHTTPError) as caught:
            HfApi(endpoint=hub.url).model_info(model)
        assert caught.value.response.status_code == 401


def test_a_member_is_told_that_a_model_does_not_exist(hub: Hub) -> None:
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token=GOOD_TOKEN).model_info("acme/nope")


@pytest.mark.parametrize(("token", "status"), [(False, 401), (OTHER_TOKEN, 403)])
def test_a_gated_model_shows_its_listing_and_refuses_its_files(
    hub: Hub, tmp_path, token, status: int
) -> None:
    assert HfApi(endpoint=hub.url, token=token).model_info("acme/gated").gated == "manual"
    with pytest.raises(GatedRepoError) as caught:
        hf_hub_download(
            "acme/gated", "config.json", endpoint=hub.url, cache_dir=tmp_path, token=token
        )
    assert caught.value.response.status_code == status


def test_unknown_revision_and_unknown_file_have_their_own_errors(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(RevisionNotFoundError):
        HfApi(endpoint=hub.url).model_info("acme/demo", revision="v9")
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download("acme/demo", "absent", endpoint=hub.url, cache_dir=tmp_path)
