// How weights and the rows that they are multiplied with lie in memory.
//
// A panel has all inputs of its columns. Floats lie input by input; bfloat16 by pairs of inputs, so that a pair of a
// column lies together; INT8 by groups of Isa::kGroup inputs: the scale of each column, then the integers, by units of
// Isa::kUnit inputs.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace {

constexpr int kChunk = 128;  // inputs of a panel that stay in the first cache; whole groups
constexpr int kBlockRows = Isa::kBlockRows;
static_assert(kChunk % Isa::kGroup == 0);

// What a group of a row's inputs is a multiple of, and what its sums of products start with.
struct GroupScale {
  float scale;
  int32_t start;
};

inline ptrdiff_t group_bytes() { return kPanel * (ptrdiff_t)sizeof(float) + kPanel * Isa::kGroup; }

// The bytes from a panel's begin to an input, which is the first of a pair, or of a group.
inline ptrdiff_t offset_in_panel(Type type, int input) {
  switch (type) {
    case inflight::kFloat32: return (ptrdiff_t)input * kPanel * sizeof(float);
    case inflight::kInt8: return input / Isa::kGroup * group_bytes();
    default: return (ptrdiff_t)input * kPanel * sizeof(uint16_t);
  }
}

inline ptrdiff_t panel_bytes(Type type, int inputs) {
  return offset_in_panel(type, round_up(inputs, type == inflight::kInt8 ? Isa::kGroup : 2));
}

// The bytes of an input of a row.
inline int input_bytes(Type type) {
  if (type == inflight::kInt8) return sizeof(Isa::Input);
  return type == inflight::kBfloat16 && Isa::kDotsBf16 ? sizeof(uint16_t) : sizeof(float);
}

// Where a row of integers has the scales of its groups.
inline ptrdiff_t scales_offset(int inputs) { return round_up(inputs, Isa::kGroup) * (ptrdiff_t)sizeof(Isa::Input); }

size_t packed_bytes(Type type, int inputs, int columns) { return panel_bytes(type, inputs) * (columns / kPanel); }

inline float element(const PackSource& source, size_t at) {
  if (source.type == inflight::kFloat32) return ((const float*)source.data)[at];
  return float_of(((const uint16_t*)source.data)[at]);
}

// Rounds a column's weights, of `inputs` from `row` on, to INT8 by groups: to the nearest multiple of a 127th of the
// largest. A group with NaN or infinity has NaN as its scale.
inline void pack_integers(const PackSource& source, size_t row, int inputs, int column, char* panel) {
  for (int first = 0; first < inputs; first += Isa::kGroup, panel += group_bytes()) {
    const int last = std::min(first + Isa::kGroup, inputs);
    float largest = 0.0f, nothing = 0.0f;
    for (int k = first; k < last; k++) {
      const float x = element(source, row + k);
      largest = std::max(largest, std::fabs(x));
      nothing += x * 0.0f;
    }
    const float scale = largest / 127.0f + nothing;
    ((float*)panel)[column] = scale;
    int8_t* integers = (int8_t*)panel + kPanel * sizeof(float);
    for (int k = first; k < last; k++) {
      const float steps = scale > 0.0f ? std::nearbyint(element(source, row + k) / scale) : 0.0f;
      const int at = k - first;
      integers[(size_t)at / Isa::kUnit * kPanel * Isa::kUnit + column * Isa::kUnit + at % Isa::kUnit] = (int8_t)std::clamp(steps, -127.0f, 127.0f);  // a subnormal scale is rounded itself
    }
  }
}

void pack(const PackedWeight& to, const PackSource& source, const int32_t* order, int first, int last) {
  const int inputs = to.inputs;
  const size_t bytes = panel_bytes(to.type, inputs);
  for (int panel = first; panel < last; panel++) {
    char* out = (char*)to.panels + bytes * panel;
    memset(out, 0, bytes);
    for (int j = 0; j < kPanel; j++) {
      const int column = order[panel * kPanel + j];
      if (column < 0) continue;
      const size_t row = (size_t)column * inputs;
      if (to.type == inflight::kInt8) pack_integers(source, row, inputs, j, out);
      for (int k = 0; k < inputs && to.type != inflight::kInt8; k++) {
        if (to.type == inflight::kFloat32)
          ((float*)out)[(size_t)k * kPanel + j] = element(source, row + k);
        else
          ((uint16_t*)out)[((size_t)k / 2 * kPanel + j) * 2 + k % 2] = ((const uint16_t*)source.data)[row + k];
      }
    }
    if (to.type != inflight::kInt8) continue;
    for (size_t group = 0; group < bytes; group += group_bytes())
      for (int at = 0; at < kPanel * Isa::kGroup; at++) out[group + kPanel * sizeof(float) + at] += (char)Isa::kOffset;
  }
}

}  // namespace
