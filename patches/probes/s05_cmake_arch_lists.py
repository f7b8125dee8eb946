"""For TORCH_CUDA_ARCH_LIST=12.1a and 12.1 vLLM's CMake must build FP4 and scaled_mm code that
SM121 can load.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="5",
    title="CMake leaves GB10 out: add 12.1 to CUDA_SUPPORTED_ARCHS and 12.1f to the kernels' lists",
    how="CMake: the tree's own function over the tree's own lists",
    expect={"0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "With CUDA 13 nothing is left out: 12.1a gives 12.0f, which GB10 loads. dgx-vllm's first"
        " sed (12.1 among the supported ones) empties the lists in 0.16.0; its second sed fixes its"
        " first, for scaled_mm only. In 0.32.0 the first would make plain 12.1 of 12.1, for which"
        " FP4 does not compile. CUDA 12 builds are another matter: N19."
    ),
    instead=(
        "builds for 12.0f with CUDA 13, leaves CMakeLists.txt alone and asserts the result (N19)"
    ),
    references=(
        "vllm 0.32 CMakeLists.txt:126, 821, 995",
        "vllm 0.32 cmake/utils.cmake:397",
        (
            "Avarok-Cybersecurity/dgx-vllm ead7ae7 fix_cmake_sm120_archs_v113_corrected.sh,"
            " Dockerfile:98"
        ),
    ),
)
ASKED = ("12.1a", "12.1")
KERNELS = ("scaled_mm", "FP4")
LOADED_BY_GB10 = {"12.0f", "12.1a", "12.1f"}  # and with FP4: plain 12.1 has none
# What the kernels' lists are made of; the variable's name differs between releases.
FAMILY_LIST = r'cuda_archs_loose_intersection\((SCALED_MM_ARCHS|FP4_\w*ARCHS) "12\.0f'


def probe(tree: Tree) -> Finding:
    """What is built by the lists as they are, and by dgx-vllm's changes to them."""
    from probes.support.cmake import find_cmake

    if not tree.has("CMakeLists.txt"):
        return not_applicable("no CMakeLists.txt in a wheel")
    if find_cmake() is None:
        return not_applicable("no cmake here")
    text = tree.text("CMakeLists.txt")
    if len(_kernel_lists(text)) != len(KERNELS):
        return not_applicable("CMakeLists.txt has other lists than this probe knows")
    seed = text.replace('9.0;10.0;11.0;12.0")', '9.0;10.0;11.0;12.0;12.1")')
    stock = {asked: built(tree, text, asked) for asked in ASKED}
    detail = "; ".join(f"{asked}: {_shown(archs)}" for asked, archs in stock.items())
    changed = "; ".join(f"{asked}: {_shown(built(tree, seed, asked))}" for asked in ASKED)
    detail = f"as it is, {detail}. After dgx-vllm's first sed, {changed}"
    fine = all(LOADED_BY_GB10 & set(archs.split(";")) for each in stock.values() for archs in each)
    return sound(detail) if fine else defect(detail)


def built(tree: Tree, text: str, asked: str, cuda: str = "13.0") -> list[str]:
    """The architectures of KERNELS as the lists in `text` come out for one TORCH_CUDA_ARCH_LIST."""
    from probes.support.cmake import blocks, run_script

    supported = [
        one
        for one in blocks(text, "DEFINED CMAKE_CUDA_COMPILER_VERSION")
        if "CUDA_SUPPORTED_ARCHS" in one
    ]
    number = asked.replace(".", "")
    body = [
        (
            'extract_unique_cuda_archs_ascending(CUDA_ARCHS "-gencode'
            f' arch=compute_{number},code=sm_{number}")'
        ),
        supported[0],
        'cuda_archs_loose_intersection(CUDA_ARCHS "${CUDA_SUPPORTED_ARCHS}" "${CUDA_ARCHS}")',
    ]
    for variable, block in _kernel_lists(text):
        body += [block, f'message(NOTICE "[${{{variable}}}]")']
    return [line.strip("[]") for line in run_script(tree, "\n".join(body), cuda)]


def _kernel_lists(text: str) -> list[tuple[str, str]]:
    """(variable, the if block that computes it) for scaled_mm and for FP4."""
    from probes.support.cmake import blocks

    found = (
        (re.search(FAMILY_LIST, one), one) for one in blocks(text, r"VERSION_GREATER_EQUAL 13\.0\)")
    )
    return [(match[1], one) for match, one in found if match]


def _shown(archs: Sequence[str]) -> str:
    return ", ".join(f"{name} {one or 'nothing'}" for name, one in zip(KERNELS, archs, strict=True))
