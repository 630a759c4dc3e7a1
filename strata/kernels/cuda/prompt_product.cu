// Products of quantised matrices with the rows of a prompt, on the matrix units.
//
// A block makes kRows results of BM rows of activations. It walks the columns 64 at a time: codes, exact in halves, go to
// shared memory beside the activations' high and low halves, a product of one sub-block's columns comes out of the matrix
// units in float32, and its scale and minimum are applied there: nothing is rounded to a half that is not one, but the
// activations to 2^-22. F32 weights go in two halves too, one after the other. A result's sum knows nothing of the
// tile that it lies in, so neither tiles nor the other rows change a bit of it.

constexpr int kRows = 128, kStep = 64, kProductThreads = 256;

struct Part {
  const u8* weight;
  float* out;         // [.., rows]
  const float* bias;  // [rows], or null
  int rows;
  int first_block;  // of gridDim.x, in all of which the parts lie one after another
};
// Matrices of one type and k columns. With tiles, `weight` is that of slot 0 and tile blockIdx.y says which rows to take,
// else they are those from blockIdx.y * BM on. Row i of the product multiplies activations `in[i] / divide` (in null: i) and
// goes to `to[i]` (null: i), times `scale`, or is added to what is there; gated results are times sigmoid(share[i]) unless
// `share` is null.
struct Product {
  Part at[3];  // gated: gate and up, and the results of both in the first one's `out`
  const int4* tiles;
  const int* tile_count;
  u64 stride;  // from one slot to the next
  const u16* x;  // split rows, see prompt.cu
  const float *sums, *scales;
  const int *in, *to;
  const float* share;
  int count, divide, rows, k, add;
  float scale;
};

// Whether a type has minima. True does no harm.
template <class B>
constexpr bool kHasMin = B::kCoded;
template <>
constexpr bool kHasMin<Q8_0> = false;
template <>
constexpr bool kHasMin<Q4_0> = false;
template <>
constexpr bool kHasMin<MXFP4> = false;
template <>
constexpr bool kHasMin<Q6_K> = false;
template <>
constexpr bool kHasMin<IQ4_XS> = false;
#ifdef IQ3_S_GRID
template <>
constexpr bool kHasMin<IQ3_S> = false;
#endif

template <class B>
constexpr bool kIsF32 = B::kUnit == 4;

// The column of the row where the 16 columns `q` of step `step` start: a unit of a type may be of columns far apart.
template <class B>
__device__ __forceinline__ int step_column(int step, int q) {
  if constexpr (B::kUnit == kStep) return B::column(step, q * 16 / B::kSubLen) + q * 16 % B::kSubLen;
  return step * kStep + q * 16;
}

template <class B, int BM>
struct Stage {
  static constexpr int kGroups = B::kCoded ? kStep / B::kSubLen : 1;
  uint4 x[2][BM * 8];  // high, low: rows of 8 chunks
  uint4 w[kRows * 8];
  float scale[kGroups][kRows], min[kHasMin<B> ? kGroups : 1][kRows];
  float sums[kHasMin<B> ? BM : 1][4];
};

// What a thread brings of a step's weights: 32 columns of one row.
template <class B>
struct Share {
  static constexpr int kUnits = B::kUnit >= 32 ? 1 : 32 / B::kUnit;
  static constexpr int kSubs = 32 / B::kSubLen;  // of a coded type
  typename B::Raw raw[kUnits];

  static __device__ __forceinline__ int unit(int step, int half) {
    return B::kUnit == kStep ? step : (2 * step + half) * kUnits;
  }
  __device__ __forceinline__ void load(const u8* w, u64 blocks, u64 row, int units, int step, int half) {
#pragma unroll
    for (int u = 0; u < kUnits; u++)
      if (unit(step, half) + u < units) raw[u] = B::load(w, blocks, row * units + unit(step, half) + u);
  }

  template <int kHalf, class S>
  __device__ __forceinline__ void put(S& to, int n, int units, int step, bool low) const {
    if constexpr (B::kCoded) {
      int at = unit(step, kHalf);
      bool valid = at < units;
#pragma unroll
      for (int j = 0; j < kSubs; j++) {
        constexpr int kFirst = B::kUnit == kStep ? kHalf * kSubs : 0;
        float scale = 0, min = 0;
        if (valid) B::scales(raw[0], at, kFirst + j, scale, min);
        to.scale[kHalf * kSubs + j][n] = scale;
        if constexpr (kHasMin<B>) to.min[kHalf * kSubs + j][n] = min;
#pragma unroll
        for (int i = 0; i < B::kSubLen / 4; i += 2) {
          u32 v[4];
#pragma unroll
          for (int l = 0; l < 2; l++) {
            u32 even, odd;
            B::codes(raw[0], at, kFirst + j, i + l, even, odd);
            if constexpr (B::kAdd != 0) {
              even = add_halves(even, pack_halves(B::kAdd, B::kAdd));
              odd = add_halves(odd, pack_halves(B::kAdd, B::kAdd));
            }
            v[2 * l] = __byte_perm(even, odd, 0x5410);
            v[2 * l + 1] = __byte_perm(even, odd, 0x7632);
          }
          int chunk = kHalf * 4 + j * B::kSubLen / 8 + i / 2;
          to.w[swizzled<8>(n, chunk)] = valid ? make_uint4(v[0], v[1], v[2], v[3]) : make_uint4(0, 0, 0, 0);
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        u32 v[4];
#pragma unroll
        for (int q = 0; q < 2; q++) {
          constexpr int kEach = B::kUnit / 4;  // fours of a unit
          int i = c * 2 + q;
          bool valid = unit(step, kHalf) + i / kEach < units;
          float4 f = valid ? B::quad(raw[i / kEach], 0, 0, i % kEach) : make_float4(0, 0, 0, 0);
          v[2 * q] = pack_halves(f.x, f.y);
          v[2 * q + 1] = pack_halves(f.z, f.w);
          if (kIsF32<B> && low) {
            f.x -= half_to_float(v[2 * q]), f.y -= half_to_float(v[2 * q] >> 16);
            f.z -= half_to_float(v[2 * q + 1]), f.w -= half_to_float(v[2 * q + 1] >> 16);
            v[2 * q] = pack_halves(f.x, f.y);
            v[2 * q + 1] = pack_halves(f.z, f.w);
          }
        }
        to.w[swizzled<8>(n, kHalf * 4 + c)] = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
};

// Grid: (blocks of kRows results, of kRows / 2 gated ones; tiles of BM rows). A warp has BM / 2 rows by 32 results; of a
// gated product 16 of the gate and the same 16 of up.
template <class B, bool kGated, int BM>
__global__ void __launch_bounds__(kProductThreads, BM >= 128 || !B::kLean ? 1 : 2) prompt_product(const Product p) {
  using S = Stage<B, BM>;
  constexpr int kM = BM / 32, kN = 4, kGroups = B::kCoded ? kStep / B::kSubLen : 4, kParts = kStep / 16 / kGroups;
  extern __shared__ uint4 shared[];
  __shared__ int sources[BM];
  S* stages = (S*)shared;
  wait_for_previous();
  let_next_start();
  int first = blockIdx.y * BM, count = min(BM, p.rows - first), slot = 0;
  if (p.tiles) {
    if (blockIdx.y >= *p.tile_count) return;
    int4 tile = p.tiles[blockIdx.y];
    slot = tile.x, first = tile.y, count = tile.z;
  }
  int index = 0;
  while (!kGated && index + 1 < p.count && blockIdx.x >= p.at[index + 1].first_block) index++;
  Part part = p.at[index];
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warp_m = warp / 4, warp_n = warp % 4;
  int units = p.k / B::kUnit, n = threadIdx.x % kRows, half = threadIdx.x / kRows;
  int out_first = (blockIdx.x - part.first_block) * (kGated ? kRows / 2 : kRows);
  const u8* w = part.weight;
  u64 row = min(out_first + n, part.rows - 1);  // rows past the end repeat the last one and are not written
  if (kGated) {
    if (n % 32 >= 16) w = p.at[1].weight;
    row = min(out_first + n / 32 * 16 + n % 16, part.rows - 1);
  }
  w += p.stride * (u64)slot;
  u64 blocks = (u64)part.rows * p.k / B::kBlock;
  for (int i = threadIdx.x; i < BM; i += kProductThreads) {
    int r = first + min(i, count - 1);
    sources[i] = p.in ? p.in[r] / p.divide : r;
  }
  __syncthreads();

  int width = (p.k + kStep - 1) / kStep, steps = kIsF32<B> ? 2 * width : width, sums = width * 4;
  auto bring = [&](int i) {  // the activations of step i
    S& to = stages[i & 1];
    int step = i >= width ? i - width : i;
    int chunk = threadIdx.x & 7, low = threadIdx.x >> 3 & 1, column = step_column<B>(step, chunk / 2) + chunk % 2 * 8;
#pragma unroll
    for (int r = threadIdx.x / 16; r < BM; r += kProductThreads / 16)
      copy16(&to.x[low][swizzled<8>(r, chunk)], p.x + ((size_t)sources[r] * 2 + low) * p.k + (column < p.k ? column : 0),
             column < p.k);
    if constexpr (kHasMin<B>) {
      for (int j = threadIdx.x; j < BM * 4; j += kProductThreads) {
        int at = step_column<B>(step, j % 4) / 16;
        copy4(&to.sums[j / 4][j % 4], p.sums + (size_t)sources[j / 4] * sums + at, at * 16 < p.k);
      }
    }
    copies_end();
  };
  Share<B> share;
  auto fetch = [&](int i) { share.load(w, blocks, row, units, i >= width ? i - width : i, half); };
  auto put = [&](int i) {
    int step = i >= width ? i - width : i;
    if (half) share.template put<1>(stages[i & 1], n, units, step, i >= width);
    else share.template put<0>(stages[i & 1], n, units, step, i >= width);
  };

  float acc[kM][kN][4] = {};
  fetch(0);
  bring(0);
  put(0);
  for (int i = 0; i < steps; i++) {
    copies_complete<0>();
    __syncthreads();
    if (i + 1 < steps) {
      fetch(i + 1);
      bring(i + 1);
    }
    const S& s = stages[i & 1];
#pragma unroll 1
    for (int g = 0; g < kGroups; g++) {
      u32 b[kN][kParts][2];
      float scale[kN][2], min[kN][2];
#pragma unroll
      for (int j = 0; j < kN; j += 2)
#pragma unroll
        for (int q = 0; q < kParts; q++) {
          u32 r[4];
          int chunk = (g * kParts + q) * 2;
          load_matrices(r, &s.w[swizzled<8>(warp_n * 32 + j * 8 + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2)]);
          b[j][q][0] = r[0], b[j][q][1] = r[1], b[j + 1][q][0] = r[2], b[j + 1][q][1] = r[3];
        }
      if constexpr (B::kCoded) {
#pragma unroll
        for (int j = 0; j < kN; j++) {
          int at = warp_n * 32 + j * 8 + lane % 4 * 2;
          float2 v = *(const float2*)&s.scale[g][at];
          scale[j][0] = v.x, scale[j][1] = v.y;
          if constexpr (kHasMin<B>) {
            v = *(const float2*)&s.min[g][at];
            min[j][0] = v.x, min[j][1] = v.y;
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kM; m++) {
        u32 a[kParts][2][4];
        int top = warp_m * (BM / 2) + m * 16;
#pragma unroll
        for (int q = 0; q < kParts; q++)
#pragma unroll
          for (int l = 0; l < 2; l++)
            load_matrices(a[q][l], &s.x[l][swizzled<8>(top + lane % 16, (g * kParts + q) * 2 + lane / 16)]);
        float c[kN][4] = {};
#pragma unroll
        for (int q = 0; q < kParts; q++)
#pragma unroll
          for (int l = 0; l < 2; l++)
#pragma unroll
            for (int j = 0; j < kN; j++) {
              if constexpr (B::kCoded) matrix_unit(c[j], a[q][l], b[j][q][0], b[j][q][1]);
              else matrix_unit(acc[m][j], a[q][l], b[j][q][0], b[j][q][1]);
            }
        if constexpr (B::kCoded) {
          float total[2] = {};
          if constexpr (kHasMin<B>) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const float* of = s.sums[top + lane / 4 + h * 8];
              total[h] = kParts == 2 ? of[g * kParts] + of[g * kParts + kParts - 1] : of[g];
            }
          }
#pragma unroll
          for (int j = 0; j < kN; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              acc[m][j][e] = fmaf(scale[j][e % 2], c[j][e], acc[m][j][e]);
              if constexpr (kHasMin<B>) acc[m][j][e] = fmaf(-min[j][e % 2], total[e / 2], acc[m][j][e]);
            }
        }
      }
    }
    if (i + 1 < steps) put(i + 1);
  }

#pragma unroll
  for (int m = 0; m < kM; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int r = warp_m * (BM / 2) + m * 16 + lane / 4 + h * 8;
      if (r >= count) continue;
      int at = first + r;
      float factor = p.scales[sources[r]], share = kGated && p.share ? 1.0f / (1.0f + expf(-p.share[at])) : 1.0f;
      float* out = part.out + (size_t)(p.to ? p.to[at] : at) * part.rows;
#pragma unroll
      for (int j = 0; j < (kGated ? kN / 2 : kN); j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          int c = out_first + warp_n * (kGated ? 16 : 32) + j * 8 + lane % 4 * 2 + e;
          if (c >= part.rows) continue;
          float v = acc[m][j][2 * h + e] * factor;
          if constexpr (kGated) {
            float up = acc[m][j + kN / 2][2 * h + e] * factor;
            out[c] = v / (1.0f + expf(-v)) * up * share;
          } else {
            float before = p.add ? out[c] : part.bias ? part.bias[c] : 0.0f;
            out[c] = fmaf(v, p.scale, before);
          }
        }
    }
}
