"""What the supervisor makes of the workers' reports, before anything is asked of the server."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.canary import verification as proof
from nibble.engine.api import Api
from nibble.errors import ExitCode, NibbleError
from tests.support.canary.worker_reports import RAN, plan


def make(
    folder: Path,
    *reports: dict[str, Any],
    strict: str = "strict",
    elsewhere: dict[str, list[dict[str, Any]]] | None = None,
    **args: Any,
) -> tuple[proof.Proof, list[str]]:
    planned = plan(**args)
    planned.topology.ranks = int(args.get("tensor_parallel_size", 1))
    planned.settings = SimpleNamespace(debug=False, kernel_assertion=strict, canary="off")
    blank = {"rank": 0, "ran": None, "checks": [], "problem": ""}
    others = {
        node: [blank | report for report in found] for node, found in (elsewhere or {}).items()
    }
    found = proof.Proof(planned, folder / "proof", Api("127.0.0.1", 9, ""), lambda: others)
    for number, report in enumerate(reports):
        (folder / "proof" / f"worker-{number}.json").write_text(
            json.dumps(blank | {"rank": number} | report)
        )
    return found, []


def run(made: tuple[proof.Proof, list[str]]) -> tuple[dict[str, Any], list[str]]:
    made[0].run(("m",), True, made[1].append)
    return made[0].to_json()["assertion"], made[1]


def test_reports_as_planned_pass(tmp_path: Path) -> None:
    assertion, said = run(make(tmp_path, {"ran": RAN}, {"ran": RAN}))
    assert (assertion["verdict"], said) == ("passed", [])


def test_an_unexpected_kernel_ends_the_start_or_is_a_warning(tmp_path: Path) -> None:
    wrong = {"ran": RAN | {"sampler": "native"}}
    made = make(tmp_path, {"ran": RAN}, wrong)
    with pytest.raises(NibbleError) as raised:
        run(made)
    assert raised.value.code == ExitCode.CANARY
    assert made[0].to_json()["assertion"]["verdict"] == "failed"
    (tmp_path / "warn").mkdir()
    assertion, said = run(make(tmp_path / "warn", wrong, strict="warn"))
    assert assertion["deviations"] == ["sampler: native ran, expected flashinfer (target hopper)"]
    assert said[0].startswith("warning: the kernels differ from the plan: sampler: native")


def test_plain_torch_ends_a_start_on_a_gpu_and_is_one_line_on_the_cpu(tmp_path: Path) -> None:
    plain = {
        "ran": (
            RAN
            | {
                "linear": {"nvfp4: NibbleNvFp4LinearKernel": 16},
                "operators": {"cuda": "not compiled"},
            }
        )
    }
    with pytest.raises(NibbleError, match=r"nibble's kernels: plain torch code \(not compiled\)"):
        run(make(tmp_path, plain))
    (tmp_path / "cpu").mkdir()
    linear = {"nvfp4: CpuNvFp4LinearKernel": 16}
    plain["ran"] |= {
        "device": "cpu",
        "linear": linear,
        "moe": {},
        "operators": {"cpu": "not compiled"},
    }
    plain["ran"] |= {
        "attention": {"CPU_ATTN": 4},
        "cudagraph_mode": "NONE",
        "sampler": "forward_cpu",
    }
    assertion, said = run(make(tmp_path / "cpu", plain, plain, target="cpu"))
    assert assertion["verdict"] == "passed"
    assert len(said) == 1 and said[0].startswith(
        "warning: nibble's kernels are plain torch code (not compiled), much slower"
    )


def test_silence_of_an_installed_plugin_ends_the_start_and_that_of_none_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installed in (True, False):
        folder = tmp_path / str(installed)
        folder.mkdir()
        monkeypatch.setattr(proof, "has_plugin", lambda name, installed=installed: installed)
        made = make(folder)
        if installed:
            with pytest.raises(NibbleError, match="no worker reported its kernels"):
                run(made)
        else:
            assert "no worker reported its kernels" in run(made)[1][0]


def test_a_worker_of_several_that_tells_nothing_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "has_plugin", lambda name: True)
    with pytest.raises(NibbleError, match="only 1 of 2 workers reported its kernels"):
        run(make(tmp_path, {"ran": RAN}, tensor_parallel_size=2))
    (tmp_path / "other").mkdir()
    made = make(tmp_path / "other", {"ran": RAN}, tensor_parallel_size=2, data_parallel_size=2)
    assert run(made)[0]["verdict"] == "passed"  # who places these is vLLM


def test_workers_on_other_nodes_are_held_against_the_plan_too_and_their_node_is_named(
    tmp_path: Path,
) -> None:
    wrong = {"ran": RAN | {"sampler": "native"}}
    made = make(tmp_path, {"ran": RAN}, elsewhere={"b (rank 1)": [wrong]}, tensor_parallel_size=2)
    with pytest.raises(
        NibbleError, match=r"^node b \(rank 1\): the kernels differ from the plan: sampler"
    ) as raised:
        run(made)
    assert raised.value.code == ExitCode.CANARY
    told = made[0].to_json()["assertion"]
    assert [ran["node"] for ran in told["ran"]] == ["", "b (rank 1)"]
    assert told["deviations"] == [
        "node b (rank 1): sampler: native ran, expected flashinfer (target hopper)"
    ]


def test_a_node_whose_workers_tell_nothing_ends_the_start_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "has_plugin", lambda name: True)
    made = make(tmp_path, {"ran": RAN}, elsewhere={"b (rank 1)": []}, tensor_parallel_size=2)
    with pytest.raises(NibbleError, match=r"no worker on node b \(rank 1\) reported its kernels"):
        run(made)
    (tmp_path / "both").mkdir()
    made = make(
        tmp_path / "both", {"ran": RAN}, elsewhere={"b": [{"ran": RAN}]}, tensor_parallel_size=2
    )
    assert run(made)[0]["verdict"] == "passed"
    (
        tmp_path / "replicas"
    ).mkdir()  # two on each node: as many reports as nodes, and one node silent
    made = make(
        tmp_path / "replicas", {"ran": RAN}, {"ran": RAN}, elsewhere={"b": []}, data_parallel_size=4
    )
    with pytest.raises(NibbleError, match="no worker on node b reported"):
        run(made)


def test_a_tool_call_is_asked_for_where_vllm_would_answer_one() -> None:
    assert proof.calls_tools(plan(tool_call_parser="hermes", enable_auto_tool_choice=True))
    assert not proof.calls_tools(plan(tool_call_parser="hermes"))
    assert not proof.calls_tools(plan(tool_call_parser="hermes", enable_auto_tool_choice=False))


def test_a_model_the_plugin_does_not_know_is_told_and_ends_nothing(tmp_path: Path) -> None:
    assertion, said = run(make(tmp_path, {"problem": "AttributeError: no such thing"}))
    assert assertion["verdict"] == "unknown"
    assert said == ["warning: a worker could not report all kernels: AttributeError: no such thing"]


@pytest.mark.parametrize(
    ("model", "is_local", "where"),
    [
        ("acme/Bird-7B-NVFP4", False, "--recipe acme/Bird-7B-NVFP4`"),
        ("/models/bird", True, "--out /models/bird/nibble-canary.json`"),
    ],
)
def test_a_model_without_recorded_answers_is_told_how_to_record_them(
    model: str, is_local: bool, where: str
) -> None:
    planned = SimpleNamespace(
        settings=SimpleNamespace(model=model),
        model=model,
        checkpoint=SimpleNamespace(is_local=is_local),
    )
    said = proof.how_to_record(planned, "http://127.0.0.1:8000")  # type: ignore[arg-type]
    assert (
        "no answers are recorded" in said
        and "--url http://127.0.0.1:8000" in said
        and where in said
    )


def test_answers_beside_a_recipe_come_before_those_in_the_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIBBLE_ROOT", str(tmp_path))
    found = proof.reference_files("acme/Bird-3.5-NVFP4", Path("/m"))
    assert [str(path) for path in found] == [
        f"{tmp_path}/recipes/acme/Bird-3.5-NVFP4.nibble-canary.json",
        f"{tmp_path}/recipes/acme/Bird-3.5-NVFP4.nibble-canary.weight-only.json",
        "/m/nibble-canary.json",
        "/m/nibble-canary.weight-only.json",
    ]


def test_workers_that_fit_the_plan_and_not_each_other_end_the_start_and_are_named(
    tmp_path: Path,
) -> None:
    """A BF16 model beside an NVFP4 one: the plan expects no kernel of either."""
    plain = {"ran": RAN | {"linear": {}, "moe": {}, "max_model_len": 1024}}
    quantized = {"ran": RAN | {"max_model_len": 1024}, "rank": 1}
    made = make(tmp_path, plain, elsewhere={"b (rank 1)": [quantized]}, tensor_parallel_size=2)
    words = (
        r"^node b \(rank 1\): rank 1 differs from the other ranks: linear layers: nvfp4:"
        r" Humming\w+ in 144 layers"
    )
    with pytest.raises(NibbleError, match=words) as raised:
        run(made)
    assert raised.value.code == ExitCode.CANARY and raised.value.expected == "as rank 0: none"
    told = made[0].to_json()["assertion"]
    assert told["verdict"] == "failed" and len(told["deviations"]) == 2
