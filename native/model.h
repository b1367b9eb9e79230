// A model: its packed weights, the memory of its activations, and the phases of a step.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "step.h"

namespace inflight {

constexpr int kAlign = 64;     // floats: the widest panel
constexpr int kWidestHead = 4096;  // dimensions
constexpr int kTaskRows = 96;  // rows of queries that share what is read of the cache
constexpr int kLogitsOfTask = 1 << 14;

enum Phase {
  kEmbed, kNorm, kQkv, kRotateStore, kAttention, kAttended, kOutput, kRoute, kGateUp, kDown, kLogits, kSample, kPhases
};
constexpr const char* kPhaseNames[kPhases] = {"embed",    "norm",   "qkv",   "rotate_store", "attention", "attended",
                                              "output",   "route",  "gate_up", "down",       "logits",    "sample"};

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Floats from a row of activations to the next: an odd number of cache lines, since rows a power of two apart would all
// fall into the same few sets of a cache.
inline int64_t row_stride(int64_t width) { return round_up(width, kAlign) + 16; }

// Clears what follows a row of activations, up to whole vectors and groups: a wider layer has left its own there.
inline void clear_tail(float* row, int64_t width) { memset(row + width, 0, (round_up(width, kAlign) - width) * sizeof(float)); }

// What a call ends with that cannot be served; the text says why.
struct Failure {
  char text[256];
};

// Throws a Failure with a text like printf's.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Returns memory that is aligned to pages and zero; large memory lies in huge pages where the system has them, since a
// processor's prefetcher ends at the end of a page. Throws std::bad_alloc.
inline void* zeroed_memory(size_t bytes) {
  constexpr size_t huge = 2 << 20;
  const size_t page = bytes < huge ? 4096 : huge, whole = round_up(bytes, 4096);
  void* memory = std::aligned_alloc(page, round_up(whole, page));
  if (!memory) throw std::bad_alloc();
  if (page == huge) madvise(memory, whole, MADV_HUGEPAGE);
  return memset(memory, 0, whole);
}

// Memory that is aligned and zero at first, and only grows.
template <class T>
class Buffer {
 public:
  // Has room for `count` elements; what was there before is lost where it had not.
  T* need(size_t count) {
    if (count > count_) {
      std::free(std::exchange(data_, nullptr));
      count_ = 0;
      data_ = (T*)zeroed_memory(count * sizeof(T));
      count_ = count;
    }
    return data_;
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  ~Buffer() { std::free(data_); }
  Buffer() = default;
  Buffer(const Buffer&) = delete;

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

struct Weight : PackedWeight {
  int tasks = 0;  // among which the panels are divided
  Buffer<char> memory;
  Buffer<float> biases, column_scales, smoothing;
};

// The weights of a layer's experts. Those of one kind lie in one memory, since each alone would be rounded to pages.
struct Experts {
  Weight router;
  std::vector<Weight> gate_up, down;
  Buffer<char> gate_up_memory, down_memory;
};

struct Layer : InflightLayer {
  Weight qkv, output, gate_up, down;
  Experts parts;
  Buffer<float> vectors[INFLIGHT_LAST_NORM];
  int group() const { return heads / kv_heads; }
  // Whether attention is divided into tasks as that of another layer.
  bool attends_as(const Layer& other) const {
    return heads == other.heads && kv_heads == other.kv_heads && head_dim == other.head_dim &&
           window == other.window && chunk == other.chunk;
  }
  // The first key that the token at a position attends to.
  int first_key(int position) const {
    return std::max(window ? std::max(0, position + 1 - window) : 0, chunk ? position / chunk * chunk : 0);
  }
};

// A row of what experts compute: a token that one of them was chosen for, or that goes through the layer's own
// feed-forward. The rows of an expert lie together, in the order of the tokens.
struct ExpertRow {
  int token;
  int expert;    // -1: the layer's own feed-forward
  float factor;  // of its inputs
};

// An expert that was chosen for a token.
struct Choice {
  int expert, row;
  float weight;
};

// The memory in which a thread chooses experts.
struct Choosing {
  std::vector<float> weights, ranked;  // of each expert
  std::vector<float> best;             // of each group
  std::vector<char> taken;             // of each expert: it cannot be chosen any more; then of each group
};

// A part of a phase that multiplies several weights at once: some panels of one of them, and the rows that they meet.
struct Piece {
  const Weight* weight;
  int row, rows, first, last;
  Ending ending;
};

// The rotary embedding of some layers, and the angles of the step's tokens.
struct Rope {
  std::vector<float> frequencies;
  float scale = 1.0f;
  Buffer<float> cos, sin;  // [tokens][frequencies]
};

// The memory in which a thread draws a token.
struct Drawing {
  std::vector<double> weights;   // of each token, as multiples of the likeliest one's
  std::vector<uint16_t> bucket;  // of each token
  std::vector<double> mass;      // of each bucket: its tokens' weights
  std::vector<int32_t> count, sorted;
};

// The inputs of a group of a weight that is packed. A weight of kInt8Columns has groups even where a column has one scale.
inline int packed_group(const InflightWeight& from) {
  return from.packed_type == kInt8Columns && !from.group ? kWordGroup : from.group;
}

// A task of attention: some tokens of a range, one head of keys, and some cuts of the keys.
struct Attending {
  int range, token, tokens, kv_head, cut_begin, cut_end;
  int64_t partials;  // where its results go, if its cuts are not all that there are; else -1
};

class Model {
 public:
  Model(const InflightSpec& spec, const Kernels& kernels, int threads);
  // All three throw a Failure where the shapes or types are not those of the model.
  void set_weight(int layer, int which, int expert, const InflightWeight& from);
  void set_vector(int layer, int which, const float* values);
  void set_cache(const InflightCache& cache);
  // Computes a step; throws a Failure, before it writes anything, where the step is not well formed.
  void run(const InflightStep& step);
  // Both are of some tokens of the last step, and throw a Failure where it has them not.
  void logits(int rows, const int32_t* row, float* logits);
  void hidden(int rows, const int32_t* row, float* hidden);
  // Draws a token from each row of logits `[rows][vocabulary]`.
  void draw(int rows, const float* logits, const InflightSample* samples, int32_t* drawn);
  // Seconds that each phase has taken so far.
  double seconds[kPhases] = {};

 private:
  Weight& weight(int layer, int which, int expert);
  char* panels_of(Weight& to, int layer, int which, int expert);
  void check(const InflightStep& step) const;
  void check_range(const InflightRange& range, int index) const;
  void check_rows(int rows, const int32_t* row, int tokens) const;
  void check_weight(const InflightWeight& from, int layer, int which) const;
  void check_sample(const InflightSample& sample, int row) const;

  // Finds the positions, slots and angles of the step's tokens.
  void place(const InflightStep& step);
  // The slot of what is stored at this index of the sequence.
  int32_t slot(const InflightRange& range, int32_t at) const {
    return range.blocks[at / cache_.block_size] * cache_.block_size + at % cache_.block_size;
  }
  void embed(int id, float* to) const;
  InputRows input_rows(const Weight& weight);
  // Makes rows of activations the inputs of a product; with `gain`, normalizes them first.
  void prepare(const Weight& weight, float* rows, int64_t stride, int count, const float* gain);
  void multiply(const Weight& weight, int count, Ending ending, float* outputs, int64_t stride);
  // Adds a product to the residual stream, behind a norm where there is one.
  void add(const Weight& weight, int tokens, const float* gain);
  void rotate_and_store(int layer, int token);
  void normalize_heads(Layer& layer, float* heads, int count, int norm);
  void store(int layer, int token);
  void compute_layer(const InflightStep& step, int layer);

  void compute_experts(Layer& layer, int tokens);
  // Computes the choices of all tokens, and the rows that follow from them.
  void route(Layer& layer, int tokens);
  void choose(const Layer& layer, const float* scores, Choice* choices, Choosing& memory) const;
  void sort_rows(const Layer& layer, int tokens);
  // Plans the products of all rows with one kind of weights.
  void plan_pieces(const Layer& layer, bool up);
  void multiply_pieces(const InputRows& rows, float* outputs, int64_t stride);
  // Adds what a token's experts have made to the residual stream.
  void add_experts(Layer& layer, int token);
  // Calls `body` with each of the rows, some at a time as a task.
  template <class Body>
  void each_row(int count, Body body) {
    const int each = std::max(1, std::min(16, count / (2 * pool_.threads())));
    pool_.run((count + each - 1) / each, [&](int task, int) {
      for (int row = task * each; row < std::min(count, (task + 1) * each); row++) body(row);
    });
  }
  void compute_logits(int rows, const int32_t* row, float* logits);
  // Returns the token that is drawn from the logits of a row, or why there is none.
  int32_t draw_one(const float* row, const InflightSample& sample, Drawing& memory) const;
  void lap(Phase phase);

  // Divides the attention of a layer into tasks, the longest first.
  void plan(const InflightStep& step, const Layer& layer);
  void attend_all(const InflightStep& step, int layer);
  void attend(const InflightStep& step, int layer, const Attending& part, int thread);
  // Writes what a task has attended to.
  void finish(int layer, const Attending& part, const float* outputs, const Partial* results);

  InflightSpec spec_;
  const Kernels& kernels_;
  Pool pool_;
  InflightCache cache_{};
  std::vector<InflightLayerCache> caches_;  // of each layer
  std::vector<Layer> layers_;
  Weight head_;
  Buffer<float> last_norm_;
  std::vector<Rope> ropes_;

  // Strides of the rows below, in floats: of the widest layer.
  const int64_t hidden_, logits_width_;
  int64_t heads_ = 0, attended_ = 0, inner_ = 0, scores_width_ = 0;
  int most_rows_ = 1;  // of experts, for a token
  Buffer<float> x_, qkv_, attention_, gated_, product_, logits_, scores_, made_;
  Buffer<char> inputs_;
  int step_tokens_ = 0;  // of the last step, whose residual stream `x_` has
  std::vector<int32_t> positions_, slots_;  // of the step's tokens
  std::vector<int32_t> first_of_range_;     // the index of each range's first token
  std::vector<Attending> attending_;
  std::chrono::steady_clock::time_point lap_;
  Buffer<float> partial_outputs_;
  Buffer<Partial> partials_;
  std::vector<Buffer<char>> scratch_;          // of each thread
  std::vector<Buffer<int32_t>> slot_scratch_;  // the same
  std::vector<Drawing> drawing_;               // the same
  std::vector<Choosing> choosing_;             // the same
  std::vector<Choice> choices_;                // [tokens][per_token], best first
  std::vector<ExpertRow> rows_;
  std::vector<int32_t> first_of_expert_, next_of_expert_;  // the index of each expert's first row, and the next free one
  std::vector<Piece> pieces_;
};

}  // namespace inflight
