// The router: RMS norm, logits, and the choice of experts.

constexpr int kRouteThreads = 128, kRouteUnits = 16;

// hidden = rms(x, norm) and the router's logits; with kChooses the last block also makes the choice. One warp has one row of
// the router, which is of a float type, its first kRouteUnits units a lane in flight early. `counter` is zero. Grid: (rows of
// 4).
template <bool kChooses, int NT, class B, int kEach>
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
  if constexpr (kChooses) {
    if (!last_block(counter, gridDim.x)) return;
    for (int t = threadIdx.x / kWarp; t < tokens; t += kRouteThreads / kWarp) choose_and_write<kEach>(choice, t);
  }
}
