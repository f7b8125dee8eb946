"""Parts of vLLM's CMakeLists.txt run by cmake itself in script mode: no compiler, no torch,
under a second.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from nibble.engine.patching.tree import Tree

# What script mode has no use for: the properties of source files belong to a project.
PREAMBLE = """
cmake_policy(VERSION 3.20)
set(CMAKE_CUDA_COMPILER_VERSION {cuda})
include({utils})
macro(set_gencode_flags_for_srcs)
endmacro()
"""


def find_cmake() -> str | None:
    """The cmake in PATH."""
    return shutil.which("cmake")


def blocks(text: str, condition: str) -> list[str]:
    """The whole if … endif() blocks whose if line has `condition` (a regular expression) in it,
    in the order of the file.
    """
    found = []
    for match in re.finditer(rf"^[ \t]*if\s*\([^\n]*{condition}.*$", text, re.MULTILINE):
        depth = 0
        for word in re.compile(r"^[ \t]*(if|endif)\s*\(", re.MULTILINE).finditer(
            text, match.start()
        ):
            depth += 1 if word[1] == "if" else -1
            if depth == 0:
                found.append(text[match.start() : text.index("\n", word.end())])
                break
    return found


def run_script(tree: Tree, body: str, cuda: str = "13.0") -> list[str]:
    """Run statements after the tree's own cmake/utils.cmake; what they print with message(NOTICE
    …), line by line.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "probe.cmake"
        script.write_text(PREAMBLE.format(cuda=cuda, utils=tree.path("cmake/utils.cmake")) + body)
        words = [find_cmake() or "cmake", "-P", str(script)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cmake -P: {' '.join(done.stderr.split())[:300]}")
    return done.stderr.splitlines()  # message() without STATUS goes to standard error
