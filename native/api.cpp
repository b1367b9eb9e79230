// The C interface: nothing that a model throws leaves it.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <initializer_list>

#include "model.h"

using namespace inflight;

struct InflightModel : Model {
  using Model::Model;
};

void inflight::fail(const char* format, ...) {
  Failure failure;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(failure.text, sizeof failure.text, format, arguments);
  va_end(arguments);
  throw failure;
}

namespace {

// Whether this processor has the tiles of AMX, with products of bfloat16 and of bytes. Not all compilers know their names.
bool has_tiles() {
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE and AMX-INT8 in leaf 7's EDX
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kNeeded) == kNeeded;
}

// Whether this processor converts float16, as all with AVX2 do that have been built. Not all compilers know its name.
bool has_float16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

// Whether the system lets this process use the tiles of AMX. A process must ask, because the system then has more to save
// for each of its threads.
bool may_use_tiles() {
  constexpr long kRequest = 0x1023, kTiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTiles) == 0;
  return allowed;
}

// The kernels of an instruction set; null where this processor has it not.
const Kernels* find(const char* name) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_float16();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  const Kernels* all[] = {bf16 && has_tiles() && may_use_tiles() ? amx_kernels() : nullptr,
                          bf16 ? avx512_bf16_kernels() : nullptr, vnni ? avx512_vnni_kernels() : nullptr,
                          avx512 ? avx512_kernels() : nullptr, avx2 ? avx2_kernels() : nullptr};
  for (const Kernels* one : all)
    if (one && !strcmp(one->name, name)) return one;
  return nullptr;
}

void check_sizes(std::initializer_list<int32_t> sizes) {
  for (int32_t size : sizes)
    if (size < 1 || size > 1 << 24) fail("a size of %d", size);
}

void check_experts(const InflightLayer& one, int layer) {
  const InflightExperts& experts = one.experts;
  check_sizes({experts.count, experts.per_token, experts.intermediate, experts.groups, experts.groups_per_token});
  const int in_group = experts.count / experts.groups;
  if (experts.count % experts.groups || experts.groups_per_token > experts.groups ||
      experts.per_token > in_group * experts.groups_per_token || experts.group_best < 1 ||
      (experts.groups > 1 && in_group < experts.group_best))
    fail("layer %d chooses %d of %d experts, in %d of %d groups", layer, experts.per_token, experts.count,
         experts.groups_per_token, experts.groups);
  if (experts.routing < INFLIGHT_SOFTMAX || experts.routing > INFLIGHT_INPUT_SIGMOID)
    fail("layer %d chooses experts in way %d", layer, experts.routing);
  if (experts.shared_gate && !one.intermediate) fail("layer %d has a gate of no feed-forward", layer);
  if (!(experts.limit >= 0.0f)) fail("layer %d clamps what experts compute to %g", layer, experts.limit);
}

void check_layer(const InflightSpec& spec, int layer) {
  const InflightLayer& one = spec.layer[layer];
  check_sizes({one.heads, one.kv_heads, one.head_dim});
  if (one.head_dim > kWidestHead) fail("heads of %d dimensions", one.head_dim);
  const int64_t width = ((int64_t)one.heads + 2 * one.kv_heads) * one.head_dim;
  if (width > 1 << 30) fail("%lld queries, keys and values of a token", (long long)width);
  if (one.window < 0 || one.chunk < 0)
    fail("layer %d has a window of %d and chunks of %d", layer, one.window, one.chunk);
  if (one.heads % one.kv_heads || one.heads / one.kv_heads > kTaskRows)
    fail("%d heads share %d heads of keys", one.heads, one.kv_heads);
  if (one.rope < -1 || one.rope >= spec.ropes) fail("there is no rotary embedding %d", one.rope);
  if (one.rope >= 0) {
    const int dim = spec.rope[one.rope].dim;
    if (dim < 0 || dim > one.head_dim || dim % 2) fail("%d of %d dimensions are rotated", dim, one.head_dim);
  }
  if (!(one.softcap >= 0.0f)) fail("layer %d has a soft cap of %g", layer, one.softcap);
  if (one.query_length < 0) fail("layer %d scales queries every %d positions", layer, one.query_length);
  if (one.intermediate || !one.experts.count) check_sizes({one.intermediate});
  if (one.experts.count) check_experts(one, layer);
}

void check_spec(const InflightSpec& spec, int threads) {
  if (threads < 1 || threads > 1024) fail("a pool of %d threads", threads);
  check_sizes({spec.layers, spec.hidden, spec.vocabulary});
  if (spec.ropes < 0) fail("%d rotary embeddings", spec.ropes);
  for (int layer = 0; layer < spec.layers; layer++) check_layer(spec, layer);
  if (!(spec.logit_softcap >= 0.0f)) fail("logits with a soft cap of %g", spec.logit_softcap);
  if (spec.embedding_type != kFloat32 && spec.embedding_type != kBfloat16)
    fail("an embedding of type %d", spec.embedding_type);
}

template <class Body>
int32_t guarded(char* message, int32_t size, Body body) {
  try {
    body();
    return 0;
  } catch (const Failure& failure) {
    snprintf(message, size, "%s", failure.text);
  } catch (const std::exception& error) {
    snprintf(message, size, "%s", error.what());
  }
  return 1;
}

}  // namespace

extern "C" {

int32_t inflight_abi(void) { return INFLIGHT_ABI; }

const char* inflight_sources(void) { return INFLIGHT_SOURCES; }

int32_t inflight_has(const char* instruction_set) { return find(instruction_set) != nullptr; }

double inflight_bf16_gain(const char* instruction_set) {
  const Kernels* kernels = find(instruction_set);
  return kernels ? kernels->bf16_gain() : 0.0;
}

InflightModel* inflight_create(const InflightSpec* spec, const char* instruction_set, int32_t threads, char* message,
                               int32_t size) {
  InflightModel* model = nullptr;
  guarded(message, size, [&] {
    const Kernels* kernels = find(instruction_set);
    if (!kernels) fail("this processor has no %s", instruction_set);
    check_spec(*spec, threads);
    model = new InflightModel(*spec, *kernels, threads);
  });
  return model;
}

void inflight_destroy(InflightModel* model) { delete model; }

int32_t inflight_set_weight(InflightModel* model, int32_t layer, int32_t which, int32_t expert,
                            const InflightWeight* weight, char* message, int32_t size) {
  return guarded(message, size, [&] { model->set_weight(layer, which, expert, *weight); });
}

int32_t inflight_set_vector(InflightModel* model, int32_t layer, int32_t which, const float* values, char* message,
                            int32_t size) {
  return guarded(message, size, [&] { model->set_vector(layer, which, values); });
}

int32_t inflight_set_cache(InflightModel* model, const InflightCache* cache, char* message, int32_t size) {
  return guarded(message, size, [&] { model->set_cache(*cache); });
}

int32_t inflight_step(InflightModel* model, const InflightStep* step, char* message, int32_t size) {
  return guarded(message, size, [&] { model->run(*step); });
}

int32_t inflight_logits(InflightModel* model, int32_t rows, const int32_t* row, float* logits, char* message,
                        int32_t size) {
  return guarded(message, size, [&] { model->logits(rows, row, logits); });
}

int32_t inflight_hidden(InflightModel* model, int32_t rows, const int32_t* row, float* hidden, char* message,
                        int32_t size) {
  return guarded(message, size, [&] { model->hidden(rows, row, hidden); });
}

int32_t inflight_draw(InflightModel* model, int32_t rows, const float* logits, const InflightSample* samples,
                      int32_t* drawn, char* message, int32_t size) {
  return guarded(message, size, [&] { model->draw(rows, logits, samples, drawn); });
}

int32_t inflight_phases(const InflightModel* model, double* seconds, int32_t count) {
  std::copy_n(model->seconds, std::min<int>(count, kPhases), seconds);
  return kPhases;
}

const char* inflight_phase_name(int32_t phase) { return phase >= 0 && phase < kPhases ? kPhaseNames[phase] : nullptr; }
}
