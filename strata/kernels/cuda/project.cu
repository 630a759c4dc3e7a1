// Dense projections of a few tokens: RMS norm into several weights at once, or added to the residual stream.

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
  int groups = blockDim.x / T::kLanes, units = k / B::kUnit;
  u64 total = blocks_in<B>(seg.rows, k);
  int row = (blockIdx.x - seg.first_block) * groups + threadIdx.x / T::kLanes;

  Row<T, NT> r;
  if (row < seg.rows) r.load(seg.weight, total, row, units);
  wait_for_previous();
  Staged s = staged((float*)shared, k, NT);
  stage<NT>(s, x, tokens, k, norm, squares);
  __syncthreads();
  float inverse[NT];
#pragma unroll
  for (int t = 0; t < NT; t++) inverse[t] = norm ? inverse_rms(squares[t], k, eps) : 1.0f;

  for (int i = 0; row - (int)threadIdx.x / T::kLanes < seg.rows; row += blocks * groups, i++) {
    // Whole warps stay for the butterfly; groups past the end repeat the last row and do not write it.
    int safe = min(row, seg.rows - 1);
    if (i > 0 || row >= seg.rows) r.load(seg.weight, total, safe, units);
    float acc[NT] = {};
    r.dot(seg.weight, total, safe, units, s, acc);
    if (row < seg.rows && threadIdx.x % T::kLanes == 0) {
#pragma unroll
      for (int t = 0; t < NT; t++) {
        if (t >= tokens) break;
        float* out = seg.out + (size_t)t * seg.rows + row;
        *out = kAdd ? *out + acc[t] * inverse[t] : acc[t] * inverse[t];
      }
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
__global__ void __launch_bounds__(512) project(const Segments segments, const float* x, const float* norm,
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
