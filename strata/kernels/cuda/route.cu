// The router: RMS norm, logits, softmax, top-k, and the slot of each chosen expert.

// One warp, one token: probabilities of n experts (kPerLane * 32 at most), best first, ties to the lower index.
template <int kPerLane>
__device__ __forceinline__ void choose(const float* logits, int n, int top_k, bool normalise, const int* slot_of,
                                       int* ids, int* slots, float* weights) {
  int lane = threadIdx.x % kWarp;
  float p[kPerLane], top = minus_infinity(), sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    int e = i * kWarp + lane;
    p[i] = e < n ? __ldcg(logits + e) : minus_infinity();
    top = fmaxf(top, p[i]);
  }
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    p[i] = expf(p[i] - top);
    sum += p[i];
  }
  sum = lane_sum(sum);
#pragma unroll
  for (int i = 0; i < kPerLane; i++) p[i] = i * kWarp + lane < n ? p[i] / sum : -1.0f;

  float mine = 0, chosen = 0;  // lane r keeps rank r
  int id = 0;
  for (int r = 0; r < top_k; r++) {
    float best = -1;
    int at = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (p[i] > best) {
        best = p[i];
        at = i * kWarp + lane;
      }
    }
    u32 bits = warp_max(best < 0 ? 0u : __float_as_uint(best) + 1);  // order of floats >= 0 is that of their bits
    bool holds = best >= 0 && __float_as_uint(best) + 1 == bits;
    u32 winner = ~warp_max(holds ? ~(u32)at : 0u);
#pragma unroll
    for (int i = 0; i < kPerLane; i++)
      if (i * kWarp + lane == winner) p[i] = -1;
    float value = __uint_as_float(bits - 1);
    chosen += value;
    if (lane == r) {
      mine = value;
      id = winner;
    }
  }
  if (lane < top_k) {
    ids[lane] = id;
    slots[lane] = slot_of ? slot_of[id] : id;
    weights[lane] = normalise ? mine / chosen : mine;
  }
}

// hidden = rms(x, norm); ids, slots and weights [tokens, top_k] of the chosen experts. `logits` [tokens, n] and
// `counter` (zero) are scratch. One row of the router per group of lanes; the last block chooses. Grid: (row blocks).
template <int kPerLane, int NT, class T>
__global__ void __launch_bounds__(128) route(const u8* router, const float* x, const float* norm, float eps,
                                                     int e, int n, int tokens, int top_k, int normalise,
                                                     const int* slot_of, float* hidden, float* logits, u32* counter,
                                                     int* ids, int* slots, float* weights) {
  extern __shared__ float4 shared[];
  __shared__ float squares[NT][kWarp];
  using B = typename T::Block;
  let_next_start();
  int row = blockIdx.x * (blockDim.x / T::kLanes) + threadIdx.x / T::kLanes, safe = min(row, n - 1);
  int units = e / B::kUnit;
  u64 total = blocks_in<B>(n, e);
  Row<T, NT> r;
  r.load(router, total, safe, units);
  wait_for_previous();
  Staged s = staged((float*)shared, e, NT);
  for (int first = 0; first < tokens; first += NT) {
    int some = min(NT, tokens - first);
    stage<NT>(s, x + (size_t)first * e, some, e, norm, squares);
    __syncthreads();
    float acc[NT] = {};
    if (first > 0) r.load(router, total, safe, units);
    r.dot(router, total, safe, units, s, acc);
#pragma unroll
    for (int t = 0; t < NT; t++) {
      float inverse = inverse_rms(squares[t], e, eps);
      if (t >= some) break;
      if (row < n && threadIdx.x % T::kLanes == 0) logits[(size_t)(first + t) * n + row] = acc[t] * inverse;
      for (int c = blockIdx.x * blockDim.x + threadIdx.x; c < e; c += gridDim.x * blockDim.x)
        hidden[(size_t)(first + t) * e + c] = s.x[t * s.stride + padded(c)] * inverse;
    }
    __syncthreads();
  }
  if (!last_block(counter, gridDim.x)) return;
  for (int t = threadIdx.x / kWarp; t < tokens; t += blockDim.x / kWarp)
    choose<kPerLane>(logits + (size_t)t * n, n, top_k, normalise, slot_of, ids + t * top_k, slots + t * top_k,
                     weights + t * top_k);
}
