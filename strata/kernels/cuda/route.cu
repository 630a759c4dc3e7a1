// The router: RMS norm, logits, and the choice of experts.

constexpr int kRouteThreads = 128;

// hidden = rms(x, norm) and the router's logits; with kChooses the last block also makes the choice. A group of lanes has
// one row of the router. `counter` is zero. Grid: (row blocks).
template <bool kChooses, int NT, class T>
__global__ void __launch_bounds__(kRouteThreads) route(const u8* router, const float* x, const float* norm, float eps,
                                                       int e, int tokens, float* hidden, float* logits, u32* counter,
                                                       const Choice choice) {
  int n = choice.n;
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
  if constexpr (kChooses) {
    if (!last_block(counter, gridDim.x)) return;
    for (int t = threadIdx.x / kWarp; t < tokens; t += kRouteThreads / kWarp) choose_and_write(choice, t);
  }
}
