#include "isa_amx.h"
#include "table.h"

const inflight::Kernels* inflight::amx_kernels() { return &kTable; }
