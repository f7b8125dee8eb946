"""scaled_mm_entry.cu must be compiled with ENABLE_SCALED_MM_SM120 wherever the SM12x kernels are
built.
"""

from __future__ import annotations

import re

from nibble.engine.patching.probe import Finding, Row, defect, not_applicable, sound
from nibble.engine.patching.tree import Tree

ROW = Row(
    id="6",
    title="ENABLE_SCALED_MM_SM120 is not defined for the dispatcher",
    how="CMake: the tree's own SM12x block, and dgx-vllm's condition after it",
    expect={"0.16.0": "sound", "0.32.0": "sound"},
    verdict=(
        "It is: the block that adds the kernels adds the definition to VLLM_GPU_FLAGS, which every"
        " source of the module gets. dgx-vllm's addition stands under `if(ENABLE_SCALED_MM_SM120 OR"
        " TARGET_SM120_BUILT)`, two CMake variables that stay unset: it never ran."
    ),
    instead=(
        "nothing to change; tests read the definition off the compile command of a configured build"
    ),
    references=(
        "vllm 0.32 CMakeLists.txt:835",
        "vllm 0.16 CMakeLists.txt:546",
        "Avarok-Cybersecurity/dgx-vllm ead7ae7 fix_dispatcher_flag_v115.sh",
    ),
)
ADDED_CONDITION = """
if(ENABLE_SCALED_MM_SM120 OR TARGET_SM120_BUILT)
  message(NOTICE "taken")
else()
  message(NOTICE "not taken")
endif()
"""
DEFINITION = "-DENABLE_SCALED_MM_SM120=1"
KERNEL = "csrc/quantization/w8a8/cutlass/scaled_mm_c3x_sm120.cu"
ENTRY = "csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu"


def probe(tree: Tree) -> Finding:
    """Run the SM12x block with and without architectures, then ask dgx-vllm's question."""
    from probes.support.cmake import blocks, find_cmake, run_script

    if not tree.has("CMakeLists.txt"):
        return not_applicable("no CMakeLists.txt in a wheel")
    if find_cmake() is None:
        return not_applicable("no cmake here")
    text = tree.text("CMakeLists.txt")
    found = [one for one in blocks(text, r"AND SCALED_MM_ARCHS\)") if KERNEL in one]
    module = _module_of_entry(text)
    if len(found) != 1 or not module:
        return not_applicable(
            "CMakeLists.txt builds scaled_mm in another way than this probe knows"
        )
    show = 'message(NOTICE "[${VLLM_GPU_FLAGS}]")\n'
    built, seed = run_script(
        tree, f'set(SCALED_MM_ARCHS "12.0f")\n{found[0]}\n{show}{ADDED_CONDITION}'
    )
    without = run_script(tree, f'set(SCALED_MM_ARCHS "")\n{found[0]}\n{show}')[0]
    detail = f"{module} gets {built} with 12.0f and {without} without; dgx-vllm's branch is {seed}"
    return sound(detail) if DEFINITION in built and DEFINITION not in without else defect(detail)


def _module_of_entry(text: str) -> str:
    """The module whose sources have the dispatcher and whose compile flags are VLLM_GPU_FLAGS."""
    for call in re.finditer(r"define_extension_target\(\s*(\w+)(.*?)\)", text, re.DOTALL):
        name, words = call[1], call[2]
        variable = re.search(r"SOURCES \$\{(\w+)\}", words)
        if variable and "COMPILE_FLAGS ${VLLM_GPU_FLAGS}" in words:
            lists = re.findall(rf"(?:set|list)\((?:APPEND )?{variable[1]}\b([^)]*)\)", text)
            if any(ENTRY in one for one in lists):
                return name
    return ""
