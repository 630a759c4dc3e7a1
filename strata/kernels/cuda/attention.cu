// Attention over the KV cache: per-head norm, rotary embedding and append, then split-KV attention with grouped heads.

struct KvF32 {
  using Cell = float;
  struct Raw {
    float4 a, b;
  };
  static __device__ __forceinline__ Cell pack(float v) { return v; }
  static __device__ __forceinline__ Raw fetch(const Cell* p) { return {*(const float4*)p, *(const float4*)(p + 4)}; }
  static __device__ __forceinline__ void unpack(const Raw& r, float (&v)[8]) {
    v[0] = r.a.x, v[1] = r.a.y, v[2] = r.a.z, v[3] = r.a.w, v[4] = r.b.x, v[5] = r.b.y, v[6] = r.b.z, v[7] = r.b.w;
  }
};
struct KvF16 {
  using Cell = u16;
  using Raw = uint4;
  static __device__ __forceinline__ Cell pack(float v) { return (u16)float_to_half(v); }
  static __device__ __forceinline__ Raw fetch(const Cell* p) { return *(const uint4*)p; }
  static __device__ __forceinline__ void unpack(const Raw& w, float (&v)[8]) {
    v[0] = half_to_float(w.x), v[1] = half_to_float(w.x >> 16), v[2] = half_to_float(w.y);
    v[3] = half_to_float(w.y >> 16), v[4] = half_to_float(w.z), v[5] = half_to_float(w.z >> 16);
    v[6] = half_to_float(w.w), v[7] = half_to_float(w.w >> 16);
  }
};

// Sine and cosine to about 1e-7 for |a| < 5e5, with no table and no slow path: reduced to [-pi/4, pi/4] in three steps.
__device__ __forceinline__ void sine_cosine(float a, float& sine, float& cosine) {
  float n = rintf(a * 0.636619772f);
  float r = fmaf(n, -1.57079601f, a);
  r = fmaf(n, -3.13916473e-7f, r);
  r = fmaf(n, -5.39030253e-15f, r);
  float q = r * r;
  float s = fmaf(fmaf(fmaf(-1.95152959e-4f, q, 8.33216087e-3f), q, -1.66666546e-1f), q * r, r);
  float c = fmaf(fmaf(fmaf(2.44331571e-5f, q, -1.38873163e-3f), q, 4.16666457e-2f), q * q, fmaf(-0.5f, q, 1.0f));
  int quadrant = (int)n & 3;
  sine = quadrant & 1 ? c : s;
  cosine = quadrant & 1 ? s : c;
  if (quadrant & 2) sine = -sine;
  if (quadrant == 1 || quadrant == 2) cosine = -cosine;
}

// How heads are prepared: norms over each head (may be null), then the rotation of the first `dims` columns.
struct Heads {
  const float *q, *k, *v;  // [T, H, D], [T, G, D], [T, G, D] as projected
  const float *q_norm, *k_norm, *frequencies;
  float eps;
  int dims, heads, kv_heads;
};

// One lane's share of a head: pairs of columns a and b, which rotate together.
template <int D, bool kNeox>
struct Pairs {
  static constexpr int kPairs = D / 2, kEach = (kPairs + kWarp - 1) / kWarp;
  float a[kEach], b[kEach];

  static __device__ __forceinline__ int pair(int i) { return i * kWarp + threadIdx.x % kWarp; }
  static __device__ __forceinline__ bool has(int i) { return kPairs % kWarp == 0 || pair(i) < kPairs; }
  static __device__ __forceinline__ int column_a(int i, int dims) {
    return kNeox && 2 * pair(i) < dims ? pair(i) : 2 * pair(i);
  }
  static __device__ __forceinline__ int column_b(int i, int dims) {
    return kNeox && 2 * pair(i) < dims ? pair(i) + dims / 2 : 2 * pair(i) + 1;
  }
  __device__ __forceinline__ void load(const float* from, int dims) {
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      a[i] = from && has(i) ? from[column_a(i, dims)] : 0;
      b[i] = from && has(i) ? from[column_b(i, dims)] : 0;
    }
  }
};

// Norms and frequencies as a lane needs them: the same in every step, so they are fetched before the wait.
template <int D, bool kNeox>
struct HeadConstants {
  Pairs<D, kNeox> q_norm, k_norm;
  float frequency[Pairs<D, kNeox>::kEach];

  __device__ __forceinline__ void load(const Heads& h) {
    q_norm.load(h.q_norm, h.dims);
    k_norm.load(h.k_norm, h.dims);
#pragma unroll
    for (int i = 0; i < Pairs<D, kNeox>::kEach; i++) {
      int p = Pairs<D, kNeox>::pair(i);
      frequency[i] = 2 * p < h.dims ? h.frequencies[p] : 0;
    }
  }
};

// One warp norms (unless `norm` is null) and rotates one head of the token at `cell`; `write` gets column and value.
template <int D, bool kNeox, class Write>
__device__ __forceinline__ void prepare_head(const Heads& h, Pairs<D, kNeox> x, const Pairs<D, kNeox>* norm,
                                             const float* frequency, int cell, Write write) {
  using P = Pairs<D, kNeox>;
  float inverse = 1;
  if (norm) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < P::kEach; i++) square += x.a[i] * x.a[i] + x.b[i] * x.b[i];
    inverse = 1.0f / sqrtf(lane_sum(square) / D + h.eps);
  }
#pragma unroll
  for (int i = 0; i < P::kEach; i++) {
    if (!P::has(i)) continue;
    float a = norm ? x.a[i] * (inverse * norm->a[i]) : x.a[i], b = norm ? x.b[i] * (inverse * norm->b[i]) : x.b[i];
    float s = 0, c = 1;
    if (frequency) sine_cosine((float)cell * frequency[i], s, c);  // 0 beyond the rotated columns
    write(P::column_a(i, h.dims), a * c - b * s);
    write(P::column_b(i, h.dims), b * c + a * s);
  }
}

// Prepares and appends the keys and values of T tokens from cell *position on. One warp a head. Grid: (warps, T).
template <int D, bool kNeox, class Kv>
__global__ void __launch_bounds__(128) append(const Heads h, const int* position, typename Kv::Cell* keys,
                                              typename Kv::Cell* values) {
  let_next_start();
  HeadConstants<D, kNeox> constants;
  constants.load(h);
  wait_for_previous();
  int head = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp, t = blockIdx.y;
  if (head >= 2 * h.kv_heads) return;
  bool is_key = head < h.kv_heads;
  int g = head % h.kv_heads, cell = *position + t;
  typename Kv::Cell* out = (is_key ? keys : values) + ((size_t)cell * h.kv_heads + g) * D;
  Pairs<D, kNeox> x;
  x.load((is_key ? h.k : h.v) + ((size_t)t * h.kv_heads + g) * D, h.dims);
  prepare_head<D, kNeox>(h, x, is_key && h.k_norm ? &constants.k_norm : nullptr, is_key ? constants.frequency : nullptr,
                         cell, [&](int c, float v) { out[c] = Kv::pack(v); });
}

constexpr int kAttendThreads = 256, kAttendWarps = kAttendThreads / kWarp, kTileCells = 256;
constexpr int kSplits = 32;  // of the cells, at most
constexpr int kFresh = 8;   // the most new tokens that attend() appends itself
constexpr int kAhead = 4;   // loads of keys or values that a lane has in flight

// Cells of one split: a function of the number of cells alone, so that results depend on position and shape only.
__device__ __forceinline__ int split_cells(int cells) { return ((cells + kSplits - 1) / kSplits + 63) / 64 * 64; }

// Sums s[0 .. R - 1] over kLanes lanes. Where R is a power of two, lane `part` gets the sum of head part * R / kLanes, with
// fewer exchanges than one butterfly a head takes; elsewhere all lanes get all sums.
template <int R, int kLanes>
struct HeadSum {
  static constexpr bool kSpread = (R & (R - 1)) == 0 && R <= kLanes;
  static __device__ __forceinline__ void run(float (&s)[R], int part) {
    if constexpr (!kSpread) {
#pragma unroll
      for (int r = 0; r < R; r++) s[r] = lane_sum<kLanes>(s[r]);
    } else {
      int o = kLanes / 2;
#pragma unroll
      for (int n = R / 2; n > 0; n /= 2, o /= 2) {
        bool upper = part & o;
#pragma unroll
        for (int i = 0; i < n; i++) {
          float send = upper ? s[i] : s[i + n], keep = upper ? s[i + n] : s[i];
          s[i] = keep + __shfl_xor_sync(kAllLanes, send, o);
        }
      }
#pragma unroll
      for (; o > 0; o /= 2) s[0] += __shfl_xor_sync(kAllLanes, s[0], o);
    }
  }
};

// Causal attention of T tokens from cell *position on: token t over cells 0 .. *position + t; out [T, H, D]. With kAppends
// (T <= kFresh) it also appends their keys and values; otherwise append() has done so.
//
// A block takes one split of the cells and R query heads of one KV head; the last block of a (token, heads) group joins
// the splits in order. A new cell is computed by each block that attends to it, and written by one. `partial` holds
// [T, H / R] times kSplits * R * (D + 2) floats, `counters` [T, H / R] zeros. Grid: (kSplits, H / R, T).
template <int D, int R, bool kNeox, bool kAppends, class Kv>
__global__ void __launch_bounds__(kAttendThreads) attend(const Heads h, const int* position, typename Kv::Cell* keys,
                                                         typename Kv::Cell* values, float scale, float* out,
                                                         float* partial, u32* counters) {
  using Cell = typename Kv::Cell;
  constexpr int kLanes = D / 8, kCells = kAttendThreads / kLanes;  // lanes of a cell, cells side by side
  constexpr int kStride = R + 4 - R % 4;
  __shared__ float4 scores4[kTileCells * kStride / 4];      // [cell][head]
  __shared__ float4 joined4[kAttendWarps / 2 * R * D / 4];  // halves of the block's sums; before that the queries
  __shared__ uint4 fresh[2][kAppends ? kFresh * D * sizeof(Cell) / 16 : 1];
  __shared__ float tops[R], sums[R], fade[R];
  float *scores = (float*)scores4, *joined = (float*)joined4;
  Cell *fresh_keys = (Cell*)fresh[0], *fresh_values = (Cell*)fresh[1];
  let_next_start();
  HeadConstants<D, kNeox> constants;
  constants.load(h);
  wait_for_previous();
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, t = blockIdx.z, first_head = blockIdx.y * R;
  Pairs<D, kNeox> mine;  // the head this warp prepares, fetched beside the position
  if (warp < R) mine.load(h.q + ((size_t)t * h.heads + first_head + warp) * D, h.dims);
  int first = *position, cells = first + t + 1, each = split_cells(cells), active = (cells + each - 1) / each;
  if (blockIdx.x >= active) return;
  int begin = blockIdx.x * each, end = min(cells, begin + each), heads_of_one = h.heads / h.kv_heads;
  int g = first_head / heads_of_one, part = threadIdx.x % kLanes, side = threadIdx.x / kLanes;
  int fresh_begin = kAppends ? min(end, max(begin, first)) : end, items = R + 2 * (end - fresh_begin);

  // Keys and values of the cache from cell `from` on, kAhead rounds of them; new cells come from shared memory.
  auto fetch = [&](typename Kv::Raw (&raw)[kAhead], const Cell* cache, int from, int stop) {
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      int cell = from + a * kCells + side;
      if (cell < min(stop, fresh_begin)) raw[a] = Kv::fetch(cache + ((size_t)cell * h.kv_heads + g) * D + part * 8);
    }
  };
  auto patch = [&](typename Kv::Raw (&raw)[kAhead], const Cell* fresh_cells, int from, int stop) {
    if (!kAppends || stop <= fresh_begin) return;
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      int cell = from + a * kCells + side;
      if (cell >= fresh_begin && cell < stop) raw[a] = Kv::fetch(fresh_cells + (cell - fresh_begin) * D + part * 8);
    }
  };
  typename Kv::Raw key_raw[kAhead] = {}, value_raw[kAhead] = {};
  fetch(key_raw, keys, begin, min(end, begin + kTileCells));
  fetch(value_raw, values, begin, min(end, begin + kTileCells));

  for (int item = warp; item < items; item += kAttendWarps) {
    if (item < R) {
      float* to = joined + item * D;
      prepare_head<D, kNeox>(h, mine, h.q_norm ? &constants.q_norm : nullptr, constants.frequency, first + t,
                             [&](int c, float v) { to[c] = v * scale; });
    } else if constexpr (kAppends) {
      bool is_key = item % 2 == R % 2;
      int cell = fresh_begin + (item - R) / 2;
      size_t at = ((size_t)cell * h.kv_heads + g) * D;
      Cell *to = (is_key ? fresh_keys : fresh_values) + (cell - fresh_begin) * D, *cache = (is_key ? keys : values) + at;
      bool writes = cell == first + t && first_head % heads_of_one == 0;
      Pairs<D, kNeox> x;
      x.load((is_key ? h.k : h.v) + ((size_t)(cell - first) * h.kv_heads + g) * D, h.dims);
      prepare_head<D, kNeox>(h, x, is_key && h.k_norm ? &constants.k_norm : nullptr,
                             is_key ? constants.frequency : nullptr, cell, [&](int c, float v) {
                               to[c] = Kv::pack(v);
                               if (writes) cache[c] = to[c];
                             });
    }
  }
  if (threadIdx.x < R) {
    tops[threadIdx.x] = minus_infinity();
    sums[threadIdx.x] = 0;
  }
  __syncthreads();
  float query[R][8];
#pragma unroll
  for (int r = 0; r < R; r++) KvF32::unpack(KvF32::fetch(joined + r * D + part * 8), query[r]);

  float acc[R][8] = {};
  for (int tile = begin; tile < end; tile += kTileCells) {
    int count = min(kTileCells, end - tile);
    for (int base = 0; base < count; base += kCells * kAhead) {
      if (tile > begin || base > 0) fetch(key_raw, keys, tile + base, tile + count);
      patch(key_raw, fresh_keys, tile + base, tile + count);
#pragma unroll
      for (int a = 0; a < kAhead; a++) {
        if (base + a * kCells >= count) break;  // the same in all lanes, as whole warps make the sums
        int c = base + a * kCells + side;
        float key[8], s[R] = {};
        Kv::unpack(key_raw[a], key);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
          for (int i = 0; i < 8; i++) s[r] = fmaf(query[r][i], key[i], s[r]);
        HeadSum<R, kLanes>::run(s, part);
        if constexpr (HeadSum<R, kLanes>::kSpread) {
          if (c < count && part % (kLanes / R) == 0) scores[c * kStride + part * R / kLanes] = s[0];
        } else {
#pragma unroll
          for (int r = 0; r < R; r++)
            if (c < count && part == 0) scores[c * kStride + r] = s[r];
        }
      }
    }
    if (tile > begin) fetch(value_raw, values, tile, tile + count);
    __syncthreads();
    for (int r = warp; r < R; r += kAttendWarps) {
      float top = tops[r], sum = 0;
      for (int c = lane; c < count; c += kWarp) top = fmaxf(top, scores[c * kStride + r]);
      top = warp_max(top);
      for (int c = lane; c < count; c += kWarp) {
        float p = expf(scores[c * kStride + r] - top);
        scores[c * kStride + r] = p;
        sum += p;
      }
      sum = lane_sum(sum);
      if (lane == 0) {
        fade[r] = expf(tops[r] - top);
        sums[r] = sums[r] * fade[r] + sum;
        tops[r] = top;
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
      for (int i = 0; i < 8; i++) acc[r][i] *= fade[r];
    for (int base = 0; base < count; base += kCells * kAhead) {
      if (base > 0) fetch(value_raw, values, tile + base, tile + count);
      patch(value_raw, fresh_values, tile + base, tile + count);
#pragma unroll
      for (int a = 0; a < kAhead; a++) {
        int c = base + a * kCells + side;
        if (c >= count) break;
        float value[8];
        Kv::unpack(value_raw[a], value);
#pragma unroll
        for (int r = 0; r < R; r++) {
          float p = scores[c * kStride + r];
#pragma unroll
          for (int i = 0; i < 8; i++) acc[r][i] = fmaf(p, value[i], acc[r][i]);
        }
      }
    }
    __syncthreads();
  }

  // Sum over the cells' sides: within a warp, then the upper half of the warps into the lower until one is left.
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int o = kLanes; o < kWarp; o *= 2) acc[r][i] += __shfl_xor_sync(kAllLanes, acc[r][i], o);
  for (int half = kAttendWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half && lane < kLanes)
#pragma unroll
      for (int r = 0; r < R; r++) {
        float4* to = (float4*)(joined + ((warp - half) * R + r) * D + part * 8);
        to[0] = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
        to[1] = make_float4(acc[r][4], acc[r][5], acc[r][6], acc[r][7]);
      }
    __syncthreads();
    if (warp < half && lane < kLanes)
#pragma unroll
      for (int r = 0; r < R; r++) {
        float other[8];
        KvF32::unpack(KvF32::fetch(joined + (warp * R + r) * D + part * 8), other);
#pragma unroll
        for (int i = 0; i < 8; i++) acc[r][i] += other[i];
      }
    __syncthreads();
  }
  size_t group = (size_t)t * gridDim.y + blockIdx.y;
  float* to = out + ((size_t)t * h.heads + first_head) * D;         // [R, D]
  float* parts = partial + group * kSplits * R * (D + 2);           // [kSplits, R, D]
  float* stats = parts + (size_t)kSplits * R * D;                   // [kSplits, R]: top and sum
  if (threadIdx.x < kLanes) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      float factor = active == 1 ? 1.0f / sums[r] : 1.0f;
      float4* sink = (float4*)((active == 1 ? to : parts + (size_t)blockIdx.x * R * D) + r * D + part * 8);
      sink[0] = make_float4(acc[r][0] * factor, acc[r][1] * factor, acc[r][2] * factor, acc[r][3] * factor);
      sink[1] = make_float4(acc[r][4] * factor, acc[r][5] * factor, acc[r][6] * factor, acc[r][7] * factor);
    }
  }
  if (active == 1) return;
  if (threadIdx.x < R) *(float2*)(stats + (blockIdx.x * R + threadIdx.x) * 2) = make_float2(tops[threadIdx.x], sums[threadIdx.x]);
  if (!last_block(counters + group, active)) return;

  for (int r = warp; r < R; r += kAttendWarps) {  // one lane a split
    float2 stat = lane < active ? __ldcg((const float2*)(stats + (lane * R + r) * 2)) : make_float2(minus_infinity(), 0);
    float share = expf(stat.x - warp_max(stat.x));
    scores[r * kSplits + lane] = share / lane_sum(share * stat.y);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < R * D / 4; i += kAttendThreads) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int s = 0; s < active; s++) {
      float4 v = __ldcg((const float4*)(parts + (size_t)s * R * D) + i);
      float share = scores[i / (D / 4) * kSplits + s];
      sum.x = fmaf(share, v.x, sum.x);
      sum.y = fmaf(share, v.y, sum.y);
      sum.z = fmaf(share, v.z, sum.z);
      sum.w = fmaf(share, v.w, sum.w);
    }
    ((float4*)to)[i] = sum;
  }
}
