// The table of the kernels of the instruction set whose `Isa` was included first.
#pragma once

#include "attend.h"
#include "cache.h"
#include "draw.h"
#include "quantized.h"
#include "rows.h"
#include "turns.h"

namespace {

const inflight::Kernels kTable = {
    Isa::kName, kPanel, Isa::kPanelsOfFewRows, packed_bytes, pack, multiply, prepare, add_normalized, add_scaled,
    normalize, rotate, store, attend_scratch, attend, merge, finish, squeeze,
    argmax, weigh_all, bf16_gain,
};

}  // namespace
