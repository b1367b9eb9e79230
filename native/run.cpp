// The phases of a step.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace inflight {

Model::Model(const InflightSpec& spec, const Kernels& kernels, int threads)
    : spec_(spec), kernels_(kernels), pool_(threads), layers_(spec.layers), ropes_(spec.ropes),
      hidden_(row_stride(spec.hidden)), logits_width_(row_stride(spec.vocabulary)), scratch_(threads),
      slot_scratch_(threads), drawing_(threads), choosing_(threads) {
  for (int i = 0; i < spec.ropes; i++) {
    const InflightRope& rope = spec.rope[i];
    ropes_[i].frequencies.assign(rope.frequencies, rope.frequencies + rope.dim / 2);
    ropes_[i].scale = rope.scale;
  }
  for (int i = 0; i < spec.layers; i++) {
    const InflightLayer& one = (InflightLayer&)layers_[i] = spec.layer[i];
    const InflightExperts& experts = one.experts;
    heads_ = std::max(heads_, row_stride((int64_t)(one.heads + 2 * one.kv_heads) * one.head_dim));
    attended_ = std::max(attended_, row_stride((int64_t)one.heads * one.head_dim));
    inner_ = std::max(inner_, row_stride(one.intermediate));
    if (!experts.count) continue;
    inner_ = std::max(inner_, row_stride(experts.intermediate));
    scores_width_ = std::max(scores_width_, row_stride(experts.count + 1));
    most_rows_ = std::max(most_rows_, experts.per_token + (one.intermediate > 0));
    layers_[i].parts.gate_up = std::vector<Weight>(experts.count);
    layers_[i].parts.down = std::vector<Weight>(experts.count);
  }
  spec_.rope = nullptr;  // they are the caller's
  spec_.layer = nullptr;
}

InputRows Model::input_rows(const Weight& weight) {
  InputRows rows;
  rows.data = inputs_.data();
  rows.stride = row_stride(weight.inputs) * 4;
  return rows;
}

void Model::prepare(const Weight& weight, float* rows, int64_t stride, int count, const float* gain) {
  const InputRows to = input_rows(weight);
  each_row(count, [&](int row) {
    clear_tail(rows + row * stride, weight.inputs);
    kernels_.prepare(weight, rows + row * stride, gain, spec_.eps, 1.0f, to, row);
  });
}

void Model::multiply(const Weight& weight, int count, Ending ending, float* outputs, int64_t stride) {
  const InputRows rows = input_rows(weight);
  const int panels = weight.columns / kernels_.panel, each = kernels_.panels_at_once;
  const int groups = (panels + each - 1) / each;
  pool_.run(weight.tasks, [&](int task, int) {
    auto bound = [&](int at) { return std::min(panels, (int)((int64_t)groups * at / weight.tasks) * each); };
    kernels_.multiply(weight, rows, count, bound(task), bound(task + 1), ending, outputs, stride);
  });
}

void Model::embed(int id, float* to) const {
  const int64_t at = (int64_t)id * spec_.hidden;
  memset(to + spec_.hidden, 0, (hidden_ - spec_.hidden) * sizeof(float));  // products have left there what is no number
  for (int k = 0; k < spec_.hidden; k++) {
    if (spec_.embedding_type == kFloat32) {
      to[k] = ((const float*)spec_.embedding)[at + k] * spec_.embedding_scale;
    } else {
      const uint32_t bits = (uint32_t)((const uint16_t*)spec_.embedding)[at + k] << 16;
      float value;
      memcpy(&value, &bits, 4);
      to[k] = value * spec_.embedding_scale;
    }
  }
}

void Model::place(const InflightStep& step) {
  positions_.clear();
  slots_.clear();
  first_of_range_.clear();
  for (int i = 0; i < step.ranges; i++) {
    const InflightRange& range = step.range[i];
    first_of_range_.push_back((int32_t)positions_.size());
    for (int token = 0; token < range.count; token++) {
      positions_.push_back(range.start + token);
      slots_.push_back(slot(range, range.at + token));
    }
  }
  for (Rope& rope : ropes_) {
    const int64_t half = rope.frequencies.size();
    float *cos = rope.cos.need(step.tokens * half), *sin = rope.sin.need(step.tokens * half);
    pool_.run(step.tokens, [&](int token, int) {
      for (int64_t i = 0; i < half; i++) {
        const float angle = (float)positions_[token] * rope.frequencies[i];
        cos[token * half + i] = std::cos(angle) * rope.scale;
        sin[token * half + i] = std::sin(angle) * rope.scale;
      }
    });
  }
}

void Model::rotate_and_store(int layer, int token) {
  Layer& one = layers_[layer];
  float* row = qkv_.data() + token * heads_;
  normalize_heads(one, row, one.heads, INFLIGHT_QUERY_NORM);
  normalize_heads(one, row + one.heads * one.head_dim, one.kv_heads, INFLIGHT_KEY_NORM);
  if (one.rope >= 0) {
    Rope& rope = ropes_[one.rope];
    const int half = (int)rope.frequencies.size();
    const float *cos = rope.cos.data() + (int64_t)token * half, *sin = rope.sin.data() + (int64_t)token * half;
    for (int head = 0; head < one.heads + one.kv_heads; head++)
      kernels_.rotate(row + head * one.head_dim, cos, sin, half, one.interleaved);
  }
  if (one.query_length) {
    const float steps = std::floor(((float)positions_[token] + one.query_offset) / one.query_length);
    const float scale = 1.0f + one.query_beta * std::log1p(steps);
    for (int k = 0; k < one.heads * one.head_dim; k++) row[k] *= scale;
  }
  store(layer, token);
}

void Model::normalize_heads(Layer& layer, float* heads, int count, int norm) {
  const float* gain = layer.vectors[norm].data();
  if (!gain) return;
  if (layer.width_norm) return kernels_.normalize(heads, gain, spec_.eps, count * layer.head_dim);
  for (int head = 0; head < count; head++) kernels_.normalize(heads + head * layer.head_dim, gain, spec_.eps, layer.head_dim);
}

void Model::store(int layer, int token) {
  const Layer& one = layers_[layer];
  const InflightLayerCache& cache = caches_[layer];
  const int dim = one.head_dim;
  const Type type = (Type)cache_.type;
  const float key_scale = type == kE4m3 ? *(const float*)cache.key_scales : 1.0f;
  const float value_scale = type == kE4m3 ? *(const float*)cache.value_scales : 1.0f;
  for (int head = 0; head < one.kv_heads; head++) {
    const int64_t place = head * cache_.slots + slots_[token];
    const float *key = qkv_.data() + token * heads_ + (one.heads + head) * dim, *value = key + one.kv_heads * dim;
    char* keys = (char*)cache.keys + place * dim * bytes_of(type);
    char* values = (char*)cache.values + place * dim * bytes_of(type);
    kernels_.store(type, key, key_scale, keys, type == kInt8 ? (uint16_t*)cache.key_scales + place : nullptr, dim);
    kernels_.store(type, value, value_scale, values, type == kInt8 ? (uint16_t*)cache.value_scales + place : nullptr,
                   dim);
  }
}

void Model::add(const Weight& weight, int tokens, const float* gain) {
  if (!gain) return multiply(weight, tokens, kAdd, x_.data(), hidden_);
  multiply(weight, tokens, kStore, product_.data(), hidden_);
  pool_.run(tokens, [&](int token, int) {
    kernels_.add_normalized(x_.data() + token * hidden_, product_.data() + token * hidden_, gain, spec_.eps,
                            spec_.hidden);
  });
}

void Model::run(const InflightStep& step) {
  check(step);
  step_tokens_ = 0;
  const int64_t tokens = step.tokens, rows = tokens * most_rows_, most = std::max<int64_t>(rows, step.rows);
  const int64_t widest = std::max({hidden_, attended_, inner_});
  x_.need(tokens * hidden_);
  qkv_.need(tokens * heads_);
  attention_.need(tokens * attended_);
  gated_.need(rows * inner_);
  product_.need(tokens * hidden_);
  if (scores_width_) {
    scores_.need(tokens * scores_width_);
    made_.need(rows * hidden_);
  }
  inputs_.need(most * widest * 4);
  lap_ = std::chrono::steady_clock::now();
  place(step);
  pool_.run(step.tokens, [&](int token, int) { embed(step.ids[token], x_.data() + token * hidden_); });
  lap(kEmbed);
  for (int layer = 0; layer < spec_.layers; layer++) compute_layer(step, layer);
  step_tokens_ = step.tokens;
  if (step.rows) compute_logits(step.rows, step.row, step.logits);
}

void Model::logits(int rows, const int32_t* row, float* logits) {
  check_rows(rows, row, step_tokens_);
  if (!rows) return;
  inputs_.need(rows * std::max({hidden_, attended_, inner_}) * 4);
  lap_ = std::chrono::steady_clock::now();
  compute_logits(rows, row, logits);
}

void Model::hidden(int rows, const int32_t* row, float* hidden) {
  check_rows(rows, row, step_tokens_);
  lap_ = std::chrono::steady_clock::now();
  pool_.run(rows, [&](int index, int) {
    float* to = hidden + (int64_t)index * spec_.hidden;
    memcpy(to, x_.data() + row[index] * hidden_, spec_.hidden * sizeof(float));
    if (last_norm_.data()) kernels_.normalize(to, last_norm_.data(), spec_.eps, spec_.hidden);
  });
  lap(kNorm);
}

void Model::compute_layer(const InflightStep& step, int layer) {
  Layer& one = layers_[layer];
  const int tokens = step.tokens;
  prepare(one.qkv, x_.data(), hidden_, tokens, one.vectors[INFLIGHT_INPUT_NORM].data());
  lap(kNorm);
  multiply(one.qkv, tokens, kStore, qkv_.data(), heads_);
  lap(kQkv);
  pool_.run(tokens, [&](int token, int) { rotate_and_store(layer, token); });
  lap(kRotateStore);
  if (layer == 0 || !one.attends_as(layers_[layer - 1])) plan(step, one);
  attend_all(step, layer);
  lap(kAttention);
  prepare(one.output, attention_.data(), attended_, tokens, nullptr);
  lap(kAttended);
  add(one.output, tokens, one.vectors[INFLIGHT_ATTENTION_NORM].data());
  lap(kOutput);
  if (one.experts.count) return compute_experts(one, tokens);
  prepare(one.gate_up, x_.data(), hidden_, tokens, one.vectors[INFLIGHT_MLP_NORM].data());
  lap(kNorm);
  multiply(one.gate_up, tokens, spec_.gelu ? kGelu : kSilu, gated_.data(), inner_);
  lap(kGateUp);
  prepare(one.down, gated_.data(), inner_, tokens, nullptr);
  add(one.down, tokens, one.vectors[INFLIGHT_MLP_OUTPUT_NORM].data());
  lap(kDown);
}

void Model::compute_logits(int rows, const int32_t* row, float* made) {
  const InputRows to = input_rows(head_);
  pool_.run(rows, [&](int index, int) {
    kernels_.prepare(head_, x_.data() + row[index] * hidden_, last_norm_.data(), spec_.eps, 1.0f, to, index);
  });
  // Panels are written as a whole: where the last one is wider than what is left, it must not reach the next row.
  if (head_.columns == spec_.vocabulary && !(spec_.logit_softcap > 0.0f)) {
    multiply(head_, rows, kStore, made, spec_.vocabulary);
  } else {
    float* logits = logits_.need(rows * logits_width_);
    multiply(head_, rows, kStore, logits, logits_width_);
    const int parts = (spec_.vocabulary + kLogitsOfTask - 1) / kLogitsOfTask;
    pool_.run(rows * parts, [&](int task, int) {
      const int64_t index = task / parts, first = (int64_t)(task % parts) * kLogitsOfTask;
      const int size = (int)std::min<int64_t>(kLogitsOfTask, spec_.vocabulary - first);
      float* from = logits + index * logits_width_ + first;
      if (spec_.logit_softcap > 0.0f) kernels_.squeeze(from, spec_.logit_softcap, size);
      memcpy(made + index * spec_.vocabulary + first, from, size * sizeof(float));
    });
  }
  lap(kLogits);
}

void Model::lap(Phase phase) {
  const auto now = std::chrono::steady_clock::now();
  seconds[phase] += std::chrono::duration<double>(now - lap_).count();
  lap_ = now;
}

}  // namespace inflight
