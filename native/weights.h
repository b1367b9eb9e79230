// How weights and the rows that they are multiplied with lie in memory.
//
// A panel has all inputs of its columns. Floats lie input by input; bfloat16 by pairs of inputs, so that a pair of a
// column lies together; INT8 by groups of Isa::kGroup inputs: the scale of each column, then the integers, by units of
// Isa::kUnit inputs. Of quantized checkpoints E4M3 and INT8 lie input by input, or by units where integers are added up;
// INT4 by groups: the scale of each column, then lanes of eight inputs of a column.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace {

constexpr int kChunk = 128;  // inputs of a panel that stay in the first cache; whole groups
constexpr int kBlockRows = Isa::kBlockRows;
static_assert(kChunk % Isa::kGroup == 0 && kChunk == inflight::kLongestGroup);

// What a group of a row's inputs is a multiple of, and what its sums of products start with.
struct GroupScale {
  float scale;
  int32_t start;
};

inline ptrdiff_t group_bytes() { return kPanel * (ptrdiff_t)sizeof(float) + kPanel * Isa::kGroup; }

// The bytes of a group of INT4.
inline ptrdiff_t nibble_group_bytes(int group) { return kPanel * ((ptrdiff_t)sizeof(float) + group / 2); }

// The bytes from a panel's begin to an input, which is the first of a pair, of a unit, or of a group.
inline ptrdiff_t offset_in_panel(const PackedWeight& weight, int input) {
  switch (weight.type) {
    case inflight::kFloat32: return (ptrdiff_t)input * kPanel * sizeof(float);
    case inflight::kBfloat16: return (ptrdiff_t)input * kPanel * sizeof(uint16_t);
    case inflight::kInt8: return input / Isa::kGroup * group_bytes();
    case inflight::kInt4: return input / weight.group * nibble_group_bytes(weight.group);
    default: return (ptrdiff_t)input * kPanel;
  }
}

inline ptrdiff_t panel_bytes(const PackedWeight& weight) {
  const bool summed = weight.type == inflight::kInt8Sums;
  return offset_in_panel(weight, round_up(weight.inputs, weight.type == inflight::kInt8 ? Isa::kGroup : summed ? 4 : 2));
}

// The bytes of an input of a row.
inline int input_bytes(Type type) {
  if (type == inflight::kInt8 || type == inflight::kInt8Sums) return sizeof(Isa::Input);
  return type == inflight::kBfloat16 && Isa::kDotsBf16 ? sizeof(uint16_t) : sizeof(float);
}

// Where a row of integers has the scales of its groups.
inline ptrdiff_t scales_offset(int inputs) { return round_up(inputs, Isa::kGroup) * (ptrdiff_t)sizeof(Isa::Input); }

size_t packed_bytes(const PackedWeight& weight) { return panel_bytes(weight) * (weight.columns / kPanel); }

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

// Packs a column of bytes. What is no number in E4M3 becomes zero, and the column's scale no number instead.
inline void pack_bytes(const PackSource& source, size_t row, int column, int unit, const PackedWeight& to, char* panel,
                       float& scale) {
  const uint8_t* from = (const uint8_t*)source.data + row * to.inputs;
  scale = source.scales[row];
  for (int k = 0; k < to.inputs; k++) {
    const bool nan = to.type == inflight::kE4m3 && (from[k] & 0x7f) == 0x7f;
    if (nan) scale = std::numeric_limits<float>::quiet_NaN();
    panel[((size_t)k / unit * kPanel + column) * unit + k % unit] = nan ? 0 : (char)from[k];
  }
}

// Packs a column of INT4: all but the uppermost of a lane's eight with an offset of 8, since a lane is read as a number
// of 32 bits with all others masked out.
inline void pack_nibbles(const PackSource& source, size_t row, int column, const PackedWeight& to, char* panel) {
  const uint8_t* from = (const uint8_t*)source.data + row / 2 * to.inputs;
  const float* scales = source.scales + row * (to.inputs / to.group);
  for (int first = 0; first < to.inputs; first += to.group, panel += nibble_group_bytes(to.group)) {
    ((float*)panel)[column] = *scales++;
    for (int k = 0; k < to.group; k += inflight::kNibbles) {
      uint32_t lane = 0x08888888;
      for (int j = 0; j < inflight::kNibbles; j++)
        lane ^= (uint32_t)(from[first + k + j] >> row % 2 * 4 & 15) << 4 * j;  // adding 8 turns the uppermost bit
      memcpy(panel + kPanel * sizeof(float) + ((size_t)k / inflight::kNibbles * kPanel + column) * sizeof lane, &lane,
             sizeof lane);
    }
  }
}

// Packs a column of a quantized checkpoint, or one of zeros.
inline void pack_quantized(const PackedWeight& to, const PackSource& source, int row, int panel, int j, char* out) {
  if (to.type == inflight::kInt4) {
    if (row >= 0) pack_nibbles(source, row, j, to, out);
    return;  // a scale of zero is enough for the others
  }
  float& scale = to.scales[panel * kPanel + j];
  scale = 0.0f;
  if (row >= 0) pack_bytes(source, row, j, to.type == inflight::kInt8Sums ? Isa::kUnit : 1, to, out, scale);
}

void pack(const PackedWeight& to, const PackSource& source, const int32_t* order, int first, int last) {
  const int inputs = to.inputs;
  const size_t bytes = panel_bytes(to);
  for (int panel = first; panel < last; panel++) {
    char* out = (char*)to.panels + bytes * panel;
    memset(out, 0, bytes);
    for (int j = 0; j < kPanel; j++) {
      const int column = order[panel * kPanel + j];
      if (to.type > inflight::kInt8) pack_quantized(to, source, column, panel, j, out);
      if (column < 0 || to.type > inflight::kInt8) continue;
      const size_t row = (size_t)column * inputs;
      if (to.type == inflight::kInt8) pack_integers(source, row, inputs, j, out);
      for (int k = 0; k < inputs && to.type != inflight::kInt8; k++) {
        if (to.type == inflight::kFloat32)
          ((float*)out)[(size_t)k * kPanel + j] = element(source, row + k);
        else
          ((uint16_t*)out)[((size_t)k / 2 * kPanel + j) * 2 + k % 2] = ((const uint16_t*)source.data)[row + k];
      }
    }
    for (size_t at = 0; at < bytes && to.type == inflight::kInt8Sums; at++) out[at] += (char)Isa::kOffset;
    if (to.type != inflight::kInt8) continue;
    for (size_t group = 0; group < bytes; group += group_bytes())
      for (int at = 0; at < kPanel * Isa::kGroup; at++) out[group + kPanel * sizeof(float) + at] += (char)Isa::kOffset;
  }
}

}  // namespace
