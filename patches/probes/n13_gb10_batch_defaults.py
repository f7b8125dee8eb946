"""GB10 has the memory of a large GPU and not its speed; vLLM 0.32 chooses by memory
(engine/arg_utils.py:2923-2943).
"""

from __future__ import annotations

from nibble.engine.patching.probe import Finding, Fix, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree
from probes.support.batch import server_defaults
from probes.support.fake_cuda import SM121
from probes.support.plans import plan

# The tier vLLM 0.33.0 puts GB10 on (engine/arg_utils.py:2961).
TOKENS, SEQUENCES = 2048, 256

ROW = Row(
    id="N13",
    title="GB10 is given the batch defaults of an H100: 8192 tokens, 1024 sequences",
    how="the tree's own get_batch_defaults, asked as a GB10",
    expect={"0.15.1": "defect", "0.16.0": "defect", "0.32.0": "defect"},
    verdict=(
        "Any GPU of 70 GiB or more gets them. 0.33.0 puts GB10 on the tier of 2048 tokens and 256"
        " sequences."
    ),
    instead=(
        "targets/gb10.toml sets 2048 tokens and 8 sequences; recipes and users may say otherwise."
    ),
    fix=Fix("flag", "targets/gb10.toml max-num-batched-tokens, max-num-seqs"),
    references=("vllm 0.32 engine/arg_utils.py:2923-2943", "vllm 0.33.0 engine/arg_utils.py:2961"),
)


def probe(tree: Tree) -> Finding:
    """What `vllm serve` would take on a GB10."""
    defaults = server_defaults(tree, SM121)
    if defaults is None:
        return not_applicable("no EngineArgs.get_batch_defaults")
    return _judged(*defaults)


def remedy(tree: Tree) -> Finding:
    """What it takes with the flags of nibble's plan for gb10."""
    args = plan("gb10").args
    defaults = server_defaults(tree, SM121)
    assert defaults is not None
    given = [args.get(flag) for flag in ("--max-num-batched-tokens", "--max-num-seqs")]
    tokens, sequences = (
        int(choice.value) if choice else default
        for choice, default in zip(given, defaults, strict=True)
    )
    return _judged(tokens, sequences)


def _judged(tokens: int, sequences: int) -> Finding:
    detail = f"{tokens} batched tokens, {sequences} sequences"
    return sound(detail) if tokens <= TOKENS and sequences <= SEQUENCES else defect(detail)
