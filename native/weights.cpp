// How a model takes its weights: they are packed once, in the order in which products read them.
#include "model.h"

#include <algorithm>
#include <vector>

namespace inflight {

Weight& Model::weight(int layer, int which) {
  if (which == INFLIGHT_HEAD) return head_;
  if (layer < 0 || layer >= spec_.layers) fail("there is no layer %d", layer);
  Layer& one = layers_[layer];
  switch (which) {
    case INFLIGHT_QKV: return one.qkv;
    case INFLIGHT_OUTPUT: return one.output;
    case INFLIGHT_GATE_UP: return one.gate_up;
    case INFLIGHT_DOWN: return one.down;
  }
  fail("there is no weight %d", which);
}

void Model::set_weight(int layer, int which, const InflightWeight& from) {
  Weight& to = weight(layer, which);
  check_weight(from, layer, which);
  const int panel = kernels_.panel, half = panel / 2;
  const bool gate_up = which == INFLIGHT_GATE_UP;
  const int panels = gate_up ? (spec_.intermediate + half - 1) / half : (from.outputs + panel - 1) / panel;
  std::vector<int32_t> order(panels * panel, -1);
  for (int i = 0; i < panels * panel; i++) {
    if (!gate_up) {
      if (i < from.outputs) order[i] = i;
      continue;
    }
    const int column = i / panel * half + i % half;  // gates first, then what they are multiplied with
    if (column < spec_.intermediate) order[i] = column + (i % panel >= half ? spec_.intermediate : 0);
  }
  to.type = (Type)from.packed_type;
  to.inputs = from.inputs;
  to.columns = panels * panel;
  to.group = to.type == kInt8Columns && !from.group ? kWordGroup : from.group;
  to.input_scale = from.input_scale;
  to.panels = to.memory.need(kernels_.packed_bytes(to));
  to.scales = to.type == kE4m3 || to.type == kInt8Sums ? to.column_scales.need(to.columns) : nullptr;
  to.smooth = nullptr;
  if (from.smooth)
    to.smooth = (float*)memcpy(to.smoothing.need(round_up(to.inputs, kAlign)), from.smooth, to.inputs * sizeof(float));
  to.bias = nullptr;
  if (from.bias) {
    float* bias = to.biases.need(to.columns);
    for (int i = 0; i < to.columns; i++) bias[i] = order[i] < 0 ? 0.0f : from.bias[order[i]];
    to.bias = bias;
  }
  pool_.run(panels, [&](int task, int) {
    const int groups = from.group ? from.inputs / from.group : 1;
    kernels_.pack(to, {(Type)from.type, from.source, from.scales, from.minimums, groups}, order.data(), task, task + 1);
  });
  // Some tasks for each thread, of whole groups of panels that few rows take at once.
  to.tasks = std::min((panels + kernels_.panels_at_once - 1) / kernels_.panels_at_once, 8 * pool_.threads());
}

void Model::set_norm(int layer, int which, const float* gain) {
  const bool of_head = which == INFLIGHT_QUERY_NORM || which == INFLIGHT_KEY_NORM;
  const int size = of_head ? spec_.head_dim : spec_.hidden;
  if (which != INFLIGHT_LAST_NORM && (layer < 0 || layer >= spec_.layers || which < 0 || which > INFLIGHT_LAST_NORM))
    fail("there is no norm %d of layer %d", which, layer);
  Buffer<float>& norm = which == INFLIGHT_LAST_NORM ? last_norm_ : layers_[layer].norms[which];
  memcpy(norm.need(round_up(size, kAlign)), gain, size * sizeof(float));
}

void Model::set_cache(const InflightCache& cache) {
  if (cache.type < kFloat32 || cache.type > kE4m3 || cache.block_size < 1 || cache.slots < cache.block_size ||
      cache.slots % cache.block_size || cache.slots > INT32_MAX)
    fail("a cache of %lld slots of type %d in blocks of %d", (long long)cache.slots, cache.type, cache.block_size);
  if (cache.type == kInt8 && spec_.head_dim > 512)  // products of bytes and words are added up in 32 bits
    fail("a cache in INT8 of heads of %d dimensions; at most 512 can be added up", spec_.head_dim);
  cache_ = cache;
}

}  // namespace inflight
