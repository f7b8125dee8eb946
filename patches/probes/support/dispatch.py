"""vLLM's C++ dispatchers, function by function, compiled for the CPU and asked which kernel they
would call on which GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

# Stand-ins for what the functions touch; each kernel prints its name, and so does the refusal.
PRELUDE = """
#include <cstdint>
#include <cstdio>
#include <optional>
#include <type_traits>
#define CUDA_VERSION 13000
static int sm;
static int get_sm_version_num() { return sm; }
static void cudaRuntimeGetVersion(int* version) { *version = CUDA_VERSION; }
struct Tensor {
  long dim() const { return 2; }
  long size(int) const { return 16; }
  long stride(int) const { return 16; }
  long numel() const { return 256; }
  bool is_contiguous() const { return true; }
  int get_device_index() const { return 0; }
};
static int device_of(Tensor const&) { return 0; }
struct Guard { explicit Guard(int) {} };
namespace torch { using ::Tensor; }
namespace torch::stable { using ::Tensor; }
namespace torch::stable::accelerator { using DeviceGuard = Guard; }
namespace at::cuda { using OptionalCUDAGuard = Guard; }
namespace c10::cuda { using OptionalCUDAGuard = Guard; }
#define TORCH_CHECK(...)
#define STD_TORCH_CHECK(...)
#define TORCH_CHECK_NOT_IMPLEMENTED(...) std::puts("not implemented")
#define STD_TORCH_CHECK_NOT_IMPLEMENTED(...) std::puts("not implemented")
template <class T> std::decay_t<T>& any() { static std::decay_t<T> value{}; return value; }
static void ask(bool (*question)(int64_t)) { std::puts(question(sm) ? "true" : "false"); }
template <class... Args> void ask(void (*function)(Args...)) { function(any<Args>()...); }
"""
KERNEL = 'template <class... Args> void {name}(Args&&...) {{ std::puts("{name}"); }}\n'
ENABLED = (
    "SCALED_MM_SM90",
    "SCALED_MM_SM100",
    "SCALED_MM_SM120",
    "SCALED_MM_C2X",
    "NVFP4_SM100",
    "NVFP4_SM120",
    "CUTLASS_MOE_SM90",
    "CUTLASS_MOE_SM100",
    "CUTLASS_MOE_SM120",
)


def find_compiler() -> str | None:
    """A C++ compiler for this machine."""
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def function(text: str, name: str) -> str | None:
    """The definition of a function of the global namespace, or None."""
    start = re.search(rf"^(?:void|bool) {name}\([^;{{]*\{{", text, re.MULTILINE)
    if start is None:
        return None
    depth, position = 1, start.end()
    while depth:
        brace = re.compile(r"[{}]").search(text, position)
        if brace is None:
            return None
        depth += 1 if brace[0] == "{" else -1
        position = brace.end()
    return text[start.start() : position]


def answers(
    functions: Mapping[str, str], capabilities: Sequence[int], enabled: Iterable[str] = ENABLED
) -> dict[str, dict[int, str]]:
    """Function -> capability (121 for 12.1) -> the kernel it calls, "not implemented", "true" or
    "false".
    """
    kernels = sorted(
        {
            word
            for text in functions.values()
            for word in re.findall(r"\bcutlass_\w+_sm\d+a?\b(?=\()", text)
        }
    )
    program = "".join(f"#define ENABLE_{name} 1\n" for name in enabled) + PRELUDE
    program += "".join(KERNEL.format(name=name) for name in kernels) + "\n".join(functions.values())
    program += "\nint main() {\n"
    program += (
        "".join(f"  sm = {sm}; ask({name});\n" for name in functions for sm in capabilities) + "}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "dispatch.cpp"), Path(folder, "dispatch")
        source.write_text(program)
        compiler = find_compiler() or "c++"
        subprocess.run(
            [compiler, "-std=c++17", "-w", "-o", binary, source], check=True, capture_output=True
        )
        lines = subprocess.run(
            [binary], check=True, capture_output=True, text=True
        ).stdout.splitlines()
    asked = ((name, sm) for name in functions for sm in capabilities)
    found: dict[str, dict[int, str]] = {name: {} for name in functions}
    for (name, sm), line in zip(asked, lines, strict=True):
        found[name][sm] = line
    return found
