// What a step is checked for before any kernel sees it.
#include "model.h"

namespace inflight {

void Model::check(const InflightStep& step) const {
  if (!cache_.keys) fail("there is no cache yet");
  if (step.tokens <= 0) fail("a step has %d tokens", step.tokens);
  for (int token = 0; token < step.tokens; token++)
    if (step.ids[token] < 0 || step.ids[token] >= spec_.vocabulary)
      fail("token %d is %d; the vocabulary has %d", token, step.ids[token], spec_.vocabulary);
  int64_t tokens = 0;
  for (int i = 0; i < step.ranges; i++) {
    check_range(step.range[i], i);
    tokens += step.range[i].count;
  }
  if (tokens != step.tokens) fail("the ranges have %lld tokens; the step has %d", (long long)tokens, step.tokens);
  if (step.rows < 0) fail("%d rows", step.rows);
  for (int row = 0; row < step.rows; row++)
    if (step.row[row] < 0 || step.row[row] >= step.tokens)
      fail("row %d is token %d; the step has %d", row, step.row[row], step.tokens);
}

void Model::check_range(const InflightRange& range, int index) const {
  if (range.count <= 0 || range.start < 0 || range.at < 0 || range.num_blocks < 0)
    fail("range %d has %d tokens from position %d, stored at %d in %d blocks", index, range.count, range.start, range.at,
         range.num_blocks);
  const int64_t blocks = cache_.slots / cache_.block_size, room = (int64_t)range.num_blocks * cache_.block_size;
  const int64_t length = (int64_t)range.start + range.count;
  if ((int64_t)range.at + range.count > room || (!range.path && (range.at != range.start || length > room)))
    fail("range %d has tokens up to position %lld, stored from %d on; its blocks have room for %lld", index,
         (long long)length, range.at, (long long)room);
  for (int block = 0; block < range.num_blocks; block++)
    if (range.blocks[block] < 0 || range.blocks[block] >= blocks)
      fail("range %d has block %d; there are %lld", index, range.blocks[block], (long long)blocks);
  if (!range.path) return;
  if (range.count != 1 || range.trunk < 0 || range.trunk > range.start || range.trunk > room)
    fail("range %d has a path of %d tokens behind %d", index, range.count, range.trunk);
  for (int64_t key = range.trunk; key < length; key++)
    if (range.path[key - range.trunk] < 0 || range.path[key - range.trunk] >= room)
      fail("range %d has a key at %d; its blocks have room for %lld", index, range.path[key - range.trunk],
           (long long)room);
}

void Model::check_sample(const InflightSample& one, int row) const {
  if (!(one.temperature >= 0.0 && one.top_p > 0.0 && one.top_p <= 1.0 && one.min_p >= 0.0 && one.min_p <= 1.0 &&
        one.number >= 0.0 && one.number < 1.0 && one.top_k >= 0))
    fail("row %d is drawn with temperature %g, top_k %d, top_p %g, min_p %g by %g", row, one.temperature, one.top_k,
         one.top_p, one.min_p, one.number);
}

}  // namespace inflight
