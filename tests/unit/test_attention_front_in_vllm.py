"""nibble's kernel before attention: which modules of vLLM have it, and where it splits graphs. With
vLLM's classes and without a GPU: the operator runs as plain torch code here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import setuptools  # noqa: F401  # torch needs it; it fails to load where a test has imported pip
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")

HEADS, KV_HEADS, DIM, PAGE, HIDDEN = 4, 2, 64, 16, 32
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def empty(kind: type[nn.Module], **attributes: Any) -> Any:
    """A module of this class that its own constructor has not built."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.attention.backends import flash_attn

    from nibble.engine.plugin.attention import front

    monkeypatch.setattr(flash_attn, "flash_attn_supports_kv_cache_dtype", lambda *a, **k: True)
    return front


def engine(**parallel: int) -> Any:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(sizes | parallel)),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(
            splitting_ops=["vllm::unified_attention_with_output", "vllm::unified_kv_cache_update"]
        ),
    )


def attention_of(cache: str = "auto", **changes: Any) -> Any:
    """vLLM's layer with FlashAttention."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

    impl = FlashAttentionImpl(HEADS, DIM, 0.125, KV_HEADS, None, None, cache)
    one = torch.tensor(1.0)
    attributes = {
        "impl": impl,
        "attn_backend": FlashAttentionBackend,
        "attn_type": AttentionType.DECODER,
        "layer_name": "model.layers.0.self_attn.attn",
        "use_direct_call": False,
        "kv_sharing_target_layer_name": None,
        "has_sink": False,
        "head_size": DIM,
        "head_size_v": DIM,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "kv_cache_dtype": cache,
        "query_quant": None,
        "kv_cache": torch.zeros(4, KV_HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16),
        **dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), one),
    }
    return empty(Attention, **(attributes | changes))


class Projection(nn.Module):
    """A linear layer, which returns its output and no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs).bfloat16() * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight), None


def module_of(kind: type[nn.Module] | None = None, attention: Any = None, **changes: Any) -> Any:
    """A Qwen3Attention, or another class, as a loaded model has it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models.qwen3 import Qwen3Attention

    with set_current_vllm_config(VllmConfig()):
        norms = [RMSNorm(DIM, eps=1e-5, dtype=torch.bfloat16) for _ in range(2)]
        rotation = RotaryEmbedding(DIM, DIM, 128, 1e4, True, torch.bfloat16)
    for norm in norms:
        norm.weight.data = torch.randn(DIM).bfloat16()
    attributes = {
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "q_size": HEADS * DIM,
        "kv_size": KV_HEADS * DIM,
        "qkv_proj": Projection(HIDDEN, WIDTH),
        "o_proj": Projection(HEADS * DIM, HIDDEN),
        "rotary_emb": rotation,
        "q_norm": norms[0],
        "k_norm": norms[1],
        "attn": attention_of() if attention is None else attention,
    }
    return empty(kind or Qwen3Attention, **(attributes | changes))


def test_a_known_module_has_the_kernel_and_keeps_its_name_and_parts(front: Any) -> None:
    module, config = module_of(), engine()
    model = nn.ModuleList([module, nn.Linear(2, 2)])
    names = [name for name, _ in model.named_modules()]
    assert front.replace_fronts(model, config) == []
    assert isinstance(module, front._WithFront) and type(module).__name__ == "Qwen3Attention"
    assert [name for name, _ in model.named_modules()] == names
    assert config.compilation_config.splitting_ops[-1] == front.OPERATOR
    assert front.front_of(module.attn).epsilon == 1e-5


def test_graphs_that_are_not_split_stay_so(front: Any) -> None:
    for operators in (None, [], ["vllm::unified_attention_with_output"]):
        config = engine()
        config.compilation_config.splitting_ops = operators
        kept = list(operators or ())
        assert front.replace_fronts(nn.ModuleList([module_of()]), config) == []
        assert list(config.compilation_config.splitting_ops or ()) == kept


def hooked(module: Any) -> Any:
    module.k_norm.register_forward_hook(lambda *_: None)
    return module


def partly(**changes: Any) -> Any:
    """A module whose rotation differs."""
    module = module_of()
    for name, value in changes.items():
        setattr(module.rotary_emb, name, value)
    return module


def of_impl(**changes: Any) -> Any:
    attention = attention_of()
    for name, value in changes.items():
        setattr(attention.impl, name, value)
    return module_of(attention=attention)


def of_norm(**changes: Any) -> Any:
    module = module_of()
    for name, value in changes.items():
        setattr(module.q_norm, name, value)
    return module


OTHERS: dict[str, Callable[[], Any]] = {
    "sinks": lambda: module_of(attention=attention_of(has_sink=True)),
    "ALiBi": lambda: of_impl(alibi_slopes=torch.ones(4)),
    "share a cache": lambda: module_of(attention=attention_of(kv_sharing_target_layer_name="x")),
    "encoder_only": lambda: module_of(attention=attention_of(attn_type="encoder_only")),
    "writes the cache itself": lambda: module_of(
        attention=attention_of(attn_backend=SimpleNamespace(forward_includes_kv_cache_update=True))
    ),
    "SimpleNamespace": lambda: module_of(
        attention=attention_of(impl=SimpleNamespace(sinks=None, alibi_slopes=None))
    ),
    "not an operator": lambda: module_of(attention=attention_of(use_direct_call=True)),
    "heads have 96": lambda: module_of(
        attention=attention_of(head_size=96, head_size_v=96)
    ),
    "KV cache is int8": lambda: module_of(attention=attention_of(kv_cache_dtype="int8")),
    "its own scale": lambda: module_of(attention=attention_of(_k_scale=torch.ones(KV_HEADS))),
    "two chunks": lambda: module_of(dual_chunk_attention_config={"chunk_size": 8}),
    "scaled by position": lambda: module_of(do_llama_4_scaling=True),
    "hooks": lambda: hooked(module_of()),
    "alone have a norm": lambda: module_of(k_norm=None),
    "two epsilons": lambda: of_norm(variance_epsilon=1e-3),
    "Identity": lambda: module_of(q_norm=nn.Identity()),
    "not bfloat16, or": lambda: of_norm(weight=nn.Parameter(torch.ones(DIM))),
    "cosines are not bfloat16": lambda: partly(cos_sin_cache=torch.zeros(128, DIM)),
    "heads of another size": lambda: partly(head_size=32),
    "24 elements of a head": lambda: partly(
        rotary_dim=24, cos_sin_cache=torch.zeros(128, 24).bfloat16()
    ),
    "rotation is Identity": lambda: module_of(rotary_emb=nn.Identity()),
    "SubclassedAttention is not known": lambda: module_of(subclassed()),
}  # fmt: skip


def subclassed() -> type:
    from vllm.model_executor.models.qwen3 import Qwen3Attention

    return type("SubclassedAttention", (Qwen3Attention,), {})


@pytest.mark.parametrize("why", OTHERS)
def test_other_modules_keep_vllms_code(front: Any, why: str) -> None:
    module, config = OTHERS[why](), engine()
    kind = type(module)
    (reason,) = front.replace_fronts(nn.ModuleList([module]), config)
    assert why in reason
    assert type(module) is kind and front.front_of(module.attn) is None
    assert front.OPERATOR not in config.compilation_config.splitting_ops


def test_other_engines_keep_vllms_code(front: Any) -> None:
    module = module_of()
    (reason,) = front.replace_fronts(
        nn.ModuleList([module]), engine(decode_context_parallel_size=2)
    )
    assert "split over ranks" in reason
    config = engine()
    config.model_config.dtype = torch.float16
    (reason,) = front.replace_fronts(nn.ModuleList([module]), config)
    assert "float16" in reason


@pytest.fixture
def in_a_pass(front: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with the kernel, its forward context, and an attention that returns its queries."""
    from vllm.model_executor.layers.attention import attention as of_vllm

    module, config = module_of(), engine()
    front.replace_fronts(nn.ModuleList([module]), config)
    layer = module.attn
    layer.impl.forward = lambda layer, q, k, v, cache, metadata, output, **_: output.copy_(q)
    slots = torch.tensor([3, -1, 17, 40])

    def context(name: str) -> tuple[Any, Any, Tensor, Tensor | None]:
        assert name == layer.layer_name
        return None, layer, layer.kv_cache, context.slots  # type: ignore[attr-defined]

    context.slots = slots  # type: ignore[attr-defined]
    for owner in (of_vllm, front):
        monkeypatch.setattr(owner, "get_attention_context", context)
    return SimpleNamespace(module=module, config=config, context=context, slots=slots)


def expected(module: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v by the specification."""
    from nibble_kernels.attention_front.reference import prepare

    return prepare(
        module.qkv_proj(hidden)[0], module.q_norm.weight, module.k_norm.weight, 1e-5, positions,
        module.rotary_emb.cos_sin_cache, True, HEADS, KV_HEADS,
    )  # fmt: skip


@torch.inference_mode()
def test_a_pass_writes_the_slots_and_one_without_slots_nothing(in_a_pass: Any) -> None:
    module, cache = in_a_pass.module, in_a_pass.module.attn.kv_cache
    hidden, positions = torch.randn(5, HIDDEN).bfloat16(), torch.tensor([7, 8, 100, 0, 3])
    q, k, v = expected(module, hidden, positions)
    by_vllm = module.o_proj(q.flatten(1))[0]
    in_a_pass.context.slots = None
    assert torch.equal(module(positions=positions, hidden_states=hidden), by_vllm)
    assert not cache.any()
    in_a_pass.context.slots = in_a_pass.slots  # fewer than tokens: the rest is padding
    assert torch.equal(module(positions=positions, hidden_states=hidden), by_vllm)
    for token, slot in enumerate(in_a_pass.slots.tolist()):
        if slot >= 0:
            row = cache[slot // PAGE, :, slot % PAGE].clone()
            assert torch.equal(row, torch.cat((k[token], v[token]), dim=-1))
            cache[slot // PAGE, :, slot % PAGE] = 0
    assert not cache.any(), "something else was written"


@torch.inference_mode()
def test_a_split_graph_has_both_operators_in_one_piece(in_a_pass: Any) -> None:
    """vLLM runs such a piece without a CUDA graph, as it does with its write and attention."""
    from vllm.compilation.backends import split_graph

    module, pieces = in_a_pass.module, []

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        split, items = split_graph(graph, in_a_pass.config.compilation_config.splitting_ops)
        pieces.extend(items)
        return split

    hidden, positions = torch.randn(5, HIDDEN).bfloat16(), torch.tensor([7, 8, 100, 0, 3])
    eager = module(positions, hidden)
    torch._dynamo.reset()
    compiled = torch.compile(module.forward, backend=backend, fullgraph=True)
    assert torch.equal(compiled(positions, hidden), eager)
    (split,) = [item for item in pieces if item.is_splitting_graph]
    called = [str(node.target) for node in split.graph.graph.nodes if node.op == "call_function"]
    assert [name.partition(".")[2].partition(".")[0] for name in called[:2]] == [
        "attention_front_of_layer",
        "unified_attention_with_output",
    ]
    assert [item.is_splitting_graph for item in pieces] == [False, True, False]


@torch.inference_mode()
@pytest.mark.parametrize("decodes", [True, False])
def test_queries_are_rounded_for_flash_attention_alone(
    front: Any, monkeypatch: pytest.MonkeyPatch, decodes: bool
) -> None:
    """With an FP8 cache and nibble's decode attention, which takes BF16."""
    from nibble_kernels.attention_front.reference import rounded_queries
    from vllm.model_executor.layers.attention import attention as of_vllm
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from nibble.engine.plugin.attention.backend import CutePagedImpl, CutePagedMetadata

    impl = CutePagedImpl(HEADS, DIM, 0.125, KV_HEADS, None, None, "fp8")
    impl.rounds_queries = True
    cache = torch.zeros(4, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8)
    layer = attention_of("fp8", impl=impl, kv_cache=cache, _q_scale=torch.tensor(0.5))
    module = module_of(attention=layer)
    assert front.replace_fronts(nn.ModuleList([module]), engine()) == []
    metadata: Any = CutePagedMetadata.__new__(CutePagedMetadata)
    metadata.decodes = decodes
    for owner in (of_vllm, front):
        monkeypatch.setattr(
            owner,
            "get_attention_context",
            lambda name: (metadata, layer, cache, torch.arange(5)),
        )
    seen: list[Tensor] = []
    for owner, name in ((CutePagedImpl, "_decode"), (FlashAttentionImpl, "forward")):
        monkeypatch.setattr(owner, name, lambda self, layer, q, *rest, **_: seen.append(q.clone()))
    hidden, positions = torch.randn(5, HIDDEN).bfloat16(), torch.tensor([7, 8, 100, 0, 3])
    q, _, _ = expected(module, hidden, positions)
    module(positions, hidden)
    (found,) = seen
    rounded = rounded_queries(q, layer._q_scale).view_as(found)
    assert torch.equal(found.float(), (q.view_as(found) if decodes else rounded).float())
