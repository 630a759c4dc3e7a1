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

// Rows of 128 bytes start at multiples of that, so that a chunk's address is changed by `exclusive or` alone.
template <class B, int BM>
struct alignas(128) Stage {
  static constexpr int kGroups = B::kCoded ? kStep / B::kSubLen : 1;
  uint4 x[2][BM * 8];  // high, low: rows of 8 chunks
  uint4 w[kRows * 8];
  float scale[kGroups][kRows], min[kHasMin<B> ? kGroups : 1][kRows];
  float sums[kHasMin<B> ? BM : 1][4];
};

// Where chunk `c` of row `r` of the weights lies: as swizzled(), and so that four rows' chunks c and c + 2 are apart, too.
__device__ __forceinline__ int weight_chunk(int r, int c) { return r * 8 + (c ^ ((r & 1) | (r & 2) << 1 | (r & 4) >> 1)); }

// The rows of a block of the grid; those past the end repeat the last one and are not written. Of gated ones, 16 of the gate
// and 16 of up alternate.
template <bool kGated>
struct Rows16 {
  const u8 *weight, *up;
  int first, last;

  __device__ __forceinline__ const u8* matrix(int n) const { return kGated && n % 32 >= 16 ? up : weight; }
  __device__ __forceinline__ u64 row(int n) const { return min(first + (kGated ? n / 32 * 16 + n % 16 : n), last); }
};

__device__ __forceinline__ uint4 exact_codes(u32 even0, u32 odd0, u32 even1, u32 odd1, float add) {
  u32 offset = pack_halves(add, add);
  return make_uint4(add_halves(even0, offset), add_halves(odd0, offset), add_halves(even1, offset), add_halves(odd1, offset));
}

// What a thread brings of a step's weights: 32 columns of one row, where a type has no better way.
template <class B>
struct Share {
  static constexpr int kSubs = 32 / B::kSubLen;
  typename B::Raw raw;
  const u8* w;
  u64 blocks, first;
  int units;

  static __device__ __forceinline__ int n() { return threadIdx.x % kRows; }
  static __device__ __forceinline__ int half() { return threadIdx.x / kRows; }
  static __device__ __forceinline__ int unit(int step) { return B::kUnit == kStep ? step : 2 * step + half(); }
  template <class R>
  __device__ __forceinline__ void start(const R& rows, u64 all_blocks, int row_units) {
    w = rows.matrix(n()), blocks = all_blocks, units = row_units, first = rows.row(n()) * units;
  }
  __device__ __forceinline__ void load(int step) {
    if (unit(step) < units) raw = B::load(w, blocks, first + unit(step));
  }
  template <class S>
  __device__ __forceinline__ void put(S& to, int step, bool) const {
    if (half()) put_half<1>(to, step);
    else put_half<0>(to, step);
  }
  template <int kHalf, class S>
  __device__ __forceinline__ void put_half(S& to, int step) const {
    int at = unit(step);
    bool valid = at < units;
#pragma unroll
    for (int j = 0; j < kSubs; j++) {
      constexpr int kFirst = B::kUnit == kStep ? kHalf * kSubs : 0;
      float scale = 0, min = 0;
      if (valid) B::scales(raw, at, kFirst + j, scale, min);
      to.scale[kHalf * kSubs + j][n()] = scale;
      if constexpr (kHasMin<B>) to.min[kHalf * kSubs + j][n()] = min;
#pragma unroll
      for (int i = 0; i < B::kSubLen / 4; i += 2) {
        u32 even[2], odd[2];
#pragma unroll
        for (int l = 0; l < 2; l++) B::codes(raw, at, kFirst + j, i + l, even[l], odd[l]);
        uint4 v = make_uint4(even[0], odd[0], even[1], odd[1]);
        if constexpr (B::kAdd != 0) v = exact_codes(even[0], odd[0], even[1], odd[1], B::kAdd);
        to.w[weight_chunk(n(), kHalf * 4 + j * B::kSubLen / 8 + i / 2)] = valid ? v : make_uint4(0, 0, 0, 0);
      }
    }
  }
};

// Float types: neighbouring threads have neighbouring units.
template <class B>
struct FloatShare {
  static constexpr int kAcross = kStep / B::kUnit, kEach = kRows * kAcross / kProductThreads;
  typename B::Raw raw[kEach];
  const u8* w[kEach];
  int units;

  static __device__ __forceinline__ int n(int e) { return threadIdx.x / kAcross + e * (kProductThreads / kAcross); }
  static __device__ __forceinline__ int unit(int step) { return step * kAcross + threadIdx.x % kAcross; }
  template <class R>
  __device__ __forceinline__ void start(const R& rows, u64, int row_units) {
    units = row_units;
#pragma unroll
    for (int e = 0; e < kEach; e++) w[e] = rows.matrix(n(e)) + rows.row(n(e)) * units * 16;  // bytes of a unit
  }
  __device__ __forceinline__ void load(int step) {
#pragma unroll
    for (int e = 0; e < kEach; e++)
      if (unit(step) < units) raw[e] = B::load(w[e], 0, unit(step));
  }
  template <class S>
  __device__ __forceinline__ void put(S& to, int step, bool low) const {
#pragma unroll
    for (int e = 0; e < kEach; e++)
#pragma unroll
      for (int i = 0; i < B::kUnit / 4; i++) {
        float4 f = unit(step) < units ? B::quad(raw[e], 0, 0, i) : make_float4(0, 0, 0, 0);
        u32 even = pack_halves(f.x, f.z), odd = pack_halves(f.y, f.w);
        if (low) {
          even = pack_halves(f.x - half_to_float(even), f.z - half_to_float(even >> 16));
          odd = pack_halves(f.y - half_to_float(odd), f.w - half_to_float(odd >> 16));
        }
        int column = threadIdx.x % kAcross * B::kUnit + 4 * i;
        *((uint2*)&to.w[weight_chunk(n(e), column / 8)] + column / 4 % 2) = make_uint2(even, odd);
      }
  }
};
template <>
struct Share<F32> : FloatShare<F32> {};
template <>
struct Share<F16> : FloatShare<F16> {};
template <>
struct Share<BF16> : FloatShare<BF16> {};

// Two neighbours share a row of 64 columns: 16 bytes of codes each, low nibbles of which are in its first half.
struct Neighbours {
  static __device__ __forceinline__ int n() { return threadIdx.x / 2; }
  static __device__ __forceinline__ int half() { return threadIdx.x % 2; }
  int at;  // weight_chunk() of its first chunk, which the others differ from in two bits

  __device__ __forceinline__ void start() { at = weight_chunk(n(), half() * 2); }
  __device__ __forceinline__ int chunk(int high, int i) const { return at ^ (high * 4 + i / 2); }
};

template <>
struct Share<Q4_K> : Neighbours {
  uint4 head, q;
  const u8* w;

  template <class R>
  __device__ __forceinline__ void start(const R& rows, u64, int units) {
    Neighbours::start();
    w = rows.matrix(n()) + rows.row(n()) * units * 36;
  }
  __device__ __forceinline__ void load(int step) {
    const u8* block = w + step / 4 * 144;
    if (step % 4 == 0) head = load16(block);
    q = load16(block + 16 + step % 4 * 32 + half() * 16);
  }
  template <class S>
  __device__ __forceinline__ void put(S& to, int step, bool) const {
    Q4_K::scales_of(head, step, half(), to.scale[half()][n()], to.min[half()][n()]);
#pragma unroll
    for (int high = 0; high < 2; high++)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        u32 even[2], odd[2];
#pragma unroll
        for (int l = 0; l < 2; l++) nibbles(word(q, i + l), high, even[l], odd[l]);
        to.w[chunk(high, i)] = exact_codes(even[0], odd[0], even[1], odd[1], Q4_K::kAdd);
      }
  }
};

template <>
struct Share<Q6_K> : Neighbours {
  uint4 q, h;
  uint2 sc;
  u16 d;
  const u8 *low, *high, *scales, *factor;

  template <class R>
  __device__ __forceinline__ void start(const R& rows, u64 blocks, int units) {
    Neighbours::start();
    const u8* w = rows.matrix(n());
    u64 unit = rows.row(n()) * units;
    low = w + unit * 32 + half() * 32, high = w + blocks * 128 + unit * 16;
    scales = w + blocks * 192 + unit * 4, factor = w + blocks * 208 + unit / 2;
  }
  __device__ __forceinline__ void load(int step) {
    q = load16(low + step / 2 * 64 + step % 2 * 16);
    h = load16(high + step * 16);
    if (step % 2 == 0) sc = load8(scales + step * 4);
    if (step % 4 == 0) d = load2(factor + step / 2);
  }
  template <class S>
  __device__ __forceinline__ void put(S& to, int step, bool) const {
#pragma unroll
    for (int high = 0; high < 2; high++) {
      int sub = high * 2 + half();
      u32 code = (high ? sc.y : sc.x) >> step % 2 * 8 + half() * 16;
      to.scale[sub][n()] = half_to_float(d) * (float)(int)(i8)code;
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        u32 even[2], odd[2];
#pragma unroll
        for (int l = 0; l < 2; l++) {
          u32 bits = word(h, i + l);
          nibbles(word(q, i + l), high, even[l], odd[l]);
          even[l] = field(bits << 8 - 2 * sub, 0x03000300u, even[l]);
          odd[l] = field(bits >> 2 * sub, 0x03000300u, odd[l]);
        }
        to.w[chunk(high, i)] = exact_codes(even[0], odd[0], even[1], odd[1], Q6_K::kAdd);
      }
    }
  }
};

// Whether two blocks of 64 rows fit a processor's registers.
template <class B>
constexpr bool kSlim = B::kLean;
template <>
constexpr bool kSlim<Q6_K> = true;

// Grid: (blocks of kRows results, of kRows / 2 gated ones; tiles of BM rows). A warp has BM / 2 rows by 32 results; of a
// gated product 16 of the gate and the same 16 of up.
template <class B, bool kGated, int BM>
__global__ void __launch_bounds__(kProductThreads, BM > 64 || !kSlim<B> ? 1 : 2) prompt_product(const Product p) {
  using S = Stage<B, BM>;
  constexpr int kM = BM / 32, kN = 4, kGroups = B::kCoded ? kStep / B::kSubLen : 4, kParts = kStep / 16 / kGroups;
  extern __shared__ __align__(128) uint4 shared[];
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
  Rows16<kGated> rows;
  rows.first = (blockIdx.x - part.first_block) * (kGated ? kRows / 2 : kRows), rows.last = part.rows - 1;
  rows.weight = part.weight + p.stride * (u64)slot, rows.up = kGated ? p.at[1].weight + p.stride * (u64)slot : nullptr;
  Share<B> share;
  share.start(rows, (u64)part.rows * p.k / B::kBlock, p.k / B::kUnit);
  for (int i = threadIdx.x; i < BM; i += kProductThreads) {
    int r = first + min(i, count - 1);
    sources[i] = p.in ? p.in[r] / p.divide : r;
  }
  __syncthreads();

  // A thread copies one chunk of high or low halves of every 16th row.
  constexpr int kCopies = BM * 16 / kProductThreads;
  int width = (p.k + kStep - 1) / kStep, steps = kIsF32<B> ? 2 * width : width, sums = width * 4;
  int chunk = threadIdx.x & 7, low = threadIdx.x >> 3 & 1, top_row = threadIdx.x / 16;
  u32 offsets[kCopies];  // of rows, in bytes
#pragma unroll
  for (int c = 0; c < kCopies; c++) offsets[c] = ((u32)sources[top_row + 16 * c] * 2 + low) * (u32)(p.k * 2);
  const u8* x = (const u8*)p.x;
  int to_chunk = low * BM * 8 + swizzled<8>(top_row, chunk);
  auto bring = [&](int i, int step) {  // the activations of a step
    S& to = stages[i & 1];
    int column = step_column<B>(step, chunk / 2) + chunk % 2 * 8;
    bool valid = column < p.k;
    const u8* from = x + (valid ? column : 0) * 2;
#pragma unroll
    for (int c = 0; c < kCopies; c++) copy16(to.x[0] + to_chunk + 128 * c, from + offsets[c], valid);
    if constexpr (kHasMin<B>) {
      if constexpr (B::kUnit == kStep && B::kSubLen == 16) {  // columns may be far apart
        for (int j = threadIdx.x; j < BM * 4; j += kProductThreads)
          copy4(&to.sums[j / 4][j % 4], p.sums + (size_t)sources[j / 4] * sums + step_column<B>(step, j % 4) / 16, true);
      } else if (threadIdx.x < BM) {
        copy16(to.sums[threadIdx.x], p.sums + (size_t)sources[threadIdx.x] * sums + step * 4, true);
      }
    }
    copies_end();
  };

  // Shared addresses of fragments in the first stage, of columns 0 to 15; those of columns 16 q differ in bits 5 and 6.
  u32 x_at = shared_address(stages->x[0] + swizzled<8>(warp_m * (BM / 2) + lane % 16, lane / 16));
  u32 w_at = shared_address(stages->w + weight_chunk(warp_n * 32 + lane % 8 + lane / 16 * 8, lane / 8 % 2));
  float acc[kM][kN][4] = {};
  share.load(0);
  bring(0, 0);
  share.put(stages[0], 0, false);
  for (int i = 0; i < steps; i++) {
    copies_complete<0>();
    __syncthreads();
    bool more = i + 1 < steps, second = i + 1 >= width;  // the low halves of F32 weights
    int next = second ? i + 1 - width : i + 1;
    if (more) {
      share.load(next);
      bring(i + 1, next);
    }
    const S& s = stages[i & 1];
    u32 stage = (i & 1) * (u32)sizeof(S);
#pragma unroll 1  // unrolled, it spills
    for (int g = 0; g < kGroups; g++) {
      u32 b[kN][kParts][2];
      float scale[kN][2], min[kN][2];
#pragma unroll
      for (int j = 0; j < kN; j += 2)
#pragma unroll
        for (int q = 0; q < kParts; q++) {
          u32 r[4];
          load_matrices(r, ((w_at + stage) ^ (g * kParts + q) << 5) + j * 8 * 128);
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
            load_matrices(a[q][l], ((x_at + stage) ^ (g * kParts + q) << 5) + l * BM * 128 + m * 16 * 128);
        float c[kN][4];
#pragma unroll
        for (int q = 0; q < kParts; q++)
#pragma unroll
          for (int l = 0; l < 2; l++)
#pragma unroll
            for (int j = 0; j < kN; j++) {
              if constexpr (B::kCoded) {
                if (q == 0 && l == 0) matrix_product(c[j], a[q][l], b[j][q][0], b[j][q][1]);
                else matrix_unit(c[j], a[q][l], b[j][q][0], b[j][q][1]);
              } else matrix_unit(acc[m][j], a[q][l], b[j][q][0], b[j][q][1]);
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
    if (more) share.put(stages[(i + 1) & 1], next, kIsF32<B> && second);
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
          int c = rows.first + warp_n * (kGated ? 16 : 32) + j * 8 + lane % 4 * 2 + e;
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
