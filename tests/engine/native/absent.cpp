// In place of instruction sets that a test does not need: compiling their kernels takes longer than the test.
#include "kernels.h"

namespace inflight {
__attribute__((weak)) const Kernels* avx2_kernels() { return nullptr; }
__attribute__((weak)) const Kernels* avx512_kernels() { return nullptr; }
__attribute__((weak)) const Kernels* avx512_vnni_kernels() { return nullptr; }
__attribute__((weak)) const Kernels* avx512_bf16_kernels() { return nullptr; }
__attribute__((weak)) const Kernels* amx_kernels() { return nullptr; }
}  // namespace inflight
