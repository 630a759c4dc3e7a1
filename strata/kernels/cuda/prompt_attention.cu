// Causal attention of a prompt on the matrix units; the keys and values are in the cache (append() in attention.cu has put them there).

// How many cells go through shared memory at once: a function of the head's size and the cell type alone.
template <int D, class Kv>
struct Cells {
  static constexpr int kHalves = Kv::kHalves;  // that a cell goes in, high and low
  static constexpr int kCount = D > 128 ? 16 : D * kHalves > 128 ? 32 : 64;
  static constexpr int kWarps = D > 128 ? 2 : 4;  // of 16 rows each
};

// A row is a query head of a token; the rows of a KV head are its tokens' heads, one token after the other. A block has
// kWarps * 16 rows of one KV head; q, multiplied by scale * log2(e), and the probabilities go in two halves. Later rows,
// which have more cells, start first. Grid: (row blocks, G).
template <int D, bool kNeox, class Kv, int kStages>
__global__ void __launch_bounds__(Cells<D, Kv>::kWarps* kWarp, 1)
    prompt_attend(const Heads h, const int* position, const typename Kv::Cache keys, const typename Kv::Cache values,
                  float scale, float* out, int tokens) {
  using C = Cells<D, Kv>;
  constexpr int kHalves = C::kHalves, kCells = C::kCount, kBlockRows = C::kWarps * 16, kThreads = C::kWarps * kWarp;
  constexpr int kTogether = D > 128 ? 2 : 4;  // rows of q that a warp prepares at once
  constexpr int kChunks = D / 8, kTile = kCells * kChunks;  // chunks of a row; of a tile's halves
  extern __shared__ uint4 shared[];
  uint4 *queries = shared, *tiles = shared + 2 * kBlockRows * kChunks;  // [kStages][keys, values][kHalves][kTile]
  HeadConstants<D, kNeox> constants;
  constants.load(h);
  wait_for_previous();
  let_next_start();
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = blockIdx.y, heads = h.heads / h.kv_heads;
  int first_row = (gridDim.x - 1 - blockIdx.x) * kBlockRows, position0 = *position;
  int last_token = min(tokens - 1, (first_row + kBlockRows - 1) / heads), first_token = first_row / heads;
  int cells = position0 + last_token + 1, steps = (cells + kCells - 1) / kCells;

  auto bring = [&](int step) {  // cells past the last one are zero
    uint4* to = tiles + step % kStages * 2 * kHalves * kTile;
    for (int i = threadIdx.x; i < 2 * kTile; i += kThreads) {
      int which = i / kTile, r = i % kTile / kChunks, c = i % kChunks, cell = step * kCells + r;
      bool valid = cell < cells;
      const typename Kv::Cache& from = which ? values : keys;
      size_t head = (size_t)(valid ? cell : 0) * h.kv_heads + g;
      uint4* at = to + which * kHalves * kTile + swizzled<kChunks>(r, c);
      if constexpr (kHalves == 1) {
        copy16(at, from.cells + head * D + c * 8, valid);
      } else {
        float v[8] = {};
        if (valid) Kv::unpack(Kv::template fetch<D>(from, head, c), v);
        u32 high[4], low[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          high[j] = pack_halves(v[2 * j], v[2 * j + 1]);
          low[j] = pack_halves(v[2 * j] - half_to_float(high[j]), v[2 * j + 1] - half_to_float(high[j] >> 16));
        }
        at[0] = make_uint4(high[0], high[1], high[2], high[3]);
        at[kTile] = make_uint4(low[0], low[1], low[2], low[3]);
      }
    }
    copies_end();
  };
  bring(0);

  float factor = scale * 1.44269504f;
  for (int i = 0; i < 16; i += kTogether) {
    Pairs<D, kNeox> x[kTogether];  // in flight at the same time
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      int r = min(first_row + warp * 16 + i + j, tokens * heads - 1);
      x[j].load(h.q + ((size_t)(r / heads) * h.heads + g * heads + r % heads) * D, h.dims);
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      int r = warp * 16 + i + j, t = min(first_row + r, tokens * heads - 1) / heads;
      auto split = [&](int c, float v) {
        v *= factor;
        u32 high = float_to_half(v);
        u16* to = (u16*)(queries + swizzled<kChunks>(r, c / 8)) + c % 8;
        to[0] = (u16)high;
        to[kBlockRows * D] = (u16)float_to_half(v - half_to_float(high));
      };
      prepare_head<D, kNeox>(h, x[j], h.q_norm ? &constants.q_norm : nullptr, constants.frequency, position0 + t,
                             [&](int i, float a, float b) {
                               split(Pairs<D, kNeox>::column_a(i, h.dims), a);
                               split(Pairs<D, kNeox>::column_b(i, h.dims), b);
                             });
    }
  }
  __syncwarp();  // a warp reads only the rows it has made

  int row[2], own[2];  // cells of rows lane / 4 and lane / 4 + 8
#pragma unroll
  for (int i = 0; i < 2; i++) {
    row[i] = first_row + warp * 16 + lane / 4 + i * 8;
    own[i] = position0 + min(row[i] / heads, tokens - 1) + 1;
  }
  float o[D / 8][4] = {}, top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};
  for (int step = 0; step < steps; step++) {
    if (kStages == 2 && step + 1 < steps) {
      bring(step + 1);
      copies_complete<1>();
    } else {
      copies_complete<0>();
    }
    __syncthreads();
    const uint4 *key = tiles + step % kStages * 2 * kHalves * kTile, *value = key + kHalves * kTile;
    float s[kCells / 8][4] = {};
#pragma unroll 2
    for (int k = 0; k < D / 16; k++) {
      u32 a[2][4];
#pragma unroll
      for (int l = 0; l < 2; l++)
        load_matrices(a[l], queries + l * kBlockRows * kChunks +
                                swizzled<kChunks>(warp * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kCells / 8; j += 2)
#pragma unroll
        for (int half = 0; half < kHalves; half++) {
          u32 b[4];
          load_matrices(b, key + half * kTile +
                               swizzled<kChunks>(j * 8 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
#pragma unroll
          for (int l = 0; l < 2; l++) {
            matrix_unit(s[j], a[l], b[0], b[1]);
            matrix_unit(s[j + 1], a[l], b[2], b[3]);
          }
        }
    }
    int begin = step * kCells;
    if (begin + kCells > position0 + first_token + 1) {
#pragma unroll
      for (int j = 0; j < kCells / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (begin + j * 8 + lane % 4 * 2 + e % 2 >= own[e / 2]) s[j][e] = minus_infinity();
    }
    float fade[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = top[i];
#pragma unroll
      for (int j = 0; j < kCells / 8; j++) most = fmaxf(most, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));  // finite: the first cell is every row's
      fade[i] = exp2f(top[i] - most);
      top[i] = most;
      sum[i] *= fade[i];
#pragma unroll
      for (int j = 0; j < kCells / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float p = exp2f(s[j][2 * i + e] - most);
          s[j][2 * i + e] = p;
          sum[i] += p;  // the lane's own columns; the four lanes meet at the end
        }
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[n][e] *= fade[e / 2];
#pragma unroll
    for (int k = 0; k < kCells / 16; k++) {
      u32 a[2][4];
#pragma unroll
      for (int j = 0; j < 4; j++) {  // rows g and g + 8 of columns 16k.., then of 16k + 8..
        float p0 = s[2 * k + j / 2][j % 2 * 2], p1 = s[2 * k + j / 2][j % 2 * 2 + 1];
        a[0][j] = pack_halves(p0, p1);
        a[1][j] = pack_halves(p0 - half_to_float(a[0][j]), p1 - half_to_float(a[0][j] >> 16));
      }
#pragma unroll
      for (int n = 0; n < D / 8; n += 2)
#pragma unroll
        for (int half = 0; half < kHalves; half++) {
          u32 b[4];
          load_transposed(b, value + half * kTile +
                                 swizzled<kChunks>(k * 16 + lane % 16, n + lane / 16));
#pragma unroll
          for (int l = 0; l < 2; l++) {
            matrix_unit(o[n], a[l], b[0], b[1]);
            matrix_unit(o[n + 1], a[l], b[2], b[3]);
          }
        }
    }
    __syncthreads();
    if (kStages == 1 && step + 1 < steps) bring(step + 1);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float all = sum[i] + __shfl_xor_sync(kAllLanes, sum[i], 1);
    all += __shfl_xor_sync(kAllLanes, all, 2);
    if (row[i] >= tokens * heads) continue;
    float inverse = 1.0f / all, *to = out + ((size_t)(row[i] / heads) * h.heads + g * heads + row[i] % heads) * D;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *(float2*)(to + n * 8 + lane % 4 * 2) = make_float2(o[n][2 * i] * inverse, o[n][2 * i + 1] * inverse);
  }
}
