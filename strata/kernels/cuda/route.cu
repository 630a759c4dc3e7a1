// The router: RMS norm, logits, and the choice of experts.

constexpr int kRouteThreads = 128, kRouteUnits = 16;

struct Choice {          // of one call: everything [tokens, top_k] but the logits [tokens, n]
  const float* logits;
  const int* slot_of;    // expert -> slot; null: the expert's own number
  int *ids, *slots;
  float* weights;
  int n, top_k, normalise;
  float scale;           // of the weights
};

// One warp: softmax over the n <= kEach * 32 logits of token t, and its top_k best first, ties to the lower index. Rank r
// goes to lane r.
template <int kEach>
__device__ __forceinline__ void choose(const Choice& c, int t) {
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
  int id = 0;
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
  if (lane >= c.top_k) return;
  c.ids[t * c.top_k + lane] = id;
  c.slots[t * c.top_k + lane] = c.slot_of ? __ldcg(c.slot_of + id) : id;
  c.weights[t * c.top_k + lane] = c.scale * (mine / (c.normalise ? all : sum));
}

// hidden = rms(x, norm), the router's logits, and, in the last block, the choice. One warp has one row of the router, which
// is of a float type, its first kRouteUnits units a lane in flight early. `counter` is zero. Grid: (rows of 4).
template <int NT, class B, int kEach>
__global__ void __launch_bounds__(kRouteThreads) route(const u8* router, const float* x, const float* norm, float eps,
                                                       int e, int tokens, float* hidden, float* logits, u32* counter,
                                                       const Choice choice) {
  extern __shared__ float4 shared[];
  __shared__ float squares[NT][kWarp];
  static_assert(!B::kCoded);
  let_next_start();
  int n = choice.n, row = blockIdx.x * (kRouteThreads / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int units = e / B::kUnit;
  u64 start = (u64)min(row, n - 1) * units;
  typename B::Raw raw[kRouteUnits];
#pragma unroll
  for (int i = 0; i < kRouteUnits; i++)
    if (i * kWarp + lane < units) raw[i] = B::load(router, 0, start + i * kWarp + lane);
  wait_for_previous();
  Staged s = staged((float*)shared, e, NT);
  for (int first = 0; first < tokens; first += NT) {
    int some = min(NT, tokens - first);
    stage<false, NT>(s, x + (size_t)first * e, some, e, norm, squares);
    __syncthreads();
    float acc[NT] = {};
    auto add = [&](const typename B::Raw& r, int unit) {
#pragma unroll
      for (int q = 0; q < B::kSubLen / 4; q++) {
        float4 v = B::quad(r, unit, 0, q);
#pragma unroll
        for (int t = 0; t < NT; t++) {
          float4 a = *(const float4*)(s.x + t * s.stride + padded(B::column(unit, 0)) + 4 * q);
          acc[t] = fmaf(v.x, a.x, fmaf(v.y, a.y, fmaf(v.z, a.z, fmaf(v.w, a.w, acc[t]))));
        }
      }
    };
#pragma unroll
    for (int i = 0; i < kRouteUnits; i++)
      if (i * kWarp + lane < units) add(raw[i], i * kWarp + lane);
    for (int u = kRouteUnits * kWarp + lane; u < units; u += kWarp) add(B::load(router, 0, start + u), u);
#pragma unroll
    for (int t = 0; t < NT; t++) {
      float inverse = inverse_rms(squares[t], e, eps), sum = lane_sum(acc[t]);
      if (t >= some) break;
      if (row < n && lane == 0) logits[(size_t)(first + t) * n + row] = sum * inverse;
      for (int c = blockIdx.x * blockDim.x + threadIdx.x; c < e; c += gridDim.x * blockDim.x)
        hidden[(size_t)(first + t) * e + c] = s.x[t * s.stride + padded(c)] * inverse;
    }
    __syncthreads();
  }
  if (!last_block(counter, gridDim.x)) return;
  for (int t = threadIdx.x / kWarp; t < tokens; t += kRouteThreads / kWarp) choose<kEach>(choice, t);
}

// The choice of experts for many tokens from their logits, one warp a token.
template <int kEach>
__global__ void __launch_bounds__(kRouteThreads) choose_rows(const Choice choice, int tokens) {
  wait_for_previous();
  let_next_start();
  int t = blockIdx.x * (kRouteThreads / kWarp) + threadIdx.x / kWarp;
  if (t < tokens) choose<kEach>(choice, t);
}
