#include "isa_avx2.h"
#include "table.h"

const inflight::Kernels* inflight::avx2_kernels() { return &kTable; }
