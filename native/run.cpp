// The phases of a step.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace inflight {

Model::Model(const InflightSpec& spec, const Kernels& kernels, int threads)
    : spec_(spec), kernels_(kernels), pool_(threads), layers_(spec.layers), ropes_(spec.ropes),
      windows_(spec.windows, spec.windows + spec.layers),
      rope_of_layer_(spec.rope_of_layer, spec.rope_of_layer + spec.layers), hidden_(row_stride(spec.hidden)),
      heads_(row_stride((int64_t)(spec.heads + 2 * spec.kv_heads) * spec.head_dim)),
      attended_(row_stride((int64_t)spec.heads * spec.head_dim)), inner_(row_stride(spec.intermediate)),
      logits_width_(row_stride(spec.vocabulary)), scratch_(threads), slot_scratch_(threads), drawing_(threads) {
  for (int i = 0; i < spec.ropes; i++) {
    const InflightRope& rope = spec.rope[i];
    if (rope.dim < 0 || rope.dim > spec.head_dim || rope.dim % 2)
      fail("%d of %d dimensions are rotated", rope.dim, spec.head_dim);
    ropes_[i].frequencies.assign(rope.frequencies, rope.frequencies + rope.dim / 2);
    ropes_[i].scale = rope.scale;
  }
  for (int rope : rope_of_layer_)
    if (rope < 0 || rope >= spec.ropes) fail("there is no rotary embedding %d", rope);
}

InputRows Model::input_rows(const Weight& weight) {
  InputRows rows;
  rows.data = inputs_.data();
  rows.stride = row_stride(weight.inputs) * 4;
  return rows;
}

void Model::prepare(const Weight& weight, const float* rows, int64_t stride, int count, const float* gain) {
  const InputRows to = input_rows(weight);
  const int each = std::max(1, std::min(16, count / (2 * pool_.threads())));
  pool_.run((count + each - 1) / each, [&](int task, int) {
    for (int row = task * each; row < std::min(count, (task + 1) * each); row++)
      kernels_.prepare(weight, rows + row * stride, gain, spec_.eps, to, row);
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
  Rope& rope = ropes_[rope_of_layer_[layer]];
  const int dim = spec_.head_dim, half = (int)rope.frequencies.size();
  const float *cos = rope.cos.data() + (int64_t)token * half, *sin = rope.sin.data() + (int64_t)token * half;
  const float* query_norm = spec_.head_norms ? one.norms[INFLIGHT_QUERY_NORM].data() : nullptr;
  const float* key_norm = spec_.head_norms ? one.norms[INFLIGHT_KEY_NORM].data() : nullptr;
  float* row = qkv_.data() + token * heads_;
  for (int head = 0; head < spec_.heads + spec_.kv_heads; head++)
    kernels_.rotate(row + head * dim, head < spec_.heads ? query_norm : key_norm, spec_.eps, cos, sin, half, dim);
  const Type type = (Type)cache_.type;
  const float key_scale = type == kE4m3 ? cache_.layer_key_scales[layer] : 1.0f;
  const float value_scale = type == kE4m3 ? cache_.layer_value_scales[layer] : 1.0f;
  for (int head = 0; head < spec_.kv_heads; head++) {
    const int64_t place = ((int64_t)layer * spec_.kv_heads + head) * cache_.slots + slots_[token];
    const float *key = row + (spec_.heads + head) * dim, *value = key + spec_.kv_heads * dim;
    char* keys = (char*)cache_.keys + place * dim * bytes_of(type);
    char* values = (char*)cache_.values + place * dim * bytes_of(type);
    kernels_.store(type, key, key_scale, keys, type == kInt8 ? cache_.key_scales + place : nullptr, dim);
    kernels_.store(type, value, value_scale, values, type == kInt8 ? cache_.value_scales + place : nullptr, dim);
  }
}

void Model::add(const Weight& weight, int tokens, const float* gain) {
  if (!spec_.output_norms) return multiply(weight, tokens, kAdd, x_.data(), hidden_);
  multiply(weight, tokens, kStore, product_.data(), hidden_);
  pool_.run(tokens, [&](int token, int) {
    kernels_.add_normalized(x_.data() + token * hidden_, product_.data() + token * hidden_, gain, spec_.eps,
                            spec_.hidden);
  });
}

void Model::run(const InflightStep& step) {
  check(step);
  const int64_t tokens = step.tokens, most = std::max(step.tokens, step.rows);
  const int64_t widest = std::max({hidden_, attended_, inner_});
  x_.need(tokens * hidden_);
  qkv_.need(tokens * heads_);
  attention_.need(tokens * attended_);
  gated_.need(tokens * inner_);
  if (spec_.output_norms) product_.need(tokens * hidden_);
  inputs_.need(most * widest * 4);
  lap_ = std::chrono::steady_clock::now();
  place(step);
  pool_.run(step.tokens, [&](int token, int) { embed(step.ids[token], x_.data() + token * hidden_); });
  lap(kEmbed);
  for (int layer = 0; layer < spec_.layers; layer++) compute_layer(step, layer);
  if (step.rows) compute_logits(step);
}

void Model::compute_layer(const InflightStep& step, int layer) {
  Layer& one = layers_[layer];
  const int tokens = step.tokens;
  prepare(one.qkv, x_.data(), hidden_, tokens, one.norms[INFLIGHT_INPUT_NORM].data());
  lap(kNorm);
  multiply(one.qkv, tokens, kStore, qkv_.data(), heads_);
  lap(kQkv);
  pool_.run(tokens, [&](int token, int) { rotate_and_store(layer, token); });
  lap(kRotateStore);
  if (layer == 0 || windows_[layer] != windows_[layer - 1]) plan(step, windows_[layer]);
  attend_all(step, layer);
  lap(kAttention);
  prepare(one.output, attention_.data(), attended_, tokens, nullptr);
  lap(kAttended);
  add(one.output, tokens, one.norms[INFLIGHT_ATTENTION_NORM].data());
  lap(kOutput);
  prepare(one.gate_up, x_.data(), hidden_, tokens, one.norms[INFLIGHT_MLP_NORM].data());
  lap(kNorm);
  multiply(one.gate_up, tokens, spec_.gelu ? kGelu : kSilu, gated_.data(), inner_);
  lap(kGateUp);
  prepare(one.down, gated_.data(), inner_, tokens, nullptr);
  add(one.down, tokens, one.norms[INFLIGHT_MLP_OUTPUT_NORM].data());
  lap(kDown);
}

void Model::compute_logits(const InflightStep& step) {
  const InputRows to = input_rows(head_);
  pool_.run(step.rows, [&](int row, int) {
    kernels_.prepare(head_, x_.data() + step.row[row] * hidden_, last_norm_.data(), spec_.eps, to, row);
  });
  // Panels are written as a whole: where the last one is wider than what is left, it must not reach the next row.
  if (head_.columns == spec_.vocabulary) {
    multiply(head_, step.rows, kStore, step.logits, spec_.vocabulary);
  } else {
    float* logits = logits_.need(step.rows * logits_width_);
    multiply(head_, step.rows, kStore, logits, logits_width_);
    pool_.run(step.rows, [&](int row, int) {
      memcpy(step.logits + (int64_t)row * spec_.vocabulary, logits + row * logits_width_, spec_.vocabulary * 4);
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
