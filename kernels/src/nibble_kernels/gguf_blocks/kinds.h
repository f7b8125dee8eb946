// The types of llama.cpp's blocks, by their names in GGUF.
#pragma once

#include <cstdint>
#include <string>

namespace nibble::cpu {

struct GgufKind {
  const char* name;
  int64_t elements, bytes;  // of a block
  void (*to_bfloat16)(const uint8_t* from, int64_t blocks, uint16_t* to);
};

// Throws for a name that is not in the table.
const GgufKind& gguf_kind(const std::string& name);

}  // namespace nibble::cpu
