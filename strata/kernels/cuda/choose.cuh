// The choice of experts from router logits, by one warp.
#pragma once

constexpr int kMostChosen = kWarp;

struct Choice {          // of one call: everything [tokens, top_k] but the logits [tokens, n]
  const float* logits;
  const int* slot_of;    // expert -> slot; null: the expert's own number
  int *ids, *slots;
  float* weights;
  int n, top_k, normalise;
};

// One warp: softmax over the n <= kEach * 32 logits of token t, and its top_k best first, ties to the lower index. Rank r
// goes to lane r: expert, slot and weight.
template <int kEach>
__device__ __forceinline__ void choose(const Choice& c, int t, int& id, int& slot, float& weight) {
  int lane = threadIdx.x % kWarp, start = lane * kEach;  // a lane's experts are neighbours
  const float* logits = c.logits + (size_t)t * c.n;
  u32 key[kEach];  // ordered as the floats are; 0 is below them all
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    u32 bits = start + i < c.n ? __float_as_uint(__ldcg(logits + start + i)) : 0;
    key[i] = start + i < c.n ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 0;
  }
  auto value = [](u32 k) { return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); };
  float top = 0, sum = 0, mine = 0, all = 0;
  id = 0;
  for (int r = 0; r < c.top_k; r++) {
    u32 best = 0;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        if (key[i] > best) best = key[i], at = i;
    }
    u32 winner = warp_max(best);
    if (r == 0) {
      top = value(winner);
#pragma unroll
      for (int i = 0; i < kEach; i++) {
            if (key[i] > 0) sum += expf(value(key[i]) - top);
      }
    }
    int holder = __ffs(__ballot_sync(kAllLanes, best == winner)) - 1;
    int chosen = __shfl_sync(kAllLanes, start + at, holder);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
        if (start + i == chosen) key[i] = 0;
    }
    float p = expf(value(winner) - top);
    all += p;
    if (lane == r) mine = p, id = chosen;
  }
  sum = lane_sum(sum);
  weight = mine / (c.normalise ? all : sum);
  slot = c.slot_of && lane < c.top_k ? __ldcg(c.slot_of + id) : id;
}

// The same, and lanes below top_k write what they got.
template <int kEach>
__device__ __forceinline__ void choose_and_write(const Choice& c, int t) {
  int id, slot, at = t * c.top_k + threadIdx.x % kWarp;
  float weight;
  choose<kEach>(c, t, id, slot, weight);
  if (threadIdx.x % kWarp >= c.top_k) return;
  c.ids[at] = id;
  c.slots[at] = slot;
  c.weights[at] = weight;
}
