// How a token is drawn: by the inverse of the distribution function, over the tokens in the order of their logits.
//
// The order is needed only where a limit falls. Tokens lie in buckets of nearly equal logits, whose masses are summed;
// a bucket in which a limit falls is sorted. Banned tokens lie in a bucket of their own behind all others, into which
// nobody looks: a guide bans most of the vocabulary.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "model.h"

namespace inflight {
namespace {

constexpr int kBuckets = 2048;
constexpr double kPerBucket = 32.0;  // buckets for each factor of e between weights

// Where a walk through a row's tokens ended.
struct Place {
  int token;      // -1: behind the last one
  int number;     // tokens before it
  double before;  // what they weigh
};

// A bucket, and what is before it.
struct Bucket {
  int index, count, number;
  double mass, before;
};

// A row's tokens that are not banned, from the likeliest on; of equal logits, the first one comes first.
class Ranking {
 public:
  Ranking(const float* row, int size, Drawing& memory) : row_(row), size_(size), memory_(memory) {
    memory.mass.assign(kBuckets, 0.0);
    memory.count.assign(kBuckets, 0);
    for (int i = 0; i < size; i++) {
      if (memory.bucket[i] == kBuckets) continue;
      memory.mass[memory.bucket[i]] += memory.weights[i];
      memory.count[memory.bucket[i]]++;
    }
  }

  // Finds the first token for which `ends(weight, before, number)` holds; it must hold for none in the buckets for
  // which `passes(bucket)` does, which are not looked into.
  template <class Passes, class Ends>
  Place find(Passes passes, Ends ends) {
    Place place{-1, 0, 0.0};
    for (int index = 0; index < kBuckets; index++) {
      const Bucket bucket{index, memory_.count[index], place.number, memory_.mass[index], place.before};
      if (!bucket.count) continue;
      if (!passes(bucket)) {
        for (int token : sorted(index)) {
          if (ends(memory_.weights[token], place.before, place.number)) {
            place.token = token;
            return place;
          }
          place.before += memory_.weights[token];
          place.number++;
        }
      }
      place.number = bucket.number + bucket.count;
      place.before = bucket.before + bucket.mass;
    }
    return place;
  }

 private:
  const std::vector<int32_t>& sorted(int bucket) {
    auto& tokens = memory_.sorted;
    tokens.clear();
    for (int i = 0; i < size_; i++)
      if (memory_.bucket[i] == bucket) tokens.push_back(i);
    std::stable_sort(tokens.begin(), tokens.end(), [&](int32_t a, int32_t b) {
      return std::min(row_[a], FLT_MAX) > std::min(row_[b], FLT_MAX);  // infinity counts as the largest float
    });
    return tokens;
  }

  const float* row_;
  const int size_;
  Drawing& memory_;
};

}  // namespace

void Model::draw(int rows, const float* logits, const InflightSample* samples, int32_t* drawn) {
  for (int row = 0; row < rows; row++) check_sample(samples[row], row);
  lap_ = std::chrono::steady_clock::now();
  pool_.run(rows, [&](int row, int thread) {
    drawn[row] = draw_one(logits + (int64_t)row * spec_.vocabulary, samples[row], drawing_[thread]);
  });
  lap(kSample);
}

int32_t Model::draw_one(const float* row, const InflightSample& sample, Drawing& memory) const {
  const int size = spec_.vocabulary, top = kernels_.argmax(row, size);
  if (row[top] != row[top]) return INFLIGHT_NAN;
  if (row[top] == -INFINITY) return INFLIGHT_ALL_BANNED;
  if (sample.temperature <= 0.0) return top;
  memory.weights.resize(size);
  memory.bucket.resize(size);
  const double largest = std::min((double)row[top], (double)FLT_MAX);
  kernels_.weigh(row, size, largest, sample.temperature, kPerBucket, kBuckets, memory.weights.data(),
                 memory.bucket.data());
  Ranking ranking(row, size, memory);
  // The likeliest tokens are kept: top_k of them, and of these as many as top_p and min_p leave.
  const int most = sample.top_k > 0 ? std::min(sample.top_k, size) : size;
  const Place last = ranking.find([&](const Bucket& bucket) { return bucket.number + bucket.count <= most; },
                                  [&](double, double, int number) { return number >= most; });
  const double limit = sample.top_p * last.before;
  const double light = sample.min_p > 0.0 ? -std::log(sample.min_p) * kPerBucket - 1.0 : kBuckets;
  const Place end = ranking.find(
      [&](const Bucket& bucket) {
        return bucket.number > 0 && bucket.number + bucket.count <= most && bucket.before + bucket.mass < limit &&
               bucket.index < light;
      },
      [&](double weight, double before, int number) {
        return number > 0 && (number >= most || before >= limit || weight < sample.min_p);
      });
  const double target = sample.number * end.before;
  const Place drawn = ranking.find(
      [&](const Bucket& bucket) {
        return bucket.number + bucket.count < end.number && bucket.before + bucket.mass <= target;
      },
      [&](double weight, double before, int number) { return before + weight > target || number + 1 >= end.number; });
  return drawn.token;
}

}  // namespace inflight
