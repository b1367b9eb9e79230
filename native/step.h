// The C interface of the native step: plain structures and functions, so that any language can load it.
//
// A model is made once, from the weights of a checkpoint; a step computes the hidden states of a batch's tokens, writes
// their keys and values to the paged cache, and gives the logits of the rows that are asked for. All pointers are to
// the caller's memory and are used during the call only, but for the embedding and the tensors of the cache.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#pragma GCC visibility push(default)
#define INFLIGHT_ABI 7

typedef struct InflightModel InflightModel;

// A rotary embedding.
typedef struct {
  int32_t dim;               // dimensions of a head that it rotates
  float scale;               // of cosines and sines
  const float* frequencies;  // [dim / 2]
} InflightRope;

typedef struct {
  int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
  int32_t gelu;          // else silu
  int32_t head_norms;    // queries and keys are normalized
  int32_t output_norms;  // there is a norm behind attention and feed-forward too
  float eps, attention_scale, embedding_scale;
  int32_t embedding_type;  // 0: float32, 1: bfloat16
  const void* embedding;   // [vocabulary][hidden]
  int32_t ropes;
  const InflightRope* rope;
  const int32_t* rope_of_layer;  // [layers]
  const int32_t* windows;        // [layers]; 0: none
} InflightSpec;

// The keys and values of all layers: [layers][kv_heads][slots][head_dim].
typedef struct {
  int32_t type;  // 0: float32, 1: bfloat16, 2: INT8, 3: E4M3
  int32_t block_size;
  int64_t slots;
  void *keys, *values;
  uint16_t *key_scales, *value_scales;              // INT8: bfloat16 [layers][kv_heads][slots]
  const float *layer_key_scales, *layer_value_scales;  // E4M3: [layers]
} InflightCache;

enum { INFLIGHT_QKV, INFLIGHT_OUTPUT, INFLIGHT_GATE_UP, INFLIGHT_DOWN, INFLIGHT_HEAD };
enum {
  INFLIGHT_INPUT_NORM,
  INFLIGHT_ATTENTION_NORM,  // behind attention, where there are output norms
  INFLIGHT_MLP_NORM,        // in front of feed-forward
  INFLIGHT_MLP_OUTPUT_NORM,
  INFLIGHT_QUERY_NORM,
  INFLIGHT_KEY_NORM,
  INFLIGHT_LAST_NORM,
};

typedef struct {
  int32_t type;  // 0: float32, 1: bfloat16; of quantized checkpoints 2: INT8, 3: E4M3, 4: INT4
  // Of types 0 and 1 the same, or 2: INT8, rounded by groups of inputs. Of type 2 either 5: inputs are rounded to 16 bits,
  // by groups; or 6: inputs are rounded to INT8. Of types 3 and 4 the same. With minimums, 7 in place of 4 and 8 of 5.
  int32_t packed_type;
  const void* source;  // [outputs][inputs]; INT4: bytes [outputs / 2][inputs], the even output in the lower bits
  int32_t outputs, inputs;
  const float* bias;  // [outputs]; null: none
  // Of quantized checkpoints, else null and zero:
  const float* scales;  // of the products' sums, [outputs]; with a group: of the weights, [outputs][inputs / group]
  const float* smooth;  // [inputs]: what inputs are multiplied by first; null: by nothing
  float input_scale;    // packed types 3 and 6: inputs are rounded to its multiples that E4M3, or INT8, has
  int32_t group;        // packed types 4, 7 and 8: 16, 32, 64 or 128; 5: the same, or 0; else 0
  const float* minimums;  // packed types 7 and 8: [outputs][inputs / group], added to the weights; else null
} InflightWeight;

// Tokens of one sequence that lie in a row in the batch. Each attends to the keys before it and to its own.
typedef struct {
  int32_t count;
  int32_t start;          // position of the first: it has so many keys before its own
  int32_t at;             // index in the sequence's memory where its key is stored; its position, but for drafts in trees
  const int32_t* blocks;  // of the sequence's memory
  int32_t num_blocks;
  int32_t trunk;          // keys that lie in the order of their positions, where there is a path
  const int32_t* path;    // [start + 1 - trunk]: of a draft in a tree, where its last keys lie; null: as all others do
} InflightRange;

typedef struct {
  int32_t tokens;
  const int32_t* ids;
  int32_t ranges;
  const InflightRange* range;  // their tokens are those of the step, in their order
  int32_t rows;                // whose logits are wanted
  const int32_t* row;          // [rows]: which tokens
  float* logits;               // [rows][vocabulary]
} InflightStep;

// What a token is drawn by, from a row of logits: the fields mean what they do in a request.
typedef struct {
  double temperature;  // 0: the likeliest token is taken, and the rest does not count
  double top_p, min_p;
  double number;  // in [0, 1): where the token lies in the distribution
  int32_t top_k;  // 0: all
} InflightSample;

// In place of a token: the logits are no numbers, or all of them are minus infinity.
enum { INFLIGHT_NAN = -1, INFLIGHT_ALL_BANNED = -2 };

int32_t inflight_abi(void);
// A digest of the sources that the library was built from; `build.py` looks for it in the file.
const char* inflight_sources(void);
// Whether this processor has an instruction set, and the library kernels for it: avx2, avx512, avx512_vnni, avx512_bf16
// or amx.
int32_t inflight_has(const char* instruction_set);
// The speed of products of bfloat16 divided by that of float32's, as measured now; 0: the set has no such instructions.
double inflight_bf16_gain(const char* instruction_set);
// Returns null, with a message of at most `size` bytes, where the shape or the instruction set is not served.
InflightModel* inflight_create(const InflightSpec* spec, const char* instruction_set, int32_t threads, char* message,
                               int32_t size);
void inflight_destroy(InflightModel* model);
// These return 0, or 1 with a message.
int32_t inflight_set_weight(InflightModel* model, int32_t layer, int32_t which, const InflightWeight* weight,
                            char* message, int32_t size);
int32_t inflight_set_norm(InflightModel* model, int32_t layer, int32_t which, const float* gain, char* message,
                          int32_t size);
int32_t inflight_set_cache(InflightModel* model, const InflightCache* cache, char* message, int32_t size);
int32_t inflight_step(InflightModel* model, const InflightStep* step, char* message, int32_t size);
// Draws a token from each row of `logits [rows][vocabulary]`; `drawn` has it, or INFLIGHT_NAN or INFLIGHT_ALL_BANNED.
int32_t inflight_draw(InflightModel* model, int32_t rows, const float* logits, const InflightSample* samples,
                      int32_t* drawn, char* message, int32_t size);
// Seconds that each phase has taken so far, in the order of `inflight_phase_name`.
int32_t inflight_phases(const InflightModel* model, double* seconds, int32_t count);
const char* inflight_phase_name(int32_t phase);

#ifdef __cplusplus
}
#endif
