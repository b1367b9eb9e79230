// Mixture of Experts: which rows go through which expert, and the products of all experts as one phase.
//
// What a token gets does not depend on who else is routed to its experts: a product adds up each row in one order, and
// what a token's experts give is added up from the best to the last, in float32.
#include "model.h"

#include <cmath>

namespace inflight {

namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Makes weights of scores, in place: exp(score - largest) / sum.
void softmax(float* scores, int count) {
  const float largest = *std::max_element(scores, scores + count);
  float sum = 0.0f;
  for (int i = 0; i < count; i++) sum += scores[i] = std::exp(scores[i] - largest);
  for (int i = 0; i < count; i++) scores[i] /= sum;
}

// Returns the first of the largest values that are not taken yet, and takes it.
int take_best(const float* values, char* taken, int count) {
  int best = -1;
  for (int i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  taken[best] = 1;
  return best;
}

// Takes the experts of all groups but those whose best experts add up to the most.
void take_other_groups(const InflightExperts& experts, Choosing& memory) {
  const int size = experts.count / experts.groups;
  memory.best.assign(experts.groups, 0.0f);
  std::vector<char>& taken = memory.taken;
  for (int group = 0; group < experts.groups; group++) {
    const float* values = memory.ranked.data() + group * size;
    for (int i = 0; i < experts.group_best; i++)
      memory.best[group] += values[take_best(values, taken.data() + group * size, size)];
  }
  taken.resize(experts.count + experts.groups, 0);
  char* chosen = taken.data() + experts.count;
  for (int i = 0; i < experts.groups_per_token; i++) take_best(memory.best.data(), chosen, experts.groups);
  for (int i = 0; i < experts.count; i++) taken[i] = !chosen[i / size];
}

}  // namespace

void Model::choose(const Layer& layer, const float* scores, Choice* choices, Choosing& memory) const {
  const InflightExperts& experts = layer.experts;
  const int count = experts.count, chosen = experts.per_token, routing = experts.routing;
  memory.weights.assign(scores, scores + count);
  memory.taken.assign(count, 0);
  float* weights = memory.weights.data();
  if (routing == INFLIGHT_SOFTMAX) softmax(weights, count);
  if (routing == INFLIGHT_SIGMOID)
    for (int i = 0; i < count; i++) weights[i] = sigmoid(weights[i]);
  memory.ranked = memory.weights;
  if (const float* correction = layer.vectors[INFLIGHT_CORRECTION].data())
    for (int i = 0; i < count; i++) memory.ranked[i] += correction[i];
  if (experts.groups > 1) take_other_groups(experts, memory);
  for (int i = 0; i < chosen; i++) {
    const int expert = take_best(memory.ranked.data(), memory.taken.data(), count);
    choices[i] = {expert, 0, weights[expert]};
  }
  for (int i = 0; i < chosen; i++) weights[i] = choices[i].weight;
  if (routing == INFLIGHT_CHOSEN_SOFTMAX) softmax(weights, chosen);
  float sum = 1e-20f;  // as PyTorch's models have it: the weights may all be zero
  for (int i = 0; i < chosen; i++) sum += weights[i];
  for (int i = 0; i < chosen; i++) {
    float& weight = choices[i].weight;
    if (routing == INFLIGHT_INPUT_SIGMOID)
      weight = sigmoid(weights[i]);
    else if (routing == INFLIGHT_CHOSEN_SOFTMAX)
      weight = weights[i];
    else
      weight = (experts.normalized ? weights[i] / sum : weights[i]) * experts.scale;
  }
}

void Model::route(Layer& layer, int tokens) {
  const int chosen = layer.experts.per_token;
  prepare(layer.parts.router, x_.data(), hidden_, tokens, layer.vectors[INFLIGHT_MLP_NORM].data());
  multiply(layer.parts.router, tokens, kStore, scores_.data(), scores_width_);
  choices_.resize((size_t)tokens * chosen);
  pool_.run(tokens, [&](int token, int thread) {
    choose(layer, scores_.data() + token * scores_width_, choices_.data() + (size_t)token * chosen, choosing_[thread]);
  });
  sort_rows(layer, tokens);
}

void Model::sort_rows(const Layer& layer, int tokens) {
  const InflightExperts& experts = layer.experts;
  std::vector<int32_t>& first = first_of_expert_;
  first.assign(experts.count + 1, 0);
  for (const Choice& one : choices_) first[one.expert + 1]++;
  for (int expert = 0; expert < experts.count; expert++) first[expert + 1] += first[expert];
  rows_.resize(choices_.size() + (layer.intermediate ? tokens : 0));
  next_of_expert_.assign(first.begin(), first.end());
  for (size_t i = 0; i < choices_.size(); i++) {
    Choice& one = choices_[i];
    one.row = next_of_expert_[one.expert]++;
    const bool scales_input = experts.routing == INFLIGHT_INPUT_SIGMOID;
    rows_[one.row] = {(int)i / experts.per_token, one.expert, scales_input ? one.weight : 1.0f};
  }
  for (size_t i = choices_.size(); i < rows_.size(); i++) rows_[i] = {(int)(i - choices_.size()), -1, 1.0f};
}

void Model::plan_pieces(const Layer& layer, bool up) {
  const int each = kernels_.panels_at_once, all = (int)choices_.size(), shared = (int)rows_.size() - all;
  const Ending own = !up ? kStore : spec_.gelu ? kGelu : kSilu, of_experts = up && layer.experts.limit > 0 ? kClamped : own;
  pieces_.clear();
  auto add = [&](const Weight& weight, int row, int rows, Ending ending) {
    if (rows) pieces_.push_back({&weight, row, rows, 0, weight.columns / kernels_.panel, ending});
  };
  if (shared) add(up ? layer.gate_up : layer.down, all, shared, own);
  for (int expert = 0; expert < layer.experts.count; expert++) {
    const int first = first_of_expert_[expert];
    add(up ? layer.parts.gate_up[expert] : layer.parts.down[expert], first, first_of_expert_[expert + 1] - first,
        of_experts);
  }
  // Some tasks for each thread, of whole groups of panels that few rows take at once.
  const size_t whole = pieces_.size();
  int64_t groups = 0;
  for (const Piece& one : pieces_) groups += (one.last + each - 1) / each;
  const int size = (int)std::max<int64_t>(1, groups / (8 * pool_.threads())) * each;
  for (size_t i = 0; i < whole; i++) {
    const Piece piece = pieces_[i];
    for (int first = size; first < piece.last; first += size) {
      pieces_.push_back(piece);
      pieces_.back().first = first;
      pieces_.back().last = std::min(piece.last, first + size);
    }
    pieces_[i].last = std::min(piece.last, size);
  }
}

void Model::multiply_pieces(const InputRows& rows, float* outputs, int64_t stride) {
  pool_.run((int)pieces_.size(), [&](int task, int) {
    const Piece& one = pieces_[task];
    const InputRows own{(char*)rows.data + rows.stride * one.row, rows.stride};
    kernels_.multiply(*one.weight, own, one.rows, one.first, one.last, one.ending, outputs + one.row * stride, stride);
  });
}

void Model::compute_experts(Layer& layer, int tokens) {
  const float* gain = layer.vectors[INFLIGHT_MLP_NORM].data();
  route(layer, tokens);
  lap(kRoute);
  const InputRows up{inputs_.data(), hidden_ * 4}, down{inputs_.data(), inner_ * 4};
  each_row((int)rows_.size(), [&](int row) {
    const ExpertRow& one = rows_[row];
    const Weight& weight = one.expert < 0 ? layer.gate_up : layer.parts.gate_up[one.expert];
    kernels_.prepare(weight, x_.data() + one.token * hidden_, gain, spec_.eps, one.factor, up, row);
  });
  plan_pieces(layer, true);
  multiply_pieces(up, gated_.data(), inner_);
  lap(kGateUp);
  each_row((int)rows_.size(), [&](int row) {
    const ExpertRow& one = rows_[row];
    const Weight& weight = one.expert < 0 ? layer.down : layer.parts.down[one.expert];
    clear_tail(gated_.data() + row * inner_, weight.inputs);
    kernels_.prepare(weight, gated_.data() + row * inner_, nullptr, 0.0f, 1.0f, down, row);
  });
  plan_pieces(layer, false);
  multiply_pieces(down, made_.data(), hidden_);
  each_row(tokens, [&](int token) { add_experts(layer, token); });
  lap(kDown);
}

void Model::add_experts(Layer& layer, int token) {
  const InflightExperts& experts = layer.experts;
  float *sum = product_.data() + token * hidden_, *x = x_.data() + token * hidden_;
  memset(sum, 0, hidden_ * sizeof(float));
  for (int i = 0; i < experts.per_token; i++) {
    const Choice& one = choices_[(size_t)token * experts.per_token + i];
    const float by = experts.routing == INFLIGHT_INPUT_SIGMOID ? 1.0f : one.weight;
    kernels_.add_scaled(sum, made_.data() + one.row * hidden_, by, spec_.hidden);
  }
  if (layer.intermediate) {
    const float by = experts.shared_gate ? sigmoid(scores_.data()[token * scores_width_ + experts.count]) : 1.0f;
    kernels_.add_scaled(sum, made_.data() + (choices_.size() + token) * hidden_, by, spec_.hidden);
  }
  if (const float* gain = layer.vectors[INFLIGHT_MLP_OUTPUT_NORM].data())
    kernels_.add_normalized(x, sum, gain, spec_.eps, spec_.hidden);
  else
    kernels_.add_scaled(x, sum, 1.0f, spec_.hidden);
}

}  // namespace inflight
