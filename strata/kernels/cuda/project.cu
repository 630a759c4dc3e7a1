// Dense projections of a few tokens: RMS norm into several weights at once, or added to the residual stream.

enum Onto { kNothing, kResidual, kBias };  // what a product is added to: what `out` held, or a bias

struct Segment {
  const u8* weight;
  float* out;         // [tokens, rows]
  const float* bias;  // [rows], for kBias
  int rows, tile;   // `tile` picks one of the kernel's Tiles
  int first_block;  // blocks first_block .. next segment's first_block - 1 share the rows
  int unused;
};
struct Segments {
  Segment at[4];
  int count, blocks;
};

template <Onto kOnto, bool kWalks, int NT, class T>
__device__ __forceinline__ void project_rows(const Segment& seg, int blocks, const float* x, const float* norm, float eps,
                                             float scale, int k, int tokens) {
  extern __shared__ float4 shared[];
  __shared__ float squares[NT][kWarp], parts[kWalks ? 2 : 1][T::kWarps][kTileRows * NT];
  using B = typename T::Block;
  int units = k / B::kUnit, member = threadIdx.x / kWarp, g = threadIdx.x % kWarp / 4;
  u64 total = blocks_in<B>(seg.rows, k);
  const u8* w[2] = {seg.weight, seg.weight};
  Rows<T, NT> rows;
  int row[2], tile = blockIdx.x - seg.first_block, tiles = (seg.rows + kTileRows - 1) / kTileRows;
  auto load = [&]() {  // rows past the end repeat the last one and are not written
#pragma unroll
    for (int r = 0; r < 2; r++) row[r] = min(tile * kTileRows + g + 8 * r, seg.rows - 1);
    if (member < T::kWarps) rows.load(w, total, row, units, member);
  };

  load();
  wait_for_previous();
  Staged s = staged((float*)shared, k, NT);
  stage<B::kCoded, NT>(s, x, tokens, k, norm, squares);
  __syncthreads();

  int t = threadIdx.x % NT;  // thread i < kTileRows * NT writes row i / NT of token t
  float factor = scale;
  if (norm)
#pragma unroll
    for (int i = 0; i < NT; i++) {
      float one = inverse_rms(squares[i], k, eps);
      factor = t == i ? scale * one : factor;
    }
  for (int buffer = 0; tile < tiles; buffer ^= 1) {  // one round unless the blocks are fewer than the tiles
    int mine = tile * kTileRows + threadIdx.x / NT;
    bool writes = threadIdx.x < kTileRows * NT && mine < seg.rows && t < tokens;
    float* out = seg.out + (size_t)t * seg.rows + mine;
    float before = 0;  // fetched before it is needed
    if (kOnto == kResidual && writes) before = *out;
    if (kOnto == kBias && writes) before = seg.bias[mine];
    float acc[2][NT] = {};
    if (member < T::kWarps) {
      rows.dot(w, total, row, units, member, s, acc);
      leave<NT>(acc, parts[buffer][member]);
    }
    tile += blocks;
    if (kWalks && tile < tiles) load();
    __syncthreads();
    if (writes) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < T::kWarps; i++) sum += parts[buffer][i][threadIdx.x];
      *out = fmaf(sum, factor, before);
    }
    if (!kWalks) break;
  }
}

template <Onto kOnto, bool kWalks, int NT, class T, class... Rest>
__device__ __forceinline__ void project_tile(int tile, const Segment& seg, int blocks, const float* x, const float* norm,
                                             float eps, float scale, int k, int tokens) {
  if constexpr (sizeof...(Rest) > 0) {
    if (tile > 0)
      return project_tile<kOnto, kWalks, NT, Rest...>(tile - 1, seg, blocks, x, norm, eps, scale, k, tokens);
  }
  project_rows<kOnto, kWalks, NT, T>(seg, blocks, x, norm, eps, scale, k, tokens);
}

// out = scale * rms(x, norm) @ weight.T, and what kOnto says, for up to four weights; `norm` may be null. Grid: (blocks,
// ceil(tokens / NT)). A block is one team of up to kThreads threads.
template <Onto kOnto, bool kWalks, int NT, int kThreads, class... Tiles>
__global__ void __launch_bounds__(kThreads, NT == 1 && kThreads <= 768 ? 768 / kThreads : 1)
    project(const Segments segments, const float* x, const float* norm, float eps, float scale, int k, int tokens) {
  let_next_start();
  int i = 0;
  while (i + 1 < segments.count && blockIdx.x >= segments.at[i + 1].first_block) i++;
  Segment seg = segments.at[i];
  int blocks = (i + 1 < segments.count ? segments.at[i + 1].first_block : segments.blocks) - seg.first_block;
  int first = blockIdx.y * NT;
  seg.out += (size_t)first * seg.rows;
  project_tile<kOnto, kWalks, NT, Tiles...>(seg.tile, seg, blocks, x + (size_t)first * k, norm, eps, scale, k,
                                            min(NT, tokens - first));
}

// gate = silu(gate) * up, `count` of each in rows of `width`; times sigmoid(share[row]) unless `share` is null.
__global__ void __launch_bounds__(256) gated(float* gate, const float* up, const float* share, int count, int width) {
  let_next_start();
  wait_for_previous();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float activation = gate[i] / (1.0f + expf(-gate[i])) * up[i];
  gate[i] = share ? activation / (1.0f + expf(-share[i / width])) : activation;
}
