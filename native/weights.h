// How weights and the rows that they are multiplied with lie in memory.
//
// A panel has all inputs of its columns. Floats lie input by input; bfloat16 by pairs of inputs, so that a pair of a
// column lies together; INT8 by groups of Isa::kGroup inputs: the scale of each column, in bfloat16, which takes less
// memory, then the integers, by units of Isa::kUnit inputs. Of quantized checkpoints E4M3 lies input by input. INT8 lies by
// groups of kWordGroup inputs, in which pairs of a column lie together; where inputs are in INT8 too, it lies by units and
// without groups. INT4 lies by groups, in lanes of eight inputs of a column. So does MXFP4, whose scales are bytes. Where
// there are minimums, a group has them behind its scales.
#pragma once

#include <algorithm>

#include "numbers.h"

namespace {

constexpr int kChunk = 128;  // inputs of a panel that many rows take in one go; whole groups
constexpr int kBlockRows = Isa::kBlockRows;
static_assert(kChunk % Isa::kGroup == 0 && kChunk == inflight::kLongestGroup);
constexpr float kLargestWord = 0x7f7f;  // of a row's inputs of 16 bits: 256 times a byte with a sign, and such a byte

// What a group of a row's inputs is a multiple of, and what its sums of products start with.
struct GroupScale {
  float scale;
  int32_t start;
};

// An input of 16 bits that is multiplied apart from its group: a pair by itself, the other one of which is zero.
struct Outlier {
  int32_t group;   // where its group lies in a panel, in bytes
  int32_t number;  // of its group in the row
  int32_t first;   // of the pair's inputs, in the group
  int16_t pair[2];
  GroupScale scale;
};

// Those of a row: they lie before the scales of its groups.
struct Outliers {
  static constexpr int kMost = 4;
  int32_t count;
  Outlier of[kMost];
};

// The inputs that share a scale.
inline int group_of(const PackedWeight& weight) { return weight.group ? weight.group : Isa::kGroup; }

inline bool has_minimums(Type type) { return type == inflight::kInt4Minimums || type == inflight::kInt8Minimums; }

inline bool is_int4(Type type) { return type == inflight::kInt4 || type == inflight::kInt4Minimums; }

inline bool is_e4m3(Type type) { return type == inflight::kE4m3 || type == inflight::kE4m3Groups; }

// The bytes in front of a group's integers: a scale for each column, and maybe a minimum.
inline ptrdiff_t header_bytes(Type type) {
  const ptrdiff_t scale = type == inflight::kInt8 ? sizeof(uint16_t) : sizeof(float);
  return kPanel * (has_minimums(type) ? 2 * scale : scale);
}

// The bytes of a group.
inline ptrdiff_t group_bytes(const PackedWeight& weight) {
  const ptrdiff_t group = group_of(weight);
  if (weight.type == inflight::kMxfp4) return kPanel * (1 + group / 2);
  return header_bytes(weight.type) + kPanel * (is_int4(weight.type) ? group / 2 : group);
}

inline bool in_groups(Type type) {
  return type == inflight::kInt8 || is_int4(type) || type == inflight::kInt8Columns || has_minimums(type) ||
         type == inflight::kMxfp4;
}

// The bytes from a panel's begin to an input, which is the first of a pair, of a unit, or of a group.
inline ptrdiff_t offset_in_panel(const PackedWeight& weight, int input) {
  switch (weight.type) {
    case inflight::kFloat32: return (ptrdiff_t)input * kPanel * sizeof(float);
    case inflight::kBfloat16: return (ptrdiff_t)input * kPanel * sizeof(uint16_t);
    case inflight::kE4m3:
    case inflight::kE4m3Groups:
    case inflight::kInt8Sums: return (ptrdiff_t)input * kPanel;
    default: return input / group_of(weight) * group_bytes(weight);
  }
}

inline ptrdiff_t panel_bytes(const PackedWeight& weight) {
  const int whole = in_groups(weight.type) ? group_of(weight) : weight.type == inflight::kInt8Sums ? 4 : 2;
  return offset_in_panel(weight, round_up(weight.inputs, whole));
}

// The bytes of an input of a row.
inline int input_bytes(Type type) {
  if (type == inflight::kInt8 || type == inflight::kInt8Sums) return sizeof(Isa::Input);
  if (in_groups(type)) return sizeof(int16_t);
  return type == inflight::kBfloat16 && Isa::kDotsBf16 ? sizeof(uint16_t) : sizeof(float);
}

// Whether inputs are rounded to 16 bits, but for those that stand out.
inline bool has_outliers(Type type) { return in_groups(type) && type != inflight::kInt8; }

// Where a row of integers has the scales of its groups: it has four bytes for each input, and 64 more.
inline ptrdiff_t scales_offset(const PackedWeight& weight) {
  const ptrdiff_t integers = round_up(weight.inputs, group_of(weight)) * (ptrdiff_t)input_bytes(weight.type);
  return integers + (has_outliers(weight.type) ? sizeof(Outliers) : 0);
}

size_t packed_bytes(const PackedWeight& weight) { return panel_bytes(weight) * (weight.columns / kPanel); }

inline float element(const PackSource& source, size_t at) {
  if (source.type == inflight::kFloat32) return ((const float*)source.data)[at];
  return float_of(((const uint16_t*)source.data)[at]);
}

// Where an integer of a column lies, by units of so many inputs.
inline size_t place(int k, int column, int unit) { return ((size_t)k / unit * kPanel + column) * unit + k % unit; }

// Rounds a column's weights, which begin at `row`, to INT8 by groups: to the nearest multiple of a 127th of the largest,
// which is rounded to bfloat16. A group with NaN or infinity has NaN as its scale.
inline void pack_integers(const PackedWeight& to, const PackSource& source, size_t row, int column, char* panel) {
  const int inputs = to.inputs;
  for (int first = 0; first < inputs; first += Isa::kGroup, panel += group_bytes(to)) {
    const int last = std::min(first + Isa::kGroup, inputs);
    float largest = 0.0f, nothing = 0.0f;
    for (int k = first; k < last; k++) {
      const float x = element(source, row + k);
      largest = std::max(largest, std::fabs(x));
      nothing += x * 0.0f;
    }
    const uint16_t rounded = bf16_of(largest / 127.0f + nothing);
    const float scale = float_of(rounded);
    ((uint16_t*)panel)[column] = rounded;
    int8_t* integers = (int8_t*)panel + header_bytes(to.type);
    for (int k = first; k < last; k++) {
      const float steps = scale > 0.0f ? std::nearbyint(element(source, row + k) / scale) : 0.0f;
      // A subnormal scale is rounded itself.
      integers[place(k - first, column, Isa::kUnit)] = (int8_t)std::clamp(steps, -127.0f, 127.0f);
    }
  }
}

// Packs a column of bytes, and its scales, which are kPanel apart. NaN in E4M3 becomes zero, and its scale NaN instead.
inline void pack_bytes(const PackedWeight& to, const PackSource& source, size_t row, int column, char* panel,
                       float* scales) {
  const uint8_t* from = (const uint8_t*)source.data + row * to.inputs;
  const float* given = (const float*)source.scales + row * source.groups;
  for (int group = 0; group < source.groups; group++) scales[group * kPanel] = given[group];
  for (int k = 0; k < to.inputs; k++) {
    const bool nan = is_e4m3(to.type) && (from[k] & 0x7f) == 0x7f;
    if (nan) scales[to.group ? k / to.group * kPanel : 0] = std::numeric_limits<float>::quiet_NaN();
    panel[place(k, column, is_e4m3(to.type) ? 1 : Isa::kUnit)] = nan ? 0 : (char)from[k];
  }
}

// Packs a column of INT8 by groups, each with its own scale or the column's: rows have one for each group. Minimums have
// what the offset of inputs takes off added to them.
inline void pack_words(const PackedWeight& to, const PackSource& source, size_t row, int column, char* panel) {
  const uint8_t* from = (const uint8_t*)source.data + row * to.inputs;
  const float* scales = (const float*)source.scales + row * source.groups;
  for (int first = 0; first < to.inputs; first += to.group, panel += group_bytes(to)) {
    const int group = source.groups > 1 ? first / to.group : 0;
    const float scale = ((float*)panel)[column] = scales[group];
    if (source.minimums)
      ((float*)panel)[kPanel + column] =
          std::fma(scale, (float)inflight::kNibbleOffset, source.minimums[row * source.groups + group]);
    for (int k = first; k < std::min(first + to.group, to.inputs); k++)
      panel[header_bytes(to.type) + place(k - first, column, 2)] = (char)from[k];
  }
}

// Where the four bits of an input lie in its lane: the first inputs of four pairs below the second ones, so that each
// pair is masked out as two words.
inline int nibble_shift(int k) { return k % 2 * 16 + k % inflight::kNibbles / 2 * 4; }

// Packs a column of INT4 with an offset of 8.
inline void pack_nibbles(const PackedWeight& to, const PackSource& source, size_t row, int column, char* panel) {
  const uint8_t* from = (const uint8_t*)source.data + row / 2 * to.inputs;
  size_t at = row * source.groups;
  for (int first = 0; first < to.inputs; first += to.group, panel += group_bytes(to), at++) {
    ((float*)panel)[column] = ((const float*)source.scales)[at];
    if (source.minimums) ((float*)panel)[kPanel + column] = source.minimums[at];
    uint32_t* lanes = (uint32_t*)(panel + header_bytes(to.type)) + column;
    for (int k = 0; k < to.group; k++) {
      const uint32_t nibble = (from[first + k] >> row % 2 * 4 & 15) ^ inflight::kNibbleOffset;
      lanes[k / inflight::kNibbles * kPanel] |= nibble << nibble_shift(k);
    }
  }
}

// Packs a column of MXFP4: the exponents of its powers of two as bytes, and for each weight its place among all values,
// which Isa::e2m1 decodes. A power of two of 2^-127 counts as zero, and 2^128 as infinity.
inline void pack_mxfp4(const PackedWeight& to, const PackSource& source, size_t row, int column, char* panel) {
  static constexpr uint8_t kPlaces[16] = {7, 8, 9, 10, 11, 12, 13, 14, 7, 6, 5, 4, 3, 2, 1, 0};  // of E2M1's bits
  const uint8_t* from = (const uint8_t*)source.data + row * (to.inputs / 2);
  const uint8_t* scales = (const uint8_t*)source.scales + row * (to.inputs / to.group);
  for (int first = 0; first < to.inputs; first += to.group, panel += group_bytes(to)) {
    ((uint8_t*)panel)[column] = *scales++;
    char* lanes = panel + kPanel + column * sizeof(uint32_t);
    for (int k = 0; k < to.group; k++) {
      char* at = lanes + k / inflight::kNibbles * kPanel * sizeof(uint32_t);
      uint32_t lane;
      memcpy(&lane, at, sizeof lane);
      lane |= (uint32_t)kPlaces[from[(first + k) / 2] >> k % 2 * 4 & 15] << nibble_shift(k);
      memcpy(at, &lane, sizeof lane);
    }
  }
}

// Packs a column of a panel that is zero.
inline void pack_column(const PackedWeight& to, const PackSource& source, size_t row, int panel, int j, char* out) {
  const size_t first = row * to.inputs;
  switch (to.type) {
    case inflight::kFloat32:
      for (int k = 0; k < to.inputs; k++) ((float*)out)[place(k, j, 1)] = element(source, first + k);
      return;
    case inflight::kBfloat16:
      for (int k = 0; k < to.inputs; k++) ((uint16_t*)out)[place(k, j, 2)] = ((const uint16_t*)source.data)[first + k];
      return;
    case inflight::kInt8: return pack_integers(to, source, first, j, out);
    case inflight::kInt4:
    case inflight::kInt4Minimums: return pack_nibbles(to, source, row, j, out);
    case inflight::kInt8Columns:
    case inflight::kInt8Minimums: return pack_words(to, source, row, j, out);
    case inflight::kMxfp4: return pack_mxfp4(to, source, row, j, out);
    default: return pack_bytes(to, source, row, j, out, to.scales + (size_t)panel * kPanel * scale_groups(to) + j);
  }
}

void pack(const PackedWeight& to, const PackSource& source, const int32_t* order, int first, int last) {
  const size_t bytes = panel_bytes(to);
  for (int panel = first; panel < last; panel++) {
    char* out = (char*)to.panels + bytes * panel;
    memset(out, 0, bytes);
    const size_t scales = (size_t)kPanel * scale_groups(to);
    if (to.scales) memset(to.scales + panel * scales, 0, scales * sizeof(float));
    for (int j = 0; j < kPanel; j++) {
      if (order[panel * kPanel + j] >= 0) pack_column(to, source, order[panel * kPanel + j], panel, j, out);
    }
    if (to.type == inflight::kInt8Sums)
      for (size_t at = 0; at < bytes; at++) out[at] += (char)Isa::kOffset;
    if (to.type == inflight::kInt8)
      for (size_t group = 0; group < bytes; group += group_bytes(to))
        for (int at = 0; at < kPanel * Isa::kGroup; at++) out[group + header_bytes(to.type) + at] += (char)Isa::kOffset;
  }
}

}  // namespace
