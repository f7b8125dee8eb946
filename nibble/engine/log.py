"""What the engine does, read from vLLM's log line by line. Pure: no clocks and no processes.

The formats are those of vLLM 0.32.0; each rule names the file that prints the line. A start only
moves forward: several workers report the same step at slightly different times, and a display that
jumps back would confuse the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Phase = Literal[
    "start", "download", "load", "compile", "autotune", "capture", "warm-up", "canary", "ready"
]
PHASES: tuple[Phase, ...] = (
    "start", "download", "load", "compile", "autotune", "capture", "warm-up", "canary", "ready",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PhaseUpdate:
    """The engine is in `phase`; `progress` is its completed share (0 to 1, None: unknown); `detail`
    is for people.
    """

    phase: Phase
    progress: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Rule:
    phase: Phase
    pattern: re.Pattern[str]
    progress: float | None = None  # where the line itself carries no percentage


def _rule(phase: Phase, pattern: str, progress: float | None = None) -> _Rule:
    return _Rule(phase, re.compile(pattern), progress)


# A named group `percent` becomes the progress, `detail` the text shown beside it.
_RULES: tuple[_Rule, ...] = (
    # huggingface_hub 2.x: _snapshot_download.py, file_download.py, utils/_xet_progress_reporting.py
    _rule(
        "download",
        r"^(?:Downloading bytes|Reconstructing|Fetching \d+ files)[^:]*: +(?P<percent>\d+)%",
    ),
    _rule(
        "download", r"^(?P<detail>\S+\.(?:safetensors|bin|gguf|json|pt)):[a-z ]* (?P<percent>\d+)%"
    ),
    # model_executor/model_loader/weight_utils.py:532
    _rule("download", r"^(?P<detail>Time spent downloading weights) ", 1.0),
    # v1/worker/{gpu,cpu}_model_runner.py, v1/worker/gpu/model_runner.py:392
    _rule("load", r"^(?:Starting to load model |Loading model from scratch|Loading drafter model)"),
    # weight_utils.py: the safetensors, pt, np_cache, InstantTensor, Runai and multi-thread
    # iterators
    _rule(
        "load",
        r"^(?:Multi-thread )?[Ll]oading (?:\S+ )*(?:shards|[Ll]oader|Streamer)\b[^:%]*:"
        r" +(?P<percent>\d+)%",
    ),
    _rule("load", r"^Loading weights took (?P<detail>[\d.]+ s)", 1.0),
    _rule("load", r"^Model loading took (?P<detail>[\d.]+ GiB)", 1.0),
    # compilation/monitor.py, backends.py, decorators.py; v1/worker/cpu_model_runner.py:87;
    # gpu_worker.py:939
    _rule(
        "compile",
        r"^(?:\[[^\]]*\] ?)?(?P<detail>Starting torch\.compile|Dynamo bytecode transform)",
    ),
    _rule(
        "compile",
        r"^(?:\[[^\]]*\] ?)?(?P<detail>Compiling a graph for compile range \S+(?: \S+\))?)",
    ),
    _rule(
        "compile",
        r"^(?:\[[^\]]*\] ?)?(?P<detail>Directly load (?:the compiled graph|AOT compilation))",
    ),
    _rule("compile", r"^(?:\[[^\]]*\] ?)?(?P<detail>Compiling model again)"),
    _rule("compile", r"^Warming up model for the (?P<detail>compilation)"),
    _rule("compile", r"^Compile and warming up model for (?P<detail>size \d+)"),
    _rule("compile", r"^(?P<detail>Profiling CUDA graph memory)"),
    # model_executor/warmup/{kernel_warmup,jit_warmup,deep_gemm_warmup,cutedsl_warmup}.py
    _rule("autotune", r"^Running (?P<detail>FlashInfer autotune with \d+ tokens)"),
    _rule(
        "autotune",
        r"^(?P<detail>JIT kernel warmup|DeepGEMM warmup|Compiling CuTeDSL kernels)[^:]*:"
        r" +(?P<percent>\d+)%",
    ),
    _rule("autotune", r"^(?P<detail>JIT kernel warmup) starting"),
    _rule("autotune", r"^Warming up (?P<detail>.*(?:kernels|FlashInfer attention))\b"),
    # v1/worker/gpu_model_runner.py:6654, gpu/cudagraph_utils.py:456, gpu/spec_decode/
    _rule(
        "capture", r"^(?P<detail>Capturing [\w -]*CUDA graphs(?: \([^)]*\))?): +(?P<percent>\d+)%"
    ),
    _rule("capture", r"^(?P<detail>Capturing model for [\w -]*speculator)"),
    _rule("capture", r"^Graph capturing finished in \d+ secs, took (?P<detail>[\d.]+ GiB)", 1.0),
    # v1/engine/core.py:402
    _rule("warm-up", r"^(?P<detail>init engine) \([^)]*\) took [\d.]+ s"),
    # uvicorn, lifespan/on.py
    _rule("warm-up", r"^INFO: +(?P<detail>Application startup complete)"),
)

# Numbers worth showing: fact name, pattern with the groups' own names, conversion.
_FACTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("weights_gib", re.compile(r"^Model loading took ([\d.]+) GiB")),
    ("checkpoint_gib", re.compile(r"Checkpoint size: ([\d.]+) GiB")),
    ("kv_cache_gib", re.compile(r"^(?:Available KV cache memory: |Explicitly set \()([\d.]+)")),
    ("kv_cache_tokens", re.compile(r"KV cache size: ([\d,]+) tokens")),
    (
        "kv_cache_max_concurrency",
        re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"),
    ),
    ("graphs_gib", re.compile(r"^Graph capturing finished in \d+ secs, took ([\d.]+) GiB")),
    ("engine_init_seconds", re.compile(r"^init engine \([^)]*\) took ([\d.]+) s")),
)
# Both model runners first capture graphs only to measure their memory; the V2 runner, which an H200
# ran, does not log it. A capture before the KV cache has its size is that measurement. Some models
# have no KV cache, hence the other patterns.
_CACHE_IS_SIZED = re.compile(
    r"KV cache size: [\d,]+ tokens|^JIT kernel warmup starting|^Running FlashInfer autotune"
)
# flashinfer/jit/core.py:565, through FlashInfer's own logger; a minute on an H200 with empty
# caches.
_JIT_BUILD = re.compile(
    r"^\d{4}-\d\d-\d\d .* - flashinfer\.jit: (?P<detail>Building JIT module [^;\s]+)"
)

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# vllm/logger.py _FORMAT, with decorate_logs' "(EngineCore pid=7) " in front where it is on.
_PREFIX = re.compile(
    r"^(?:\((?P<process>\S+) pid=(?P<pid>\d+)\) ?)?"
    r"(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[(?P<source>[^\]]+)\] )?"
)
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b: \S")
# Lines that only say that something else went wrong (v1/engine/utils.py, v1/engine/exceptions.py).
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|EngineDeadError|KeyboardInterrupt|CancelledError"
)

# v1/executor/multiproc_executor.py:315
_WORKER_DIED = re.compile(r"^Worker proc \S+ died unexpectedly \(exit code: (-?\d+)\)")


@dataclass
class PhaseReader:
    """Reads the phases of a start from the log.

    `facts` collects numbers by name (GiB, tokens, seconds), `tasks` the tasks of the model.
    """

    phase: Phase = "start"
    facts: dict[str, float] = field(default_factory=dict)
    tasks: tuple[str, ...] | None = None
    http_is_up: bool = False
    _cache_is_sized: bool = False

    def feed(self, line: str) -> PhaseUpdate | None:
        """Take one line (or one piece ended by a carriage return); returns the update in it, or
        None.
        """
        text = message(line)
        self._note_facts(text)
        self._cache_is_sized = self._cache_is_sized or bool(_CACHE_IS_SIZED.search(text))
        if match := _JIT_BUILD.search(text):
            return self._building(match["detail"])
        for rule in _RULES:
            if match := rule.pattern.search(text):
                return self._advance(rule, match)
        return None

    def _note_facts(self, text: str) -> None:
        for name, pattern in _FACTS:
            if match := pattern.search(text):
                self.facts[name] = float(match[1].replace(",", ""))
        # entrypoints/launchers/api_server/entry.py:136
        if text.startswith("Supported tasks: "):
            self.tasks = tuple(re.findall(r"'([\w-]+)'", text))
        if re.match(r"INFO: +Application startup complete", text):
            self.http_is_up = True

    def _building(self, detail: str) -> PhaseUpdate:
        """The update for a compilation of kernels. Each is compiled on its first use; that is a
        warm-up only once the KV cache has its size.
        """
        if self._cache_is_sized and PHASES.index(self.phase) < PHASES.index("autotune"):
            self.phase = "autotune"
        return PhaseUpdate(self.phase, None, detail)

    def _advance(self, rule: _Rule, match: re.Match[str]) -> PhaseUpdate | None:
        if rule.phase == "capture" and not self._cache_is_sized:
            return None
        if PHASES.index(rule.phase) < PHASES.index(self.phase):
            return None
        self.phase = rule.phase
        groups = match.groupdict()
        percent = groups.get("percent")
        progress = int(percent) / 100 if percent else rule.progress
        return PhaseUpdate(rule.phase, progress, groups.get("detail") or "")


@dataclass
class DrainReader:
    """Whether vLLM's drain ended with every request answered (v1/engine/core.py, _handle_shutdown).

    Each engine process logs its number of requests when told to stop, and the end of its drain. One
    that was killed at --shutdown-timeout never logs the latter.
    """

    gave_up: bool = False
    http_is_down: bool = False
    _running: dict[str, int] = field(default_factory=dict)
    _aborted: int = 0

    _START: ClassVar = re.compile(
        r"^\[shutdown\] EngineCore: (draining|aborting) in-flight requests count=(\d+)"
    )
    _DONE: ClassVar = "[shutdown] EngineCore: request processing complete"

    def feed(self, line: str) -> None:
        """Take one line."""
        line = _ANSI.sub("", line)
        prefix = _PREFIX.match(line)
        process, source = (prefix["process"] or "", prefix["source"] or "") if prefix else ("", "")
        text = line[prefix.end() :] if prefix else line
        # Logged requests hold what users write; they come from the API process and another source
        # file.
        if process.startswith("EngineCore"):
            self._engine_says(text, f"{process} {prefix['pid'] if prefix else ''}")
        elif (
            not process
            and text.startswith("INFO:")
            and text.endswith("Application shutdown complete.")
        ):
            self.http_is_down = True  # uvicorn, lifespan/on.py
        elif source.startswith("utils.py") and text.startswith(
            "[shutdown] Process manager: force killing"
        ):
            self.gave_up = True  # v1/utils.py:648

    def _engine_says(self, text: str, engine: str) -> None:
        if match := self._START.match(text):
            if match[1] == "aborting":
                self._aborted += int(match[2])
            else:
                self._running[engine] = int(match[2])
        elif text.startswith(self._DONE):
            self._running.pop(engine, None)

    @property
    def cut(self) -> int:
        """The requests that an engine had when it was ended before they finished, as far as it
        logged them.
        """
        return self._aborted + sum(self._running.values())


@dataclass
class ErrorReader:
    """Remembers why the engine ended: the last exception that is not a consequence of another."""

    cause: str = ""
    exit_code: int | None = None  # of the worker process that ended first

    def feed(self, line: str) -> None:
        text = message(line)
        if self.exit_code is None and (match := _WORKER_DIED.search(text)):
            self.exit_code = int(match[1])
        if _ERROR.match(text) and not _CONSEQUENCE.search(text):
            self.cause = text.strip()[:300]


def message(line: str) -> str:
    """A log line without colours, process, level, time and source file."""
    text = _ANSI.sub("", line).strip("\r\n ")
    match = _PREFIX.match(text)
    return text[match.end() :] if match else text
