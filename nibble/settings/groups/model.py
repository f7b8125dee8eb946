"""Which model nibble serves, and on which target."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from nibble.settings.declare import option


class ModelOptions(BaseModel):
    """The group `Model`."""

    model: str | None = option(
        None,
        "Model",
        "Hugging Face id or local folder of the model to serve. Default of `serve` and `plan`:"
        " smollm2-135m-instruct-nvfp4 (docs/default-model.md).",
        ("MODEL", "HF_MODEL", "MODEL_PATH"),
        expected="a Hugging Face id such as nvidia/Qwen3-8B-NVFP4 or a folder",
        min_length=1,
    )
    revision: str | None = option(
        None,
        "Model",
        "Commit, branch or tag of the model; 40 hex digits pin it. Default: `main`.",
        "NIBBLE_REVISION",
        flag="--revision",
        vllm="--revision",
        expected="a commit, branch or tag",
        min_length=1,
    )
    served_model_name: str | None = option(
        None,
        "Model",
        "Additional name of the model, or several separated by commas, beside its id and"
        " `default`.",
        ("NIBBLE_SERVED_MODEL_NAME", "SERVED_MODEL_NAME"),
        flag="--served-model-name",
        expected="a name",
        min_length=1,
    )
    recipe: Literal["auto", "off"] = option(
        "auto",
        "Model",
        "Use of the recipe known for this model and target: `auto` or `off`.",
        "NIBBLE_RECIPE",
        flag="--recipe",
        expected="auto or off",
    )
    target: Literal["auto", "gb10", "sm120", "b200", "hopper", "cpu"] = option(
        "auto",
        "Model",
        "GPU target: `auto` detects the machine's; an image sets its target.",
        "NIBBLE_TARGET",
        flag="--target",
        expected="auto, gb10, sm120, b200, hopper or cpu",
    )
    allow_risk: str = option(
        "",
        "Model",
        "Known risks to accept, as ids separated by commas; nibble does not apply their rules.",
        "NIBBLE_ALLOW_RISK",
        flag="--allow-risk",
        expected="ids from the table of known risks",
    )
