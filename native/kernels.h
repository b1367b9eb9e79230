// The kernels of one instruction set, as a table of functions, and the plain structures that they work on.
//
// Every kernel adds up a row in one order, whatever the number of rows. A column of a product has one accumulator per
// row, which takes the inputs in ascending order; by AMX's tiles, it takes pairs of inputs in the order in which a tile
// adds them up (tiles.h). Attention cuts the keys at fixed positions. So a token's bits do not depend on what else is in
// its step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inflight {

// What numbers are stored in. The values are part of the C interface.
enum Type : int32_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kInt8 = 2,         // packed weights: rounded when they are packed, by groups of inputs
  kE4m3 = 3,         // of weights: a scale for each column; inputs are rounded to E4M3, or as they are
  kInt4 = 4,         // weights only: a scale for each column and group of inputs; inputs are rounded to 16 bits
  kInt8Columns = 5,  // weights only: a scale for each column, or as kInt4; inputs are rounded to 16 bits
  kInt8Sums = 6,     // weights only: a scale for each column; inputs are rounded to INT8; integers are added up
  kMxfp4 = 7,        // weights only: E2M1 with a power of two for each column and group; inputs are rounded to 16 bits
  kE4m3Groups = 8,   // weights only: as kE4m3, with a scale for each column and group of inputs
  kInt4Minimums = 9,  // weights only: as kInt4, with a minimum for each column and group, which is added to the weights
  kInt8Minimums = 10,  // weights only: the same of INT8
};

constexpr int bytes_of(Type type) { return type == kFloat32 ? 4 : type == kBfloat16 ? 2 : 1; }

// What a product does with its sums.
enum Ending : int32_t {
  kStore = 0,  // outputs = sums
  kAdd = 1,    // outputs += sums
  kSilu = 2,   // the first half of a panel's sums are gates: outputs = silu(gate) * up
  kGelu = 3,   // the same with gelu by tanh
  kClamped = 4,  // the same as gpt-oss has it: both clamped, outputs = gate * sigmoid(slope * gate) * (up + 1)
};

constexpr int kNibbles = 8;           // weights of INT4 in a lane of 32 bits
constexpr int kNibbleOffset = 8;      // is added to each weight of INT4 when it is packed; and taken off again, times inputs
constexpr int kMxfp4Group = 32;       // of kMxfp4: inputs that share a power of two
constexpr int kMxfp4Offset = 12;      // is added to each weight of kMxfp4, twice its value, when it is packed
constexpr int kShortestGroup = 16;    // of INT4: a vector's lanes
constexpr int kLongestGroup = 128;    // of INT4; groups divide it
constexpr int kWordGroup = 64;        // of kInt8Columns: inputs that are rounded together
constexpr int kMostSummed = 1 << 17;  // a sum of so many products of INT8 may overflow 32 bits

// What a weight is packed from: `[outputs][inputs]`; INT4 as bytes `[outputs / 2][inputs]`, the even output below;
// MXFP4 as bytes `[outputs][inputs / 2]`, the even input below.
struct PackSource {
  Type type;
  const void* data;
  const void* scales;     // float32 `[outputs]`, or `[outputs][groups]`; MXFP4: bytes of that shape; null: none
  const float* minimums;  // `[outputs][groups]`; null: none
  int groups;             // of a row: how many scales it has
};

// A weight, packed: panels of columns, each with all inputs of its columns in the order in which a product reads them.
struct PackedWeight {
  void* panels = nullptr;
  const float* bias = nullptr;  // per column, in the order of the panels; null: none
  Type type = kFloat32;
  int inputs = 0;
  int columns = 0;  // a multiple of the panel's
  // Of checkpoints that are quantized:
  // Per column, in the order of the panels: what its sums are multiplied by; null: 1. kE4m3Groups: panel by panel and group
  // by group, what the weights of the group are multiplied by.
  float* scales = nullptr;
  const float* smooth = nullptr;  // per input: what it is multiplied by before it is rounded; null: 1
  float input_scale = 0.0f;       // what inputs are rounded to multiples of; zero: they are not rounded by it
  int input_group = 0;            // inputs of a row that are rounded by their own largest; zero: none are
  int group = 0;                  // of types with groups: inputs that share a scale
  float limit = 0.0f, slope = 0.0f;  // of kClamped
};

// How many scales a column has; inputs are padded to pairs.
inline int scale_groups(const PackedWeight& weight) {
  return weight.type == kE4m3Groups ? ((weight.inputs + 1) / 2 * 2 + weight.group - 1) / weight.group : 1;
}

// The rows of inputs of a product, in the type that the product of this weight takes.
struct InputRows {
  void* data = nullptr;
  ptrdiff_t stride = 0;  // bytes from a row to the next
};

// The memory of keys and values of one layer and one head: rows of `dim` elements, one per slot.
struct HeadCache {
  const void* keys = nullptr;
  const void* values = nullptr;
  const uint16_t* key_scales = nullptr;  // kInt8: bfloat16, per slot
  const uint16_t* value_scales = nullptr;
  float key_scale = 1.0f;  // kE4m3: of the layer
};

// Keys in a cut: attention computes a softmax over each cut by itself and merges them in ascending order.
constexpr int kCut = 256;

// Rows of queries that attend to the same keys.
struct AttendTask {
  const float* queries = nullptr;  // of the first token's first head
  ptrdiff_t token_stride = 0;      // floats from a token's queries to the next one's
  int tokens = 0;
  int group = 0;                  // heads of queries of each token
  const int32_t* slots = nullptr;  // of the sequence's keys, in the order of their positions
  const int32_t* first = nullptr;  // per token, the first key that it attends to
  const int32_t* last = nullptr;   // per token, the key after the last one
  int dim = 0;
  float scale = 1.0f;
  float softcap = 0.0f;  // scores are squeezed between plus and minus this; zero: they are not
  HeadCache cache;
  int cut_begin = 0;  // cuts to compute
  int cut_end = 0;
};

// The result of some cuts for one row, before it is divided by the sum of weights.
struct Partial {
  float largest;
  float sum;
};

// One instruction set's kernels.
struct Kernels {
  const char* name;
  int panel;  // columns of a panel
  int panels_at_once;  // by which few rows are multiplied

  // The bytes of a packed weight's panels.
  size_t (*packed_bytes)(const PackedWeight& weight);
  // Packs the panels from `first` to `last` in the type of `to`, and its scales; column `i` is row `order[i]` of the
  // source, -1: of zeros.
  void (*pack)(const PackedWeight& to, const PackSource& source, const int32_t* order, int first, int last);
  // Multiplies `rows` by the panels from `first` to `last`; `outputs` has `output_stride` floats in a row.
  void (*multiply)(const PackedWeight& weight, const InputRows& rows, int count, int first, int last, Ending ending,
                   float* outputs, ptrdiff_t output_stride);
  // Turns a row into inputs of a product of `weight`: times `factor`, and with `gain` normalized first.
  void (*prepare)(const PackedWeight& weight, const float* row, const float* gain, float eps, float factor,
                  const InputRows& to, int index);
  // row = row + normalized(other) * gain; used where a layer has a norm behind its output.
  void (*add_normalized)(float* row, const float* other, const float* gain, float eps, int size);
  // row = row + other * by.
  void (*add_scaled)(float* row, const float* other, float by, int size);
  // Normalizes a row in place.
  void (*normalize)(float* row, const float* gain, float eps, int size);
  // Rotates one head in place; `cos` and `sin` have `half` values. `interleaved`: pairs of dimensions are adjacent.
  void (*rotate)(float* head, const float* cos, const float* sin, int half, bool interleaved);
  // Rounds a row of keys or values to the type of the cache; returns the scale of kInt8.
  void (*store)(Type type, const float* row, float scale, void* to, uint16_t* scale_to, int dim);
  // The bytes of scratch memory of `attend`, at most 128 rows.
  size_t (*attend_scratch)(int rows, int dim);
  // Attends; leaves outputs `[tokens * group][dim]`, not yet divided, and the partials.
  void (*attend)(const AttendTask& task, Type type, void* scratch, float* outputs, Partial* partials);
  // outputs += another partial's.
  void (*merge)(float* outputs, Partial* own, const float* others, const Partial& other, int dim);
  // to = outputs * value_scale / sum.
  void (*finish)(const float* outputs, const Partial& own, float value_scale, float* to, int dim);
  // row = limit * tanh(row / limit); its tail up to a whole vector is written too.
  void (*squeeze)(float* row, float limit, int size);
  // The first index of the largest of a row; NaN is larger than all.
  int (*argmax)(const float* row, int size);
  // weights = exp((row - largest) / temperature), and the bucket of each: floor((largest - row) / temperature *
  // per_bucket), at most buckets - 1. Infinity counts as the largest float.
  void (*weigh)(const float* row, int size, double largest, double temperature, double per_bucket, int buckets,
                double* weights, uint16_t* bucket);
  // As `inflight_bf16_gain` returns it.
  double (*bf16_gain)();
};

const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();

}  // namespace inflight
