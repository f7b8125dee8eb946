"""What tests of one container need beside the image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.docker import containers, images
from tests.support.docker.images import *  # noqa: F403 - fixtures
from tests.support.models import slow_model


@pytest.fixture(scope="session")
def image_config(cpu_image: str) -> dict:
    return json.loads(containers.docker("image", "inspect", cpu_image).stdout)[0]["Config"]


@pytest.fixture(scope="session")
def slow_hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face cache with a model slow enough to be streaming when a signal comes, as
    `test/slow`.
    """
    model = slow_model.make_slow_model(images.CACHE / "slow-model")
    return containers.hub_cache(tmp_path_factory.mktemp("hf") / "huggingface", model, "test/slow")
