#!/usr/bin/env python3
"""CloverLM with the options of its authors' serve.py: continue texts, or serve the API.

    scripts/serve-cloverlm.py [--model FOLDER_OR_ID] [PROMPT …]
    scripts/serve-cloverlm.py --api [--host ADDRESS] [--port PORT]

The model must be on this disk (`nibble pull`). Its vocabulary file must be in the same folder or
named with --tokenizer (docs/cloverlm.md).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ("The capital of France is", "Once upon a time, there was")


def main() -> int:
    options = _options()
    arguments = [
        *(options.model, "--max-model-len", options.max_model_len),
        *("--gpu-memory-utilization", options.gpu_memory_utilization),
        *("--tensor-parallel-size", options.tp),
        *(("--tokenizer", options.tokenizer) if options.tokenizer else ()),
    ]
    if options.api:
        server = [*(("--host", options.host) if options.host else ()), "--port", options.port]
        os.execv(ROOT / "scripts/serve.sh", ["serve.sh", *arguments, *server])
    python = ROOT / ".venv/bin/python"
    if not Path(sys.prefix).is_relative_to(ROOT / ".venv") and python.exists():
        os.execv(python, [str(python), __file__, *sys.argv[1:]])
    return _generate(arguments, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue")
    parser.add_argument(
        "--model", default="daslab-testing/CloverLM", help="folder or Hugging Face id"
    )
    parser.add_argument("--tokenizer", help="path of the TokenMonster vocabulary file")
    parser.add_argument("--api", action="store_true", help="serve the OpenAI API instead")
    parser.add_argument("--port", default="8000", help="with --api (%(default)s)")
    parser.add_argument("--host", help="with --api (nibble's default: 127.0.0.1)")
    parser.add_argument("--tp", default="1", help="GPUs to split the model over (%(default)s)")
    parser.add_argument("--max-model-len", default="1024", help="context in tokens (%(default)s)")
    parser.add_argument(
        "--gpu-memory-utilization", default="0.9", help="share of GPU memory (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="length of each answer (%(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (%(default)s)")
    options = parser.parse_args()
    if options.api and options.prompts:
        parser.error("--api takes no prompts")
    options.prompts = options.prompts or PROMPTS
    return options


def _generate(arguments: list[str], options: argparse.Namespace) -> int:
    """Answer the prompts in this process, with the settings that `nibble plan` prints."""
    sys.path.insert(0, str(ROOT))
    try:
        from nibble.errors import NibbleError
        from nibble.plan.gather import plan_for, read_wishes
        from nibble.serve.preflight.nvfp4 import check_nvfp4
    except ImportError as error:
        print(
            f"error: {error.name} is not installed for {sys.executable}; run `make setup`",
            file=sys.stderr,
        )
        return 3
    try:
        plan = plan_for(read_wishes(arguments, dict(os.environ)))
        if plan.checkpoint is None or plan.checkpoint.path is None:
            print(
                f"error: {plan.model} is not on this disk; run `nibble pull {plan.model}`",
                file=sys.stderr,
            )
            return 4
        check_nvfp4(plan, os.environ)
    except NibbleError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return int(error.code)
    environ = plan.vllm_environ(os.environ)
    os.environ.clear()
    # On stdout vLLM's log would mix with the answers.
    os.environ.update({"VLLM_LOGGING_STREAM": "ext://sys.stderr"} | environ)

    from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        sampling = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
    except VLLMClientError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2
    # Ignores the flags of the API server.
    flags, _ = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(
        ["--model", plan.model, *plan.argv()[2:]]
    )
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(flags))
    code = 0
    for prompt in options.prompts:
        try:
            llm.enqueue(prompt, sampling, use_tqdm=False)
        except VLLMClientError as error:
            print(f"error: the prompt {prompt[:40]!r}: {error.args[0]}", file=sys.stderr)
            code = 2
    for output in llm.wait_for_completion(RequestOutput, use_tqdm=False):
        print(f"{output.prompt}{output.outputs[0].text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
