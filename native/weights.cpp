// How a model takes its weights: they are packed once, in the order in which products read them.
#include "model.h"

#include <algorithm>
#include <vector>

namespace inflight {

Weight& Model::weight(int layer, int which, int expert) {
  if (which == INFLIGHT_HEAD) return head_;
  if (layer < 0 || layer >= spec_.layers) fail("there is no layer %d", layer);
  Layer& one = layers_[layer];
  const bool of_expert = which == INFLIGHT_EXPERT_GATE_UP || which == INFLIGHT_EXPERT_DOWN;
  if (expert < 0 || expert >= (of_expert ? one.experts.count : 1)) fail("layer %d has no expert %d", layer, expert);
  switch (which) {
    case INFLIGHT_QKV: return one.qkv;
    case INFLIGHT_OUTPUT: return one.output;
    case INFLIGHT_GATE_UP: return one.gate_up;
    case INFLIGHT_DOWN: return one.down;
    case INFLIGHT_ROUTER: return one.parts.router;
    case INFLIGHT_EXPERT_GATE_UP: return one.parts.gate_up[expert];
    case INFLIGHT_EXPERT_DOWN: return one.parts.down[expert];
  }
  fail("there is no weight %d", which);
}

void Model::set_weight(int layer, int which, int expert, const InflightWeight& from) {
  Weight& to = weight(layer, which, expert);
  check_weight(from, layer, which);
  const int panel = kernels_.panel, half = panel / 2, inner = from.outputs / 2;
  const bool gate_up = which == INFLIGHT_GATE_UP || which == INFLIGHT_EXPERT_GATE_UP;
  const int panels = gate_up ? (inner + half - 1) / half : (from.outputs + panel - 1) / panel;
  std::vector<int32_t> order(panels * panel, -1);
  for (int i = 0; i < panels * panel; i++) {
    if (!gate_up) {
      if (i < from.outputs) order[i] = i;
      continue;
    }
    const int column = i / panel * half + i % half;  // gates first, then what they are multiplied with
    if (column < inner) order[i] = column + (i % panel >= half ? inner : 0);
  }
  to.type = (Type)from.packed_type;
  to.inputs = from.inputs;
  to.columns = panels * panel;
  to.group = packed_group(from);
  to.input_scale = from.input_scale;
  to.input_group = from.input_group;
  to.panels = panels_of(to, layer, which, expert);
  to.scales = nullptr;
  if (to.type == kE4m3 || to.type == kInt8Sums) to.scales = to.column_scales.need(to.columns);
  if (to.type == kE4m3Groups) to.scales = to.column_scales.need(to.columns * (int64_t)scale_groups(to));
  to.smooth = nullptr;
  if (from.smooth)
    to.smooth = (float*)memcpy(to.smoothing.need(round_up(to.inputs, kAlign)), from.smooth, to.inputs * sizeof(float));
  to.bias = nullptr;
  if (from.bias) {
    float* bias = to.biases.need(to.columns);
    for (int i = 0; i < to.columns; i++) bias[i] = order[i] < 0 ? 0.0f : from.bias[order[i]];
    to.bias = bias;
  }
  if (which == INFLIGHT_EXPERT_GATE_UP) {
    to.limit = layers_[layer].experts.limit;
    to.slope = layers_[layer].experts.slope;
  }
  pool_.run(panels, [&](int task, int) {
    const int groups = from.group ? (from.inputs + from.group - 1) / from.group : 1;
    kernels_.pack(to, {(Type)from.type, from.source, from.scales, from.minimums, groups}, order.data(), task, task + 1);
  });
  // Some tasks for each thread, of whole groups of panels that few rows take at once.
  to.tasks = std::min((panels + kernels_.panels_at_once - 1) / kernels_.panels_at_once, 8 * pool_.threads());
}

// Where a weight's panels lie: the experts' all in one memory.
char* Model::panels_of(Weight& to, int layer, int which, int expert) {
  const size_t bytes = kernels_.packed_bytes(to);
  if (which != INFLIGHT_EXPERT_GATE_UP && which != INFLIGHT_EXPERT_DOWN) return to.memory.need(bytes);
  Experts& all = layers_[layer].parts;
  Buffer<char>& memory = which == INFLIGHT_EXPERT_DOWN ? all.down_memory : all.gate_up_memory;
  const size_t each = round_up(bytes, kAlign * sizeof(float));
  return memory.need(each * layers_[layer].experts.count) + each * expert;
}

void Model::set_vector(int layer, int which, const float* values) {
  if (which != INFLIGHT_LAST_NORM && (layer < 0 || layer >= spec_.layers || which < 0 || which > INFLIGHT_LAST_NORM))
    fail("there is no vector %d of layer %d", which, layer);
  int size = spec_.hidden;
  if (which != INFLIGHT_LAST_NORM) {
    const Layer& one = layers_[layer];
    if (which == INFLIGHT_QUERY_NORM) size = one.head_dim * (one.width_norm ? one.heads : 1);
    if (which == INFLIGHT_KEY_NORM) size = one.head_dim * (one.width_norm ? one.kv_heads : 1);
    if (which == INFLIGHT_SINKS) size = one.heads;
    if (which == INFLIGHT_CORRECTION) size = one.experts.count;
    if (size == 0) fail("layer %d has no experts", layer);
  }
  Buffer<float>& to = which == INFLIGHT_LAST_NORM ? last_norm_ : layers_[layer].vectors[which];
  memcpy(to.need(round_up(size, kAlign)), values, size * sizeof(float));
}

void Model::set_cache(const InflightCache& cache) {
  if (cache.type < kFloat32 || cache.type > kE4m3 || cache.block_size < 1 || cache.slots < cache.block_size ||
      cache.slots % cache.block_size || cache.slots > INT32_MAX)
    fail("a cache of %lld slots of type %d in blocks of %d", (long long)cache.slots, cache.type, cache.block_size);
  for (const Layer& one : layers_)
    if (cache.type == kInt8 && one.head_dim > 512)  // products of bytes and words are added up in 32 bits
      fail("a cache in INT8 of heads of %d dimensions; at most 512 can be added up", one.head_dim);
  cache_ = cache;
  caches_.assign(cache.layer, cache.layer + spec_.layers);
  cache_.layer = nullptr;  // it is the caller's
}

}  // namespace inflight
