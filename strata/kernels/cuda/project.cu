// Dense projections of a few tokens: RMS norm into several weights at once, or added to the residual stream.

constexpr int kProjectThreads = 384;

struct Segment {
  const u8* weight;
  float* out;       // [tokens, rows]
  int rows, tile;   // `tile` picks one of the kernel's Tiles
  int first_block;  // blocks first_block .. next segment's first_block - 1 share the rows
  int unused;
};
struct Segments {
  Segment at[4];
  int count, blocks;
};

template <bool kAdd, int NT, class T>
__device__ __forceinline__ void project_rows(const Segment& seg, int blocks, const float* x, const float* norm, float eps,
                                             int k, int tokens) {
  extern __shared__ float4 shared[];
  __shared__ float squares[NT][kWarp];
  using B = typename T::Block;
  constexpr int NR = T::kRows;
  int units = k / B::kUnit, step = blockDim.x / T::kLanes * NR, lane = threadIdx.x % T::kLanes;
  u64 total = blocks_in<B>(seg.rows, k);
  int base = (blockIdx.x - seg.first_block) * step;
  const u8* w[NR];
  int row[NR];
  // Rows past the end repeat the last one and are not written, so that whole warps stay for the butterfly.
  auto take = [&]() {
#pragma unroll
    for (int r = 0; r < NR; r++) row[r] = min(base + (int)threadIdx.x / T::kLanes * NR + r, seg.rows - 1);
  };
#pragma unroll
  for (int r = 0; r < NR; r++) w[r] = seg.weight;

  Rows<T, NR, NT> rows;
  take();
  rows.load(w, total, row, units);
  wait_for_previous();
  Staged s = staged((float*)shared, k, NT);
  stage<NT>(s, x, tokens, k, norm, squares);
  __syncthreads();
  float inverse[NT];
#pragma unroll
  for (int t = 0; t < NT; t++) inverse[t] = norm ? inverse_rms(squares[t], k, eps) : 1.0f;

  for (bool first = true; base < seg.rows; base += blocks * step, first = false) {
    take();
    if (!first) rows.load(w, total, row, units);
    // Lane r of a group writes row r; what is added to is fetched before it is needed.
    int mine = base + (int)threadIdx.x / T::kLanes * NR + lane;
    bool writes = lane < NR && mine < seg.rows;
    float before[NT] = {};
    if constexpr (kAdd)
#pragma unroll
      for (int t = 0; t < NT; t++)
        if (writes && t < tokens) before[t] = seg.out[(size_t)t * seg.rows + mine];
    float acc[NR][NT] = {};
    rows.dot(w, total, row, units, s, acc);
#pragma unroll
    for (int t = 0; t < NT; t++) {
      float sum = acc[0][t];
#pragma unroll
      for (int r = 1; r < NR; r++) sum = lane == r ? acc[r][t] : sum;
      if (writes && t < tokens) seg.out[(size_t)t * seg.rows + mine] = fmaf(sum, inverse[t], before[t]);
    }
  }
}

template <bool kAdd, int NT, class T, class... Rest>
__device__ __forceinline__ void project_tile(int tile, const Segment& seg, int blocks, const float* x, const float* norm,
                                             float eps, int k, int tokens) {
  if constexpr (sizeof...(Rest) > 0) {
    if (tile > 0) return project_tile<kAdd, NT, Rest...>(tile - 1, seg, blocks, x, norm, eps, k, tokens);
  }
  project_rows<kAdd, NT, T>(seg, blocks, x, norm, eps, k, tokens);
}

// out (+)= rms(x, norm) @ weight.T for up to four weights; `norm` may be null. Grid: (blocks, ceil(tokens / NT)).
template <bool kAdd, int NT, class... Tiles>
__global__ void __launch_bounds__(kProjectThreads) project(const Segments segments, const float* x, const float* norm,
                                                       float eps, int k, int tokens) {
  let_next_start();
  int i = 0;
  while (i + 1 < segments.count && blockIdx.x >= segments.at[i + 1].first_block) i++;
  Segment seg = segments.at[i];
  int blocks = (i + 1 < segments.count ? segments.at[i + 1].first_block : segments.blocks) - seg.first_block;
  int first = blockIdx.y * NT;
  seg.out += (size_t)first * seg.rows;
  project_tile<kAdd, NT, Tiles...>(seg.tile, seg, blocks, x + (size_t)first * k, norm, eps, k, min(NT, tokens - first));
}
