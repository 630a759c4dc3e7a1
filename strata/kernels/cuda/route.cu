// The router: RMS norm, logits, softmax, top-k, and the slot of each chosen expert.

constexpr int kRouteThreads = 128, kRouteExperts = 512;  // the most experts of a layer

// One block, one token: the top_k of n experts by probability, ties to the lower index. Each thread counts how many are
// better than its own; who counts r has rank r.
__device__ __forceinline__ void choose(const float* logits, int n, int top_k, bool normalise, const int* slot_of, int* ids,
                                       int* slots, float* weights) {
  constexpr int kEach = kRouteExperts / kRouteThreads;
  __shared__ float4 all4[kRouteExperts / 4];
  __shared__ float parts[kRouteThreads / kWarp], chosen[kWarp];
  float* all = (float*)all4;
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float p[kEach], top = minus_infinity(), sum = 0;
  int slot[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    int e = i * kRouteThreads + threadIdx.x;
    p[i] = e < n ? __ldcg(logits + e) : minus_infinity();
    slot[i] = slot_of && e < n ? __ldcg(slot_of + e) : e;
    top = fmaxf(top, p[i]);
  }
  top = warp_max(top);
  if (lane == 0) parts[warp] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRouteThreads / kWarp; i++) top = fmaxf(top, parts[i]);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    p[i] = expf(p[i] - top);  // 0 past the end
    all[i * kRouteThreads + threadIdx.x] = p[i];
    sum += p[i];
  }
  sum = lane_sum(sum);
  if (lane == 0) parts[warp] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int i = 0; i < kRouteThreads / kWarp; i++) sum += parts[i];
  int rank[kEach] = {};
  for (int j = 0; j < n; j += 4) {
    float4 q = all4[j / 4];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      if (i * kRouteThreads >= n) break;
      int e = i * kRouteThreads + threadIdx.x;
      rank[i] += (q.x > p[i] || (q.x == p[i] && j < e)) + (q.y > p[i] || (q.y == p[i] && j + 1 < e)) +
                 (q.z > p[i] || (q.z == p[i] && j + 2 < e)) + (q.w > p[i] || (q.w == p[i] && j + 3 < e));
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    int e = i * kRouteThreads + threadIdx.x;
    if (e < n && rank[i] < top_k) {
      ids[rank[i]] = e;
      slots[rank[i]] = slot[i];
      chosen[rank[i]] = p[i] / sum;
    }
  }
  __syncthreads();
  if (threadIdx.x < top_k) {
    float all_chosen = 0;
    for (int r = 0; r < top_k; r++) all_chosen += chosen[r];
    weights[threadIdx.x] = normalise ? chosen[threadIdx.x] / all_chosen : chosen[threadIdx.x];
  }
  __syncthreads();
}

// hidden = rms(x, norm); ids, slots and weights [tokens, top_k] of the chosen experts. `logits` [tokens, n] and
// `counter` (zero) are scratch. A group of lanes has one row of the router; the last block chooses. Grid: (row blocks).
template <int NT, class T>
__global__ void __launch_bounds__(kRouteThreads) route(const u8* router, const float* x, const float* norm, float eps,
                                                       int e, int n, int tokens, int top_k, int normalise,
                                                       const int* slot_of, float* hidden, float* logits, u32* counter,
                                                       int* ids, int* slots, float* weights) {
  extern __shared__ float4 shared[];
  __shared__ float squares[NT][kWarp];
  using B = typename T::Block;
  let_next_start();
  int own = blockIdx.x * (kRouteThreads / T::kLanes) + threadIdx.x / T::kLanes, row[1] = {min(own, n - 1)};
  int units = e / B::kUnit;
  const u8* w[1] = {router};
  u64 total = blocks_in<B>(n, e);
  Rows<T, 1, NT> rows;
  rows.load(w, total, row, units);
  wait_for_previous();
  Staged s = staged((float*)shared, e, NT);
  for (int first = 0; first < tokens; first += NT) {
    int some = min(NT, tokens - first);
    stage<NT>(s, x + (size_t)first * e, some, e, norm, squares);
    __syncthreads();
    float acc[1][NT] = {};
    if (first > 0) rows.load(w, total, row, units);
    rows.dot(w, total, row, units, s, acc);
#pragma unroll
    for (int t = 0; t < NT; t++) {
      float inverse = inverse_rms(squares[t], e, eps);
      if (t >= some) break;
      if (own < n && threadIdx.x % T::kLanes == 0) logits[(size_t)(first + t) * n + own] = acc[0][t] * inverse;
      for (int c = blockIdx.x * blockDim.x + threadIdx.x; c < e; c += gridDim.x * blockDim.x)
        hidden[(size_t)(first + t) * e + c] = s.x[t * s.stride + padded(c)] * inverse;
    }
    __syncthreads();
  }
  if (!last_block(counter, gridDim.x)) return;
  for (int t = 0; t < tokens; t++)
    choose(logits + (size_t)t * n, n, top_k, normalise, slot_of, ids + t * top_k, slots + t * top_k,
           weights + t * top_k);
}
