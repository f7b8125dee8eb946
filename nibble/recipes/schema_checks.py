"""Checks flags, variables and kernels of recipes and rules against vLLM's schema.

A check yields findings: the key path in the file, what is wrong there, and a suggestion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nibble.engine.flags import OWNED
from nibble.engine.schema import Schema, closest
from nibble.recipes.resolution import canonical
from nibble.settings.older_guides import successor_of

# nibble sets these at run time, a recipe must not: engine.flags.OWNED, and the shape of a cluster.
OWNED_BY_NIBBLE = frozenset(OWNED) | {
    "--headless", "--nnodes", "--node-rank", "--master-addr", "--master-port",
    "--tokenizer-revision", "--code-revision", "--fail-on-environ-validation",
    "--ssl-keyfile", "--ssl-certfile", "--grpc", "--grpc-port",
}  # fmt: skip
# Names of other projects, whose existence nibble cannot check.
ECOSYSTEM_PREFIXES = (
    "NCCL_", "HF_", "PYTORCH_", "TORCH_", "CUDA_", "CUTE_DSL_", "FLASHINFER_", "FLASH_ATTENTION_",
    "OMP_", "RAY_", "TRITON_", "UCX_", "GLOO_", "SAFETENSORS_", "TOKENIZERS_", "CUBLAS_",
)  # fmt: skip
# Load formats whose package the image lacks; vLLM 0.32 fails at load without it.
MISSING_PACKAGES: Mapping[str, str] = {
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "runai_streamer": "runai-model-streamer",
    "tensorizer": "tensorizer",
}
Finding = tuple[str, str, str]  # key path, message, suggestion


def flag_problems(key: str, flag: str, value: Any, schema: Schema) -> Iterator[Finding]:
    name = canonical(flag)
    spec = schema.flag(name)
    if name in OWNED_BY_NIBBLE:
        yield key, f"{name} is set by nibble; remove it from the recipe", OWNED.get(name, "")
    elif spec is None:
        yield key, f"vLLM {schema.version} has no flag {name}", schema.suggest(name)
    elif spec.name != name:
        yield (
            key,
            f"{name} is a short name of the flag; write the long one",
            spec.name.removeprefix("--"),
        )
    elif isinstance(value, dict):
        yield from ((key, problem, "") for problem in schema.check_json(name, value))
    elif problem := schema.check_value(name, value):
        yield key, problem, ""
    elif name == "--load-format" and value in MISSING_PACKAGES:
        yield (
            key,
            (
                f"load format {value} needs the package {MISSING_PACKAGES[value]}, which the image"
                " lacks"
            ),
            "auto",
        )


def env_problems(key: str, name: str, schema: Schema) -> Iterator[Finding]:
    if successor := successor_of(name):
        flags = successor.flags(successor.examples[-1]) or {}
        yield (
            key,
            f"{name} is a dead variable: vLLM {schema.version} does not read it",
            " ".join(flags),
        )
    elif name.startswith("VLLM_"):
        if not schema.env_exists(name):
            yield key, f"vLLM {schema.version} has no variable {name}", closest(name, schema.envs)
    elif not name.startswith(ECOSYSTEM_PREFIXES):
        prefixes = ", ".join(ECOSYSTEM_PREFIXES)
        yield (
            key,
            f"{name} is not a variable of vLLM and has no known prefix ({prefixes})",
            closest(name, schema.envs),
        )


def kernel_problems(key: str, kind: str, kernel: str, schema: Schema) -> Iterator[Finding]:
    known = {
        "moe": schema.moe_kernels,
        "linear": schema.linear_kernels,
        "attention": schema.attention_backends,
    }[kind]
    if kernel not in known:
        yield (
            key,
            f"vLLM {schema.version} logs no {kind} kernel called {kernel!r}",
            closest(kernel, known),
        )
