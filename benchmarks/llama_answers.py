"""llama.cpp for cpu_llama.py, in the Python that has llama-cpp-python.

    python benchmarks/llama_answers.py FILE.gguf THREADS

Prints "ready" and what computes: llama.cpp's instructions, and the buffers of its weights (AMX,
CPU_REPACK, …). Then answers each line of stdin ("decode 4", "prompt 256") with tokens per second.
"""

from __future__ import annotations

import re
import sys
import time

START, DECODED, CONTEXT = 16, 48, 512  # tokens before the decode steps, steps, and those of a batch


def main(file: str, threads: int) -> None:
    import llama_cpp as api

    log: list[str] = []

    @api.llama_log_callback
    def keep(_level: int, text: bytes, _data: object) -> None:
        log.append(text.decode(errors="replace"))

    api.llama_log_set(keep, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
    options = api.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = 4 * CONTEXT, 512, 512, 4
    options.n_threads = options.n_threads_batch = threads
    context = api.llama_init_from_model(model, options)
    batch = api.llama_batch_init(CONTEXT, 0, 1)

    def step(streams: int, first: int, count: int) -> None:
        """`count` tokens of each stream from position `first` on; the last one has logits."""
        batch.n_tokens = streams * count
        for at in range(batch.n_tokens):
            stream, offset = divmod(at, count)
            batch.token[at] = 3 + (stream * 31 + (first + offset) * 7) % 900
            batch.pos[at], batch.n_seq_id[at] = first + offset, 1
            batch.seq_id[at][0], batch.logits[at] = stream, offset == count - 1
        if api.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        api.llama_get_logits(context)

    features = re.findall(r"(\w+) = 1", api.llama_print_system_info().decode())
    buffers = re.findall(r"(\S+) model buffer size = +([\d.]+ MiB)", "".join(log))
    print("ready", *features, *(f"{name}: {size}" for name, size in buffers), flush=True)
    for line in sys.stdin:
        what, count = line.split()
        api.llama_memory_clear(api.llama_get_memory(context), True)
        if what == "prompt":
            began = time.perf_counter()
            step(1, 0, int(count))
            rate = int(count) / (time.perf_counter() - began)
        else:
            step(int(count), 0, START)
            began = time.perf_counter()
            for number in range(DECODED):
                step(int(count), START + number, 1)
            rate = int(count) * DECODED / (time.perf_counter() - began)
        print(rate, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
