"""Recognising start-up phases in vLLM's log.

data/vllm-0.32-{cpu,h200}-*.log come from real runs; data/vllm-0.32-gpu-formats.log holds lines in
the formats of the source, with numbers made up, for steps that none of these runs took.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from nibble.engine.log import PHASES, DrainReader, ErrorReader, PhaseReader, PhaseUpdate, message

DATA = Path(__file__).parent / "data"
KV_CACHE_SIZE = (
    "INFO 11-21 06:24:50 [kv_cache_utils.py:2327] GPU KV cache size: 67,164,896 tokens, Maximum"
)


def read(name: str) -> tuple[PhaseReader, list[PhaseUpdate]]:
    reader = PhaseReader()
    lines = (DATA / name).read_text().splitlines()
    return reader, [update for line in lines if (update := reader.feed(line))]


def order(updates: list[PhaseUpdate]) -> list[str]:
    return [phase for phase, _ in groupby(update.phase for update in updates)]


def test_a_real_eager_cpu_start_goes_through_load_and_warm_up() -> None:
    reader, updates = read("vllm-0.32-cpu-eager.log")
    assert order(updates) == ["load", "warm-up"]
    assert reader.http_is_up
    assert reader.tasks == ("generate",)


def test_a_real_compiled_cpu_start_shows_compilation_between_load_and_warm_up() -> None:
    assert order(read("vllm-0.32-cpu-compiled.log")[1]) == ["load", "compile", "warm-up"]


def test_a_gpu_start_shows_every_phase_once_and_in_order() -> None:
    _, updates = read("vllm-0.32-gpu-formats.log")
    assert order(updates) == ["download", "load", "compile", "autotune", "capture", "warm-up"]
    assert order(updates) == [
        phase for phase in PHASES if phase not in ("start", "canary", "ready")
    ]


@pytest.mark.parametrize("name", ["vllm-0.32-h200-compiled.log", "vllm-0.32-h200-nvfp4.log"])
def test_a_real_first_start_on_an_h200_shows_its_phases_in_order(name: str) -> None:
    reader, updates = read(name)
    assert order(updates) == ["load", "compile", "autotune", "capture", "warm-up"]
    assert reader.http_is_up
    assert reader.tasks == ("generate",)
    assert reader.facts["kv_cache_gib"] == pytest.approx(128.1, abs=0.1)
    # Of the real capture; the one that measures took 0.09 and 0.10
    assert reader.facts["graphs_gib"] < 0.08


def test_the_minute_in_which_flashinfer_compiles_is_told_as_such() -> None:
    _, updates = read("vllm-0.32-h200-compiled.log")
    at = [update.detail for update in updates].index("Building JIT module sampling")
    assert updates[at].phase == "autotune"
    assert (updates[at + 1].phase, updates[at + 1].progress) == ("capture", 0.0)


def test_a_kernel_compiled_before_the_kv_cache_has_its_size_stays_in_the_phase_that_needed_it() -> (
    None
):
    reader = PhaseReader()
    reader.feed(
        "(EngineCore pid=1) INFO 11-21 06:24:39 [monitor.py:40] [backbone] Starting torch.compile"
    )
    built = (
        "2026-11-21 06:24:52,286 - INFO - core.py:564 - flashinfer.jit: Building JIT module fp4;"
        " this can take"
    )
    assert reader.feed(built) == PhaseUpdate("compile", None, "Building JIT module fp4")


@pytest.mark.parametrize(
    ("line", "phase", "progress"),
    [
        (
            (
                "\rLoading safetensors checkpoint shards:  62% Completed | 5/8 [00:01<00:00, "
                " 7.06it/s]"
            ),
            "load",
            0.62,
        ),
        ("Loading safetensors checkpoint shards (eager):  50% Completed | 1/2 [", "load", 0.5),
        ("Loading pt checkpoint shards: 100% Completed | 2/2 [", "load", 1.0),
        ("Loading safetensors using InstantTensor loader:  40% Completed | 2/5 [", "load", 0.4),
        ("Loading safetensors using Runai Model Streamer:   7% Completed | 1/14 [", "load", 0.07),
        ("Fetching 12 files:  25%|##5       | 3/12 [00:00<?, ?it/s]", "download", 0.25),
        ("Capturing CUDA graphs (decode, FULL):  80%|########  | 28/35 [", "capture", 0.8),
        ("Capturing prefill CUDA graphs (FULL):  10%|#         | 1/10 [", "capture", 0.1),
    ],
)
def test_percentages_of_progress_bars_become_progress(
    line: str, phase: str, progress: float
) -> None:
    reader = PhaseReader()
    if phase == "capture":
        reader.feed(KV_CACHE_SIZE)
    update = reader.feed(line)
    assert update is not None
    assert (update.phase, update.progress) == (phase, progress)


def test_graphs_captured_only_to_measure_their_memory_are_not_the_capture_phase() -> None:
    reader = PhaseReader()
    assert reader.feed("Capturing CUDA graphs (FULL):  50%|#####     | 1/2 [") is None
    assert reader.feed("Graph capturing finished in 1 secs, took 0.09 GiB") is None
    reader.feed(KV_CACHE_SIZE)
    update = reader.feed("Capturing CUDA graphs (FULL):  50%|#####     | 1/2 [")
    assert update is not None
    assert update.phase == "capture"


def test_a_phase_that_is_over_does_not_come_back() -> None:
    reader = PhaseReader()
    reader.feed(
        "INFO 11-21 06:00:40 [backends.py:398] Compiling a graph for compile range (1, 8192) takes"
        " 9.50 s"
    )
    assert reader.feed("Loading safetensors checkpoint shards: 100% Completed | 4/4 [") is None
    assert reader.phase == "compile"


def test_numbers_worth_showing_are_collected() -> None:
    reader, _ = read("vllm-0.32-gpu-formats.log")
    assert reader.facts == {
        "weights_gib": 5.83,
        "kv_cache_gib": 100.25,
        "kv_cache_tokens": 730112,
        "kv_cache_max_concurrency": 22.28,
        "graphs_gib": 0.75,
        "engine_init_seconds": 50.1,
    }
    cpu, _ = read("vllm-0.32-cpu-eager.log")
    assert cpu.facts["checkpoint_gib"] == 0.16
    assert cpu.facts["kv_cache_tokens"] == 58240


def test_colours_and_process_prefixes_do_not_hide_a_phase() -> None:
    line = (
        "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO 11-21 06:00:10 [x.py:5039] Starting to load"
        " model m..."
    )
    assert message(line) == "Starting to load model m..."
    update = PhaseReader().feed(line)
    assert update is not None
    assert update.phase == "load"


def test_an_embedding_model_tells_that_it_does_not_generate() -> None:
    reader = PhaseReader()
    reader.feed(
        "(APIServer pid=2) INFO 11-21 06:01:13 [entry.py:136] Supported tasks: ['embed',"
        " 'token_embed']"
    )
    assert reader.tasks == ("embed", "token_embed")


def drain(name: str) -> DrainReader:
    reader = DrainReader()
    for line in (DATA / name).read_text().splitlines():
        reader.feed(line)
    return reader


def test_a_real_drain_that_finished_its_request_left_none_unfinished() -> None:
    reader = drain("vllm-0.32-cpu-eager.log")
    assert (reader.cut, reader.gave_up, reader.http_is_down) == (0, False, True)


def test_a_real_drain_that_ran_out_of_time_left_one_request_unfinished() -> None:
    reader = drain("vllm-0.32-cpu-compiled.log")
    assert (reader.cut, reader.gave_up) == (1, True)


def test_requests_aborted_at_once_count_as_unfinished() -> None:
    reader = DrainReader()
    prefix = "(EngineCore pid=9) INFO 11-21 06:02:00 [core.py:1644] "
    reader.feed(f"{prefix}[shutdown] EngineCore: aborting in-flight requests count=3")
    reader.feed(
        f"{prefix}[shutdown] EngineCore: request processing complete; starting resource teardown"
    )
    assert reader.cut == 3


def test_each_engine_of_several_has_to_finish() -> None:
    reader = DrainReader()
    for rank in (0, 1):
        prefix = f"(EngineCore_DP{rank} pid={rank + 50}) INFO 11-21 06:02:00 [core.py:1655] "
        reader.feed(
            f"{prefix}[shutdown] EngineCore: draining in-flight requests count=2 timeout=30s"
        )
    done = "[shutdown] EngineCore: request processing complete; starting resource teardown"
    reader.feed(f"(EngineCore_DP0 pid=50) INFO 11-21 06:02:05 [core.py:1666] {done}")
    assert reader.cut == 2


@pytest.mark.parametrize(
    "text",
    [
        "[shutdown] EngineCore: draining in-flight requests count=5 timeout=30s",
        "[shutdown] Process manager: force killing remaining processes count=1",
        "INFO:     Application shutdown complete.",
    ],
)
def test_what_users_write_into_logged_requests_is_not_taken_for_a_drain(text: str) -> None:
    reader = DrainReader()
    reader.feed(f"(APIServer pid=2) INFO 11-21 06:02:00 [logger.py:60] {text}")
    assert (reader.cut, reader.gave_up, reader.http_is_down) == (0, False, False)


def test_the_cause_of_death_is_the_error_and_not_its_consequence() -> None:
    reader = ErrorReader()
    for line in (
        "(EngineCore pid=7) ERROR 11-21 06:00:10 [core.py:1510] ValueError: no kernel for NVFP4",
        "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above.",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    ):
        reader.feed(line)
    assert reader.cause == "ValueError: no kernel for NVFP4"
