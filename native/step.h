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
#define INFLIGHT_ABI 9

typedef struct InflightModel InflightModel;

// A rotary embedding.
typedef struct {
  int32_t dim;               // dimensions of a head that it rotates
  float scale;               // of cosines and sines
  const float* frequencies;  // [dim / 2]
} InflightRope;

// How experts get their weights, as `config.Routing` has it.
enum { INFLIGHT_SOFTMAX, INFLIGHT_CHOSEN_SOFTMAX, INFLIGHT_SIGMOID, INFLIGHT_INPUT_SIGMOID };

// The experts of a layer, as `config.ExpertsConfig` has them.
typedef struct {
  int32_t count;  // 0: there are none, and the rest does not count
  int32_t per_token, intermediate;
  int32_t routing;
  int32_t normalized;
  float scale;
  int32_t groups, groups_per_token, group_best;
  int32_t shared_gate;  // the router has an output more, for the layer's own feed-forward
  float limit, slope;   // of gpt-oss' activation; a limit of 0: the activation is the model's
} InflightExperts;

// A layer, as `config.LayerConfig` has it.
typedef struct {
  int32_t heads, kv_heads, head_dim;
  int32_t intermediate;    // of the feed-forward that all tokens take; 0: there is none beside the experts
  int32_t rope;            // index of its rotary embedding; -1: none
  int32_t interleaved;
  int32_t window, chunk;   // 0: none
  int32_t width_norm;      // norms of queries and keys are of all heads of a token as one; else of each head
  float scale, softcap;    // of the scores; a soft cap of 0: none
  float query_beta;        // what queries grow by with their position
  int32_t query_length, query_offset;  // a length of 0: they do not grow
  InflightExperts experts;
} InflightLayer;

typedef struct {
  int32_t layers, hidden, vocabulary;
  int32_t gelu;  // else silu
  float eps, embedding_scale;
  float logit_softcap;     // 0: none
  int32_t embedding_type;  // 0: float32, 1: bfloat16
  const void* embedding;   // [vocabulary][hidden]
  int32_t ropes;
  const InflightRope* rope;
  const InflightLayer* layer;  // [layers]
} InflightSpec;

// The keys and values of a layer: [kv_heads][slots][head_dim].
typedef struct {
  void *keys, *values;
  void *key_scales, *value_scales;  // INT8: bfloat16 [kv_heads][slots]; E4M3: one float32, which is only read
} InflightLayerCache;

typedef struct {
  int32_t type;  // 0: float32, 1: bfloat16, 2: INT8, 3: E4M3
  int32_t block_size;
  int64_t slots;
  const InflightLayerCache* layer;  // [layers]
} InflightCache;

enum {
  INFLIGHT_QKV,
  INFLIGHT_OUTPUT,
  INFLIGHT_GATE_UP,  // of the feed-forward that all tokens take
  INFLIGHT_DOWN,
  INFLIGHT_HEAD,
  INFLIGHT_ROUTER,
  INFLIGHT_EXPERT_GATE_UP,
  INFLIGHT_EXPERT_DOWN,
};
// Vectors of a layer, and one of the model. What is not set is not there.
enum {
  INFLIGHT_INPUT_NORM,
  INFLIGHT_ATTENTION_NORM,  // behind attention
  INFLIGHT_MLP_NORM,        // in front of feed-forward
  INFLIGHT_MLP_OUTPUT_NORM,
  INFLIGHT_QUERY_NORM,
  INFLIGHT_KEY_NORM,
  INFLIGHT_SINKS,       // [heads]: a score of each head that takes a share of attention and gives nothing
  INFLIGHT_CORRECTION,  // [experts]: what is added to their sigmoids when they are chosen
  INFLIGHT_LAST_NORM,   // the model's
};

typedef struct {
  int32_t type;  // 0: float32, 1: bfloat16; of quantized checkpoints 2: INT8, 3: E4M3, 4: INT4, 7: MXFP4
  // Of types 0 and 1 the same, or 2: INT8, rounded by groups of inputs. Of type 2 either 5: inputs are rounded to 16 bits,
  // by groups; or 6: inputs are rounded to INT8. Of type 3 the same, or 8: weights have scales by groups of inputs. Of types
  // 4 and 7 the same. With minimums, 9 in place of 4 and 10 of 5.
  int32_t packed_type;
  // [outputs][inputs]; INT4: bytes [outputs / 2][inputs], the even output in the lower bits; MXFP4: bytes
  // [outputs][inputs / 2], the even input in the lower bits.
  const void* source;
  int32_t outputs, inputs;
  const float* bias;  // [outputs]; null: none
  // Of quantized checkpoints, else null and zero:
  // Float32, of the products' sums, [outputs]; with a group: of the weights, [outputs][inputs / group]; MXFP4: bytes of that
  // shape, exponents of two plus 127.
  const void* scales;
  const float* smooth;  // [inputs]: what inputs are multiplied by first; null: by nothing
  float input_scale;    // packed types 3, 6, 8: inputs are rounded to its multiples that E4M3, or INT8, has; 0: not by it
  // Packed types 4, 9 and 10: 16, 32, 64 or 128; 5: the same, or 0; 7: 32; 8: any, the last may be shorter; else 0.
  int32_t group;
  const float* minimums;  // packed types 9 and 10: [outputs][inputs / group], added to the weights; else null
  // Packed types 3, 6 and 8, in place of an input_scale: so many inputs of a row are rounded by their own largest; of type 6
  // all.
  int32_t input_group;
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
// `expert`: whose weight it is; 0 where it is none's. The experts of a layer have weights of one type.
int32_t inflight_set_weight(InflightModel* model, int32_t layer, int32_t which, int32_t expert,
                            const InflightWeight* weight, char* message, int32_t size);
int32_t inflight_set_vector(InflightModel* model, int32_t layer, int32_t which, const float* values, char* message,
                            int32_t size);
int32_t inflight_set_cache(InflightModel* model, const InflightCache* cache, char* message, int32_t size);
int32_t inflight_step(InflightModel* model, const InflightStep* step, char* message, int32_t size);
// Of some tokens of the last step, `row [rows]`: their logits [rows][vocabulary], as the step itself gives them; or their
// hidden states [rows][hidden] behind the last norm, in float32, which is what the head's inputs are rounded from.
int32_t inflight_logits(InflightModel* model, int32_t rows, const int32_t* row, float* logits, char* message,
                        int32_t size);
int32_t inflight_hidden(InflightModel* model, int32_t rows, const int32_t* row, float* hidden, char* message,
                        int32_t size);
// Draws a token from each row of `logits [rows][vocabulary]`; `drawn` has it, or INFLIGHT_NAN or INFLIGHT_ALL_BANNED.
int32_t inflight_draw(InflightModel* model, int32_t rows, const float* logits, const InflightSample* samples,
                      int32_t* drawn, char* message, int32_t size);
// Seconds that each phase has taken so far, in the order of `inflight_phase_name`.
int32_t inflight_phases(const InflightModel* model, double* seconds, int32_t count);
const char* inflight_phase_name(int32_t phase);

#ifdef __cplusplus
}
#endif
