#include "isa_avx512.h"
#include "table.h"

const inflight::Kernels* inflight::avx512_vnni_kernels() { return &kTable; }
