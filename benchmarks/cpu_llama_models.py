"""The models of cpu_llama.py: a generated Qwen3 of each shape, in four forms.

Two are GGUF with Q4_0 and with NVFP4 layers, two are checkpoints with W4A16 and W4A4. Embedding and
head are BF16 in all of them. Speed depends on the shapes, not on the values, so all layers of a
GGUF have equal ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
SHAPES = {  # hidden, intermediate, layers, heads, heads of keys, head_dim, vocabulary
    "1.7b": (2048, 6144, 28, 16, 8, 128, 32768),
    "135m": (576, 1536, 30, 9, 3, 64, 49152),
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
}
FORMS = ("llama_q4_0", "llama_nvfp4", "nibble_w4a16", "nibble_w4a4")


def write_models(name: str, folder: Path) -> dict[str, Path]:
    from tests.support.models.generated_nvfp4 import Shape, write_checkpoint

    files: dict[str, Path] = {}
    shape = Shape(*SHAPES[name])
    for form in FORMS:
        files[form] = folder / (f"{form}.gguf" if form.startswith("llama") else form)
        if files[form].exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if form.startswith("llama"):
            write_gguf(files[form], name, form.removeprefix("llama_").upper())
        else:
            write_checkpoint(files[form], shape, "modelopt", w4a4=form.endswith("w4a4"))
            copy_tokenizer(files[form])
    return files


def copy_tokenizer(folder: Path) -> None:
    """The demo's: requests have token ids, so its vocabulary may be smaller."""
    for file in (REPO / "models/nibble-demo").iterdir():
        if "token" in file.name or "template" in file.name:
            (folder / file.name).write_bytes(file.read_bytes())


def write_gguf(path: Path, name: str, kind: str) -> None:
    """The shape as GGUF; `kind` is the type of the layers."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[name]
    writer = GGUFWriter(path, "qwen3")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("none")
    random = np.random.default_rng(1)
    type_of = GGMLQuantizationType[kind]
    shapes = {
        "attn_q": (heads * head_dim, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
        "ffn_gate": (intermediate, hidden),
        "ffn_up": (intermediate, hidden),
        "ffn_down": (hidden, intermediate),
    }
    blocks = {tensor: quantized(random, shape, kind) for tensor, shape in shapes.items()}
    sizes = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": head_dim}
    norms = {key: np.ones(size, np.float32) for key, size in sizes.items()}
    norms["attn_k_norm"] = norms["attn_q_norm"]
    for layer in range(layers):
        for tensor, values in blocks.items():
            writer.add_tensor(f"blk.{layer}.{tensor}.weight", values, raw_dtype=type_of)
        for tensor, values in norms.items():
            writer.add_tensor(f"blk.{layer}.{tensor}.weight", values)
    table = (random.standard_normal((vocabulary, hidden), np.float32) * 0.05).view(np.uint32)
    table = (table >> 16).astype(np.uint16).view(np.uint8)
    for tensor in ("token_embd", "output"):
        writer.add_tensor(f"{tensor}.weight", table, raw_dtype=GGMLQuantizationType.BF16)
    writer.add_tensor("output_norm.weight", norms["attn_norm"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(random: Any, shape: tuple[int, int], kind: str) -> Any:
    """Bytes of a matrix in blocks: Q4_0 has a float16 scale for 32 values, NVFP4 four E4M3 scales
    for 64 (ggml-common.h).
    """
    import numpy as np

    rows, columns = shape
    if kind == "Q4_0":
        scale = np.full((rows, columns // 32, 1), 0.005, np.float16).view(np.uint8)
        codes = random.integers(0, 256, (rows, columns // 32, 16), np.uint8)
    else:
        scale = random.integers(8, 16, (rows, columns // 64, 4), np.uint8)
        codes = random.integers(0, 256, (rows, columns // 64, 32), np.uint8)
    return np.concatenate([scale, codes], axis=2).reshape(rows, -1)


def step_bytes(name: str) -> int:
    """Bytes of weights that a decode step reads, about the same in each form."""
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = SHAPES[name]
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate
    return layers * layer * 9 // 16 + 2 * hidden * vocabulary
