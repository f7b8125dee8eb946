"""What converting a GGUF file costs: time, bytes a second, and memory by the number of layers.

    python benchmarks/convert_gguf.py [--layers 2 6] [--type Q4_0] [--smollm2 FILE.gguf]
        [--turns 1] [--cold] [--out benchmarks/results/convert_gguf.json]

`nibble convert FILE --to nvfp4` in a separate process, on generated files with the layers of a 7B
Llama (hidden 4096, intermediate 11008, 32000 tokens) and random blocks. Memory is what the process
holds itself (RssAnon, read 20 times a second) and with the pages of the mapped file (ru_maxrss).
`cpu_s` is the process's time on all cores; on a machine with other load, seconds say little.

`copy_s` is what reading the source and then writing as many bytes as the result has takes: in turns
with the conversion, each after a sync, none synced at its end. `uncached_copy_s` is the same as the
conversion reads and writes, without leaving pages in Linux's cache. `--cold` drops the source from
the cache before each. `operators` is the arithmetic alone, on one thread, from memory to memory:
what it reads and writes a second of the thread's CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, WIDE, HEADS, VOCABULARY = 4096, 11008, 32, 32000
LAYER = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (WIDE, HIDDEN),
    "ffn_up": (WIDE, HIDDEN),
    "ffn_down": (HIDDEN, WIDE),
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
}


sys.path.insert(0, str(ROOT))
from nibble.checkpoint.convert.files import uncached  # noqa: E402


def write_model(path: Path, layers: int, kind_name: str) -> None:
    """A GGUF file of random values; every matrix repeats one row of blocks."""
    import numpy
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    kind = GGMLQuantizationType[kind_name]
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    shapes["output"] = (VOCABULARY, HIDDEN)
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in LAYER.items()}
    writer = GGUFWriter(path, "llama", use_temp_file=False)
    for key, value in {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDE,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    _add_vocabulary(writer)
    random = numpy.random.default_rng(1)
    written = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            written[name] = numpy.ones(shape, numpy.float32)
            writer.add_tensor(f"{name}.weight", written[name])
            continue
        rows = quantize(random.standard_normal((64, shape[1])).astype(numpy.float32) / 50, kind)
        written[name] = (rows, shape[0])
        bytes_shape = (shape[0], rows.shape[1])
        writer.add_tensor_info(
            f"{name}.weight", bytes_shape, rows.dtype, shape[0] * rows.shape[1], raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = writer.fout[0]
    file.write(bytes(-file.tell() % writer.data_alignment))
    for values in written.values():
        _write(writer, values)
    writer.close()


def _write(writer: Any, values: Any) -> None:
    """One tensor's bytes, as the library pads them; repeated rows are written one by one."""
    file = writer.fout[0]
    start = file.tell()
    if isinstance(values, tuple):
        rows, count = values
        for _ in range(count // len(rows)):
            rows.tofile(file)
    else:
        values.tofile(file)
    file.write(bytes(-(file.tell() - start) % writer.data_alignment))


def _add_vocabulary(writer: Any) -> None:
    from nibble.checkpoint.gguf.vocabulary import BYTE_LETTERS

    pairs = [one + other for one in BYTE_LETTERS for other in BYTE_LETTERS]
    tokens = [*BYTE_LETTERS, *pairs][:VOCABULARY]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{token[0]} {token[1]}" for token in tokens[256:]])
    writer.add_eos_token_id(0)


def in_turns(
    turns: int, source: Path, dest: Path, *words: str, cold: bool = False
) -> dict[str, Any]:
    """The fastest of several conversions, beside copies of the same bytes in turns with them."""
    found, copies, uncached_copies = [], [], []
    for _ in range(turns):
        shutil.rmtree(dest, ignore_errors=True)
        settle(source, cold)
        found.append(convert(source, dest, *words))
        settle(source, cold)
        copies.append(copy(source, dest, plain))
        settle(source, cold)
        uncached_copies.append(copy(source, dest, uncached))
    shutil.rmtree(dest)
    best = min(found, key=lambda one: one["seconds"])
    return {
        **best,
        **least("copy", copies),
        **least("uncached_copy", uncached_copies),
        "all_seconds": [one["seconds"] for one in found],
        "all_cpu_s": [one["cpu_s"] for one in found],
        "all_copy_s": [seconds for seconds, _ in copies],
        "all_copy_cpu_s": [cpu for _, cpu in copies],
        "all_uncached_copy_s": [seconds for seconds, _ in uncached_copies],
    }


def least(name: str, copies: list[tuple[float, float]]) -> dict[str, float]:
    seconds, cpu = min(copies)
    return {f"{name}_s": seconds, f"{name}_cpu_s": cpu}


def settle(source: Path, cold: bool) -> None:
    os.sync()
    if cold:
        with source.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain(transfer: Any, file: Any, views: Any, at: int) -> int:
    return transfer(file.fileno(), views, at)


def copy(source: Path, dest: Path, through: Any) -> tuple[float, float]:
    """Seconds, and of CPU time, to read the source and to write as many bytes as it became."""
    size, target = sum(path.stat().st_size for path in dest.rglob("*")), dest / "copy"
    piece = memoryview(bytearray(8 << 20))
    began, cpu, at = time.monotonic(), time.process_time(), 0
    with source.open("rb", 0) as file:
        while count := through(os.preadv, file, [piece], at):
            at += count
    with target.open("wb", 0) as file:
        at = 0
        while at < size:
            at += through(os.pwritev, file, [piece[: min(size - at, len(piece))]], at)
    spent = round(time.monotonic() - began, 1), round(time.process_time() - cpu, 1)
    target.unlink()
    return spent


def operators(kind_name: str) -> dict[str, Any]:
    """The rate of what a matrix goes through, for plain rounding."""
    import numpy
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize
    from nibble_kernels.gguf_blocks import gguf_largest_magnitude, gguf_to_nvfp4

    torch.set_num_threads(1)
    random = numpy.random.default_rng(1)
    rows = quantize(
        random.standard_normal((64, HIDDEN)).astype(numpy.float32) / 50,
        GGMLQuantizationType[kind_name],
    )
    blocks = torch.from_numpy(numpy.tile(rows, (HIDDEN // 64, 1)).view(numpy.uint8).reshape(-1))
    packed = torch.zeros(HIDDEN, HIDDEN // 2, dtype=torch.uint8)
    scales = torch.zeros(HIDDEN, HIDDEN // 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    moved = blocks.numel() + packed.numel() + scales.numel()
    spent = []
    for _ in range(20):
        began = time.thread_time()
        largest = gguf_largest_magnitude(blocks, kind_name)
        gguf_to_nvfp4(blocks, kind_name, largest, packed, scales)
        spent.append(time.thread_time() - began)
    return {
        "type": kind_name,
        "mb_read_and_written_a_second_of_a_core": round(moved / 1e6 / min(spent)),
    }


def convert(source: Path, dest: Path, *words: str) -> dict[str, Any]:
    """Time and memory of one conversion."""
    command = [sys.executable, "-m", "nibble", "convert", str(source), str(dest), "--to", "nvfp4"]
    began = time.monotonic()
    process = subprocess.Popen([*command, *words], cwd=ROOT)
    anonymous_kib = 0
    while (done := _wait(process.pid)) is None:
        anonymous_kib = max(anonymous_kib, _anonymous_kib(process.pid))
        time.sleep(0.05)
    status, usage = done
    if status:
        raise SystemExit(f"nibble convert ended with {status}")
    seconds = time.monotonic() - began
    written = sum(path.stat().st_size for path in dest.rglob("*") if path.is_file())
    read = source.stat().st_size
    return {
        "read_mb": round(read / 1e6),
        "written_mb": round(written / 1e6),
        "seconds": round(seconds, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "mb_read_and_written_a_second": round((read + written) / 1e6 / seconds, 1),
        "mb_a_cpu_second": round((read + written) / 1e6 / (usage.ru_utime + usage.ru_stime), 1),
        "anonymous_gb": round(anonymous_kib * 1024 / 1e9, 2),
        "with_mapped_file_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
    }


def _wait(pid: int) -> tuple[int, Any] | None:
    ended, status, usage = os.wait4(pid, os.WNOHANG)
    return (status, usage) if ended else None


def _anonymous_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def main() -> int:
    from machine import machine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--smollm2", type=Path)
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "convert_gguf.json"
    )
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "command": f"python benchmarks/convert_gguf.py --type {asked.type} --layers "
        + " ".join(map(str, asked.layers)) + f" --turns {asked.turns}"
        + (" --cold" if asked.cold else "") + (" --smollm2 FILE" if asked.smollm2 else ""),
        "machine": machine(),
        "operators": operators(asked.type),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=asked.scratch) as scratch:
        if asked.smollm2:
            words = ("--four-over-six",)
            result["smollm2"] = in_turns(
                asked.turns, asked.smollm2, Path(scratch) / "smollm2", *words
            )
        for layers in asked.layers:
            source = Path(scratch) / f"{layers}.gguf"
            write_model(source, layers, asked.type)
            result[f"{layers} layers of 7B"] = in_turns(
                asked.turns, source, Path(scratch) / f"{layers}", cold=asked.cold
            )
            source.unlink()
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in result if key not in ("command", "machine")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
