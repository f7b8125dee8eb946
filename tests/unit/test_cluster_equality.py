"""What has to be equal on all ranks, and how a difference is named."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from nibble.cluster.agent import AgentError
from nibble.cluster.caller import Caller
from nibble.cluster.checkpoint_facts import checkpoint_facts, summary
from nibble.cluster.differences import settings_problems
from nibble.cluster.equality import compare_checkpoints, compare_code
from nibble.cluster.node import Place, node_handlers
from nibble.cluster.rank_settings import (
    OWN_FLAGS,
    checkpoint_folders,
    compared_environment,
    compared_flags,
)
from nibble.engine.installed import FILES, build_parts, part_files
from nibble.engine.schema import load_schema
from nibble.plan.choice import Choice
from nibble.plan.gather import plan_for, read_wishes
from nibble.plan.plan import Plan
from tests.support.paths import ROOT

NVFP4, DEMO = (ROOT / "models" / name for name in ("nibble-demo-nvfp4", "nibble-demo"))


def plan(*words: str, **environ: str) -> Plan:
    own = {"HEAD_IP": "127.0.0.1", "NIBBLE_NNODES": "2", "TENSOR_PARALLEL_SIZE": "2", **environ}
    return plan_for(read_wishes(["nibble-demo-nvfp4", "--max-model-len", "1024", *words], own))


def flags_of(*words: str, **environ: str) -> dict[str, Any]:
    return compared_flags(plan(*words, **environ).args)


def node(name: str, **facts: Any) -> dict[str, Any]:
    return {"name": name, "address": name, "facts": facts}


def told(*nodes: dict[str, Any], server: Mapping[str, Any] | None = None) -> list[str]:
    return [f"{one.node}: {one.what}" for one in settings_problems(nodes, server)]


# --- flags ---


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--port", "9000", "--host", "0.0.0.0"], {"NIBBLE_API_KEY": "hush-hush"}),
        (
            [
                "--served-model-name",
                "m",
                "--tool-call-parser",
                "hermes",
                "--enable-auto-tool-choice",
            ],
            {},
        ),
        ([], {"NIBBLE_KV_CACHE_BYTES": "33554432"}),
        (["--dtype", "auto"], {}),  # vLLM's default
        (["--ssl-certfile", "/c", "--ssl-keyfile", "/k"], {}),
        ([], {"NIBBLE_NODE_RANK": "1"}),
        (
            [],
            {
                "NIBBLE_MEMORY_RESERVE_GIB": "1",
                "NIBBLE_CONTROL_PORT": "9001",
                "NIBBLE_CANARY": "off",
            },
        ),
    ],
    ids=str,
)
def test_what_a_rank_may_have_of_its_own_is_not_compared(
    words: list[str], environ: dict[str, str]
) -> None:
    other = compared_flags(plan(*words, **environ).args)
    assert told(node("b", flags=other), node("a", flags=flags_of())) == []
    assert "hush-hush" not in json.dumps(other)


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (["--dtype", "float32"], {}, "b: --dtype is float32 (command line) and unset on a"),
        (["--max-model-len", "512"], {}, "b: --max-model-len is 512 (command line --max-model-len) and 1024 ("),  # noqa: E501
        (["--max-num-seqs", "8"], {}, "b: --max-num-seqs is 8 (command line --max-num-seqs) and 16 (target cpu) on a"),  # noqa: E501
        (["--tensor-parallel-size", "4"], {}, "b: --tensor-parallel-size is 4 (command line"),
        (["--kv-cache-dtype", "fp8"], {}, "b: --kv-cache-dtype is fp8 (command line"),
        (["--hf-overrides", '{"rope": {"factor": 2}}'], {}, "b: --hf-overrides rope.factor is 2 (command line) and unset"),  # noqa: E501
        ([], {"NIBBLE_NVFP4_ACTIVATIONS": "bf16"},
         "b: --additional-config nibble.nvfp4_activations is bf16 (environment NIBBLE_NVFP4_ACTIVATIONS) and unset on a"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_flag_that_differs_is_named_with_both_values_and_sources(
    words: list[str], environ: dict[str, str], said: str
) -> None:
    found = told(node("a", flags=flags_of()), node("b", flags=flags_of(*words, **environ)))
    assert any(one.startswith(said) for one in found), found


def test_every_flag_that_is_a_nodes_own_is_one_of_vllms() -> None:
    schema = load_schema()
    assert [flag for flag in OWN_FLAGS if schema.flag(flag) is None and flag != "--model"] == []


def test_with_ray_nodes_have_no_flags_to_compare() -> None:
    assert told(node("a"), node("b")) == []
    # A rank without a plan is none of this kind of cluster
    assert told(node("a"), node("b", flags=flags_of()))


# --- environment ---


def test_secrets_places_and_other_programs_variables_do_not_travel() -> None:
    environ = {
        "VLLM_API_KEY": "hush",
        "NIBBLE_API_KEY": "hush",
        "HF_TOKEN": "hush",
        "VLLM_S3_SECRET_ACCESS_KEY": "hush",
        "VLLM_CACHE_ROOT": "/x",
        "VLLM_HOST_IP": "10.0.0.2",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5",
        "NCCL_DEBUG": "INFO",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "TORCHINDUCTOR_CACHE_DIR": "/x",
        "PATH": "/bin",
        "HOME": "/root",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NCCL_SO_PATH": "/x",
        "NCCL_IB_GID_INDEX": "3",
        "VLLM_TUNED_CONFIG_FOLDER": "/x",
    }
    assert compared_environment(environ) == {}


def test_what_changes_numbers_or_the_way_between_ranks_is_compared() -> None:
    environ = {
        "VLLM_FLOAT32_MATMUL_PRECISION": "medium",
        "VLLM_PLUGINS": "nibble",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "LL",
        "TORCHDYNAMO_DISABLE": "1",
        "NVIDIA_TF32_OVERRIDE": "1",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "64",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert compared_environment(environ) == environ


def test_a_secret_within_a_value_is_taken_out() -> None:
    value = "https://user:password1@proxy"
    assert "password1" not in json.dumps(compared_environment({"NCCL_X": value}))


def test_a_variable_that_differs_is_named() -> None:
    one, other = node("a", environment={"VLLM_X": "1"}), node("b", environment={"VLLM_Y": "2"})
    assert told(one, other) == [
        "b: the variable VLLM_X is unset and 1 on a",
        "b: the variable VLLM_Y is 2 and unset on a",
    ]


def test_with_ray_the_servers_variables_reach_every_worker_but_do_not_replace_a_nodes_own() -> None:
    server = {"environment": {"VLLM_X": "1"}}
    assert told(node("a"), node("b", environment={"VLLM_X": "1"}), server=server) == []
    (found,) = told(node("a"), node("b", environment={"VLLM_X": "2"}), server=server)
    assert found == "b: the variable VLLM_X is 2 and 1 on a"


# --- code and checkpoint, by the handlers that every node has ---


@dataclass(frozen=True)
class Nodes(Caller):
    """Nodes with real handlers; `parts` replace the files of a part on a node, `folders` its
    model.
    """

    head: str = "a"
    token: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, Path] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def ask(
        self, address: str, path: str, body: Mapping[str, Any], timeout_s: float = 0.0
    ) -> dict[str, Any]:
        self.asked.append(path)
        if address in self.parts and "part" in body:
            return {"entries": self.parts[address]}
        asked = {"folders": [str(self.folders[address])]} if path == "/checkpoints" else body
        answer = node_handlers(Place("127.0.0.1", "lo", {}, Path("/tmp")))[path](asked)
        if path == "/checkpoints":
            _, summary_of_it = answer["checkpoints"].popitem()
            answer["checkpoints"]["model"] = summary_of_it
        return answer


def nodes(**code: str) -> list[dict[str, Any]]:
    return [node("a", code=build_parts()), node("b", code={**build_parts(), **code})]


@pytest.mark.parametrize("part", FILES)
def test_the_files_of_a_part_that_differs_are_named(part: str) -> None:
    changed = dict(part_files(part))
    name = next(iter(changed))
    changed[name] = "other"
    caller = Nodes(parts={"b": changed})
    (problem,) = compare_code(caller, nodes(**{part: "other"}))
    kind = "patch" if part == "patches" else "file"
    assert problem.node == "b" and f"differs from that of a: {kind} {name} has" in problem.what


def test_equal_code_is_no_further_question() -> None:
    caller = Nodes()
    assert compare_code(caller, nodes()) == [] and caller.asked == []


def test_with_ray_the_servers_own_code_has_to_be_that_of_the_nodes() -> None:
    changed = {**part_files("nibble"), "serve/drain.py": "other"}
    old = node("a", code={**build_parts(), "nibble": "old"})
    caller = Nodes(parts={"a": changed})
    (problem,) = compare_code(caller, [old], {"code": build_parts()})
    assert (
        problem.what
        == "nibble's code differs from that of the server: file serve/drain.py has other content"
    )
    assert compare_code(caller, nodes(), {"code": build_parts()}) == []


def test_a_compiler_of_another_version_is_named_with_both() -> None:
    (problem,) = compare_code(Nodes(), nodes(triton="3.9"))
    assert problem.what == "triton is 3.9 and absent on a"


def test_a_node_that_does_not_say_which_files_it_has_is_refused_all_the_same() -> None:
    class Old(Nodes):
        def ask(self, *given: Any, **more: Any) -> dict[str, Any]:
            raise AgentError(404, "unknown path")

    found = compare_code(Old(), [node("a", code=build_parts()), node("b")])
    assert "nibble's code differs from that of a" in [problem.what for problem in found]


def compared(first: Path, second: Path) -> list[str]:
    caller = Nodes(folders={"a": first, "b": second})
    return [one.what for one in compare_checkpoints(caller, nodes(), [], threading.Event())]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(NVFP4, tmp_path / "copy"))


def test_the_same_content_at_another_path_is_the_same_checkpoint(copy: Path) -> None:
    (copy / "README.md").write_text("another page")
    (copy / "nibble-canary.json").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"the same weights in another form")
    assert compared(NVFP4, copy) == []


def test_a_snapshot_of_another_commit_with_the_same_files_is_the_same(tmp_path: Path) -> None:
    folders = [shutil.copytree(NVFP4, tmp_path / (letter * 40)) for letter in "ab"]
    assert compared(*map(Path, folders)) == []
    assert summary(str(folders[0]))["revision"] == "a" * 40


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "hf_quant_config.json"]
)
def test_another_or_absent_file_of_configuration_or_tokenizer_is_named(
    copy: Path, file: str
) -> None:
    (copy / file).write_text((copy / file).read_text() + "\n")
    (found,) = compared(NVFP4, copy)
    assert found == f"the model {copy} is not {NVFP4} of a: {file} has other content"
    (copy / file).unlink()
    assert compared(NVFP4, copy)[0].endswith(f"of a: {file} is absent")


def test_other_values_under_the_same_headers_are_found(copy: Path) -> None:
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(1_500_000)
        file.write(b"\0\1\2\3")
    (found,) = compared(NVFP4, copy)
    assert found.endswith("values in model.safetensors has other content")


def test_samples_of_a_large_file_are_at_both_ends_and_between(tmp_path: Path) -> None:
    file, size = tmp_path / "model.bin", 40 << 20
    file.write_bytes(bytes(size))
    first = checkpoint_facts(str(tmp_path))
    for place in (0, size - 1, (size - 4096) * 20 // 63):
        with file.open("r+b") as handle:
            handle.seek(place)
            handle.write(b"\1")
        assert checkpoint_facts(str(tmp_path)) != first
        file.write_bytes(bytes(size))
    (tmp_path / "model.bin").write_bytes(bytes(size + 1))
    assert checkpoint_facts(str(tmp_path)) != first


def test_another_model_names_its_tensors(tmp_path: Path) -> None:
    (found,) = compared(NVFP4, DEMO)
    assert (
        "config.json has other content" in found
        and "tensor model.embed_tokens.weight in model.safetensors has BF16" in found
    )
    assert " more" in found


def test_a_folder_that_cannot_be_read_is_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"short")
    (found,) = compared(NVFP4, copy)
    assert found.startswith(f"the model {copy}: ") and "corrupt" in found


def test_a_plan_names_the_folders_of_model_and_draft() -> None:
    planned = plan()
    assert checkpoint_folders(planned) == {"model": str(NVFP4)}
    args = {
        **planned.args,
        "--speculative-config": Choice({"model": str(DEMO), "num_speculative_tokens": 2}, ""),
    }
    object.__setattr__(planned, "args", args)
    assert checkpoint_folders(planned) == {"model": str(NVFP4), "draft": str(DEMO)}
    assert "--speculative-config model" not in compared_flags(args)
