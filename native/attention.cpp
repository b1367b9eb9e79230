// Attention as tasks of the pool: which tokens, heads and keys each has, and how their results are merged.
#include "model.h"

#include <algorithm>
#include <cmath>

namespace inflight {

void Model::plan(const InflightStep& step, const Layer& layer) {
  attending_.clear();
  const int group = layer.group(), most = std::max(1, kTaskRows / group);
  int64_t total = 0;
  for (int i = 0; i < step.ranges; i++)
    total += (int64_t)((step.range[i].count + most - 1) / most) * layer.kv_heads;
  const bool split = total < 4 * pool_.threads();
  int64_t partial = 0;
  for (int i = 0; i < step.ranges; i++) {
    const InflightRange& one = step.range[i];
    for (int token = 0; token < one.count; token += most) {
      const int tokens = std::min(most, one.count - token);
      const int begin = layer.first_key(one.start + token) / kCut;
      const int end = (one.start + token + tokens + kCut - 1) / kCut;
      for (int head = 0; head < layer.kv_heads; head++) {
        if (!split || end - begin == 1) {
          attending_.push_back({i, token, tokens, head, begin, end, -1});
          continue;
        }
        for (int cut = begin; cut < end; cut++, partial += tokens * group)
          attending_.push_back({i, token, tokens, head, cut, cut + 1, partial});
      }
    }
  }
  if (!split)
    std::stable_sort(attending_.begin(), attending_.end(), [](const Attending& a, const Attending& b) {
      return (int64_t)a.tokens * (a.cut_end - a.cut_begin) > (int64_t)b.tokens * (b.cut_end - b.cut_begin);
    });
  const int64_t wide = round_up(layer.head_dim, kAlign);
  partial_outputs_.need(partial * wide);
  partials_.need(partial);
}

void Model::attend(const InflightStep& step, int layer, const Attending& part, int thread) {
  const InflightRange& range = step.range[part.range];
  const Layer& one = layers_[layer];
  const InflightLayerCache& cache = caches_[layer];
  const int group = one.group(), dim = one.head_dim;
  const int64_t wide = round_up(dim, kernels_.panel), rows = (int64_t)part.tokens * group;
  int32_t* slots = slot_scratch_[thread].need(2 * part.tokens + (size_t)(part.cut_end - part.cut_begin) * kCut);
  int32_t *first = slots, *last = slots + part.tokens;
  slots += 2 * part.tokens;
  const int from = part.cut_begin * kCut, until = std::min(part.cut_end * kCut, range.start + part.token + part.tokens);
  for (int token = 0; token < part.tokens; token++) {
    last[token] = range.start + part.token + token + 1;
    first[token] = one.first_key(last[token] - 1);
  }
  for (int key = from; key < until; key++)
    slots[key - from] = slot(range, range.path && key >= range.trunk ? range.path[key - range.trunk] : key);
  const Type type = (Type)cache_.type;
  const int64_t first_slot = part.kv_head * cache_.slots;
  const int size = bytes_of(type);
  AttendTask task;
  const int64_t token = (int64_t)first_of_range_[part.range] + part.token;
  task.queries = qkv_.data() + token * heads_ + (int64_t)part.kv_head * group * dim;
  task.token_stride = heads_;
  task.tokens = part.tokens;
  task.group = group;
  task.slots = slots - from;
  task.first = first;
  task.last = last;
  task.dim = dim;
  task.scale = one.scale;
  task.softcap = one.softcap;
  task.cache.keys = (const char*)cache.keys + first_slot * dim * size;
  task.cache.values = (const char*)cache.values + first_slot * dim * size;
  if (type == kInt8) {
    task.cache.key_scales = (const uint16_t*)cache.key_scales + first_slot;
    task.cache.value_scales = (const uint16_t*)cache.value_scales + first_slot;
  }
  if (type == kE4m3) task.cache.key_scale = *(const float*)cache.key_scales;
  task.cut_begin = part.cut_begin;
  task.cut_end = part.cut_end;
  const size_t own = rows * wide * sizeof(float) + rows * sizeof(Partial) + 64;
  char* memory = scratch_[thread].need(kernels_.attend_scratch(kTaskRows + group, dim) + own);
  float* outputs = (float*)memory;
  Partial* results = (Partial*)(memory + rows * wide * sizeof(float));
  if (part.partials >= 0) {
    outputs = partial_outputs_.data() + part.partials * wide;
    results = partials_.data() + part.partials;
  }
  kernels_.attend(task, type, memory + round_up(own, 64), outputs, results);
  if (part.partials < 0) finish(layer, part, outputs, results);
}

void Model::finish(int layer, const Attending& part, const float* outputs, const Partial* results) {
  Layer& one = layers_[layer];
  const int group = one.group(), dim = one.head_dim;
  const int64_t wide = round_up(dim, kernels_.panel);
  const float scale = cache_.type == kE4m3 ? *(const float*)caches_[layer].value_scales : 1.0f;
  const float* sinks = one.vectors[INFLIGHT_SINKS].data();
  for (int row = 0; row < part.tokens * group; row++) {
    const int64_t token = (int64_t)first_of_range_[part.range] + part.token + row / group;
    const int64_t head = (int64_t)part.kv_head * group + row % group;
    Partial result = results[row];
    if (sinks) result.sum += std::exp(sinks[head] - result.largest);  // infinity where it takes all
    kernels_.finish(outputs + row * wide, result, scale, attention_.data() + token * attended_ + head * dim, dim);
  }
}

void Model::attend_all(const InflightStep& step, int layer) {
  pool_.run((int)attending_.size(), [&](int task, int thread) { attend(step, layer, attending_[task], thread); });
  // Cuts are merged in ascending order, whoever has computed them.
  const int group = layers_[layer].group(), dim = layers_[layer].head_dim;
  const int64_t wide = round_up(dim, kernels_.panel);
  for (size_t at = 0; at < attending_.size();) {
    const Attending& first = attending_[at];
    size_t next = at + 1;
    if (first.partials >= 0) {
      float* outputs = partial_outputs_.data() + first.partials * wide;
      Partial* results = partials_.data() + first.partials;
      for (; next < attending_.size() && attending_[next].cut_begin == attending_[next - 1].cut_end &&
             attending_[next].kv_head == first.kv_head && attending_[next].token == first.token &&
             attending_[next].range == first.range;
           next++)
        for (int row = 0; row < first.tokens * group; row++) {
          const int64_t other = attending_[next].partials + row;
          if (partials_.data()[other].sum != 0.0f || std::isnan(partials_.data()[other].sum))
            kernels_.merge(outputs + row * wide, &results[row], partial_outputs_.data() + other * wide,
                          partials_.data()[other], dim);
        }
      finish(layer, first, outputs, results);
    }
    at = next;
  }
}

}  // namespace inflight
