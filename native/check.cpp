// What weights and steps are checked for before any kernel sees them.
#include <cmath>

#include "model.h"

namespace inflight {

namespace {

// What a weight of a type may be packed as.
bool can_pack(int from, int to) {
  switch (from) {
    case kFloat32:
    case kBfloat16: return to == from || to == kInt8;
    case kInt8: return to == kInt8Columns || to == kInt8Sums || to == kInt8Minimums;
    case kE4m3: return to == from || to == kE4m3Groups;
    case kInt4: return to == from || to == kInt4Minimums;
    case kMxfp4: return to == from;
  }
  return false;
}

// Whether inputs are rounded in a way that the packed type has.
bool rounds_inputs(const InflightWeight& from) {
  const bool floats = from.packed_type == kE4m3 || from.packed_type == kE4m3Groups;
  if (!floats && from.packed_type != kInt8Sums) return from.input_scale == 0.0f && from.input_group == 0;
  if (from.input_scale != 0.0f) return from.input_scale > 0.0f && from.input_scale < INFINITY && from.input_group == 0;
  if (from.input_group == 0) return floats;
  return from.input_group == from.inputs || (floats && from.input_group > 0 && from.input_group % kShortestGroup == 0);
}

// Whether weights share scales in a way that the packed type has.
bool has_groups(const InflightWeight& from) {
  const bool in_groups = from.group >= kShortestGroup && kLongestGroup % from.group == 0;
  const bool fits = in_groups && from.inputs % from.group == 0 && (from.type != kInt4 || from.outputs % 2 == 0);
  switch (from.packed_type) {
    case kInt4:
    case kInt4Minimums:
    case kInt8Minimums: return fits;
    case kInt8Columns: return fits || from.group == 0;
    case kMxfp4: return fits && from.group == kMxfp4Group;
    case kE4m3Groups: return from.group > 0;
    default: return from.group == 0;
  }
}

// Checks what goes with a weight of a quantized checkpoint, or must not go with another.
void check_quantized(const InflightWeight& from, int which) {
  const bool quantized = from.type != kFloat32 && from.type != kBfloat16;
  if (quantized != (from.scales != nullptr) || (from.smooth && !quantized))
    fail("weight %d has type %d, and scales that do not suit it", which, from.packed_type);
  if (!rounds_inputs(from))
    fail("weight %d has type %d, and inputs with a scale of %g, or of groups of %d", which, from.packed_type,
         from.input_scale, from.input_group);
  if (!has_groups(from))
    fail("weight %d of [%d, %d] has type %d in groups of %d", which, from.outputs, from.inputs, from.packed_type,
         from.group);
  if ((from.packed_type == kInt4Minimums || from.packed_type == kInt8Minimums) != (from.minimums != nullptr))
    fail("weight %d has type %d, and minimums that do not suit it", which, from.packed_type);
  if (from.packed_type == kInt8Sums && from.inputs >= kMostSummed)
    fail("weight %d has %d inputs; products of INT8 are added up of less than %d", which, from.inputs, kMostSummed);
}

}  // namespace

void Model::check_weight(const InflightWeight& from, int layer, int which) const {
  const Layer& one = layers_[which == INFLIGHT_HEAD ? 0 : layer];
  const InflightExperts& experts = one.experts;
  const int width = (one.heads + 2 * one.kv_heads) * one.head_dim, hidden = spec_.hidden;
  const int shapes[][2] = {{width, hidden},
                           {hidden, one.heads * one.head_dim},
                           {2 * one.intermediate, hidden},
                           {hidden, one.intermediate},
                           {spec_.vocabulary, hidden},
                           {experts.count + (experts.shared_gate ? 1 : 0), hidden},
                           {2 * experts.intermediate, hidden},
                           {hidden, experts.intermediate}};
  if (from.outputs != shapes[which][0] || from.inputs != shapes[which][1])
    fail("weight %d of layer %d is [%d, %d]; expected [%d, %d]", which, layer, from.outputs, from.inputs,
         shapes[which][0], shapes[which][1]);
  if (!can_pack(from.type, from.packed_type))
    fail("weight %d has type %d, to be packed as type %d", which, from.type, from.packed_type);
  check_quantized(from, which);
  // The memory of the experts' weights is divided evenly, by what the first one takes.
  for (const auto& [own, all] : {std::pair(INFLIGHT_EXPERT_GATE_UP, &one.parts.gate_up),
                                 std::pair(INFLIGHT_EXPERT_DOWN, &one.parts.down)})
    for (const Weight& other : *all)
      if (which == own && other.panels && (other.type != from.packed_type || other.group != packed_group(from)))
        fail("weight %d of an expert of layer %d has type %d in groups of %d; another's has type %d in groups of %d",
             which, layer, from.packed_type, packed_group(from), other.type, other.group);
}

void Model::check(const InflightStep& step) const {
  if (caches_.empty()) fail("there is no cache yet");
  if (step.tokens <= 0) fail("a step has %d tokens", step.tokens);
  for (int token = 0; token < step.tokens; token++)
    if (step.ids[token] < 0 || step.ids[token] >= spec_.vocabulary)
      fail("token %d is %d; the vocabulary has %d", token, step.ids[token], spec_.vocabulary);
  int64_t tokens = 0;
  for (int i = 0; i < step.ranges; i++) {
    check_range(step.range[i], i);
    tokens += step.range[i].count;
  }
  if (tokens != step.tokens) fail("the ranges have %lld tokens; the step has %d", (long long)tokens, step.tokens);
  check_rows(step.rows, step.row, step.tokens);
}

void Model::check_rows(int rows, const int32_t* row, int tokens) const {
  if (rows < 0) fail("%d rows", rows);
  for (int index = 0; index < rows; index++)
    if (row[index] < 0 || row[index] >= tokens) fail("row %d is token %d; the step has %d", index, row[index], tokens);
}

void Model::check_range(const InflightRange& range, int index) const {
  if (range.count <= 0 || range.start < 0 || range.at < 0 || range.num_blocks < 0)
    fail("range %d has %d tokens from position %d, stored at %d in %d blocks", index, range.count, range.start, range.at,
         range.num_blocks);
  const int64_t blocks = cache_.slots / cache_.block_size, room = (int64_t)range.num_blocks * cache_.block_size;
  const int64_t length = (int64_t)range.start + range.count;
  if ((int64_t)range.at + range.count > room || (!range.path && (range.at != range.start || length > room)))
    fail("range %d has tokens up to position %lld, stored from %d on; its blocks have room for %lld", index,
         (long long)length, range.at, (long long)room);
  for (int block = 0; block < range.num_blocks; block++)
    if (range.blocks[block] < 0 || range.blocks[block] >= blocks)
      fail("range %d has block %d; there are %lld", index, range.blocks[block], (long long)blocks);
  if (!range.path) return;
  if (range.count != 1 || range.trunk < 0 || range.trunk > range.start || range.trunk > room)
    fail("range %d has a path of %d tokens behind %d", index, range.count, range.trunk);
  for (int64_t key = range.trunk; key < length; key++)
    if (range.path[key - range.trunk] < 0 || range.path[key - range.trunk] >= room)
      fail("range %d has a key at %d; its blocks have room for %lld", index, range.path[key - range.trunk],
           (long long)room);
}

void Model::check_sample(const InflightSample& one, int row) const {
  if (!(one.temperature >= 0.0 && one.top_p > 0.0 && one.top_p <= 1.0 && one.min_p >= 0.0 && one.min_p <= 1.0 &&
        one.number >= 0.0 && one.number < 1.0 && one.top_k >= 0))
    fail("row %d is drawn with temperature %g, top_k %d, top_p %g, min_p %g by %g", row, one.temperature, one.top_k,
         one.top_p, one.min_p, one.number);
}

}  // namespace inflight
