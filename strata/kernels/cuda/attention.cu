// Attention of a few new tokens over the KV cache: rotate and append, then split-KV attention with grouped heads.

struct KvF32 {
  using Cell = float;
  static __device__ __forceinline__ void store(Cell* p, float v) { *p = v; }
  static __device__ __forceinline__ void load(const Cell* p, float (&v)[8]) {
    float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  }
};
struct KvF16 {
  using Cell = u16;
  static __device__ __forceinline__ void store(Cell* p, float v) { *p = (u16)float_to_half(v); }
  static __device__ __forceinline__ void load(const Cell* p, float (&v)[8]) {
    uint4 w = *(const uint4*)p;
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

// Per-head norm (norms may be null), rotary embedding, and append. One warp a head: q heads in place, k heads rotated
// into the cache, v heads copied into it. q [T, H, D], k and v [T, G, D]. Grid: (blocks of warps, T).
template <int D, bool kNeox, class Kv>
__global__ void __launch_bounds__(128) rope_append(float* q, const float* k, const float* v, const float* q_norm,
                                                   const float* k_norm, float eps, const float* frequencies, int dims,
                                                   const int* position, int heads, int kv_heads,
                                                   typename Kv::Cell* keys, typename Kv::Cell* values) {
  constexpr int kPairs = D / 2, kPerLane = (kPairs + kWarp - 1) / kWarp;  // pairs of a lane: (a, b) rotate together
  let_next_start();
  wait_for_previous();
  int head = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp, t = blockIdx.y;
  if (head >= heads + 2 * kv_heads) return;
  int cell = *position + t;
  bool is_q = head < heads, is_v = head >= heads + kv_heads;
  int g = is_q ? head : (head - heads) % kv_heads;
  const float* in = is_q ? q + ((size_t)t * heads + g) * D : (is_v ? v : k) + ((size_t)t * kv_heads + g) * D;
  const float* norm = is_q ? q_norm : is_v ? nullptr : k_norm;
  size_t at = ((size_t)cell * kv_heads + g) * D;

  int column_a[kPerLane], column_b[kPerLane];
  float a[kPerLane], b[kPerLane], square = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    int p = i * kWarp + lane;
    bool rotated = 2 * p < dims;
    column_a[i] = rotated && kNeox ? p : 2 * p;
    column_b[i] = rotated && kNeox ? p + dims / 2 : 2 * p + 1;
    a[i] = b[i] = 0;
    if (p >= kPairs) continue;
    a[i] = in[column_a[i]];
    b[i] = in[column_b[i]];
    square += a[i] * a[i] + b[i] * b[i];
  }
  float inverse = norm ? 1.0f / sqrtf(lane_sum(square) / D + eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    int p = i * kWarp + lane;
    if (p >= kPairs) continue;
    if (norm) {
      a[i] *= inverse * norm[column_a[i]];
      b[i] *= inverse * norm[column_b[i]];
    }
    float s = 0, c = 1;
    if (!is_v && 2 * p < dims) sine_cosine((float)cell * frequencies[p], s, c);
    float x = a[i] * c - b[i] * s, y = b[i] * c + a[i] * s;
    if (is_q) {
      q[((size_t)t * heads + g) * D + column_a[i]] = x;
      q[((size_t)t * heads + g) * D + column_b[i]] = y;
    } else {
      typename Kv::Cell* out = (is_v ? values : keys) + at;
      Kv::store(out + column_a[i], x);
      Kv::store(out + column_b[i], y);
    }
  }
}

constexpr int kAttendThreads = 256, kAttendWarps = kAttendThreads / kWarp, kTileCells = 256;

// Cells of one split: a function of the number of cells alone, so that results depend on position and shape only.
__device__ __forceinline__ int split_cells(int cells, int splits) {
  int each = (cells + splits - 1) / splits;
  return (each + 31) / 32 * 32;
}

// Causal attention of q [T, H, D] over cells 0 .. position + t; out [T, H, D]. A block takes one split of the cells and
// R query heads of one KV head; the last block of a (token, heads) group joins the splits in order. `partial` holds
// [T, H / R, splits, R, D + 2] floats, `counters` [T, H / R] zeros. Grid: (splits, H / R, T).
template <int D, int R, class Kv>
__global__ void __launch_bounds__(kAttendThreads) attend(const float* q, const typename Kv::Cell* keys,
                                                         const typename Kv::Cell* values, const int* position,
                                                         float scale, int heads, int kv_heads, float* out,
                                                         float* partial, u32* counters) {
  constexpr int kLanes = D / 8, kCells = kAttendThreads / kLanes;  // lanes of a cell, cells side by side
  constexpr int kStride = R + 4 - R % 4;
  __shared__ float4 scores4[kTileCells * kStride / 4];             // [cell][head]
  __shared__ float4 joined4[kAttendWarps / 2 * R * D / 4];         // halves of the block's sums
  __shared__ float tops[R], sums[R], fade[R];
  float *scores = (float*)scores4, *joined = (float*)joined4;
  let_next_start();
  wait_for_previous();
  int split = blockIdx.x, splits = gridDim.x, first_head = blockIdx.y * R, t = blockIdx.z;
  int cells = *position + t + 1, each = split_cells(cells, splits), active = (cells + each - 1) / each;
  if (split >= active) return;
  int begin = split * each, end = min(cells, begin + each), g = first_head / (heads / kv_heads);
  int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, part = threadIdx.x % kLanes, side = threadIdx.x / kLanes;

  float acc[R][8] = {};
  if (threadIdx.x < R) {
    tops[threadIdx.x] = minus_infinity();
    sums[threadIdx.x] = 0;
  }
  for (int tile = begin; tile < end; tile += kTileCells) {
    int count = min(kTileCells, end - tile);
    {
      float query[R][8];
      const float* from = q + ((size_t)t * heads + first_head) * D + part * 8;
#pragma unroll
      for (int r = 0; r < R; r++) KvF32::load(from + r * D, query[r]);
      for (int base = 0; base < count; base += kCells) {  // whole warps stay for the butterfly
        int c = base + side;
        float key[8];
        Kv::load(keys + ((size_t)(tile + min(c, count - 1)) * kv_heads + g) * D + part * 8, key);
#pragma unroll
        for (int r = 0; r < R; r++) {
          float s = 0;
#pragma unroll
          for (int i = 0; i < 8; i++) s = fmaf(query[r][i], key[i], s);
          s = lane_sum<kLanes>(s);
          if (part == 0 && c < count) scores[c * kStride + r] = s * scale;
        }
      }
    }
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
    for (int c = side; c < count; c += kCells) {
      float value[8];
      Kv::load(values + ((size_t)(tile + c) * kv_heads + g) * D + part * 8, value);
#pragma unroll
      for (int r = 0; r < R; r++) {
        float p = scores[c * kStride + r];
#pragma unroll
        for (int i = 0; i < 8; i++) acc[r][i] = fmaf(p, value[i], acc[r][i]);
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
        KvF32::load(joined + (warp * R + r) * D + part * 8, other);
#pragma unroll
        for (int i = 0; i < 8; i++) acc[r][i] += other[i];
      }
    __syncthreads();
  }
  float* to = out + ((size_t)t * heads + first_head) * D;
  size_t group = (size_t)t * gridDim.y + blockIdx.y;
  float* all = partial + group * splits * R * (D + 2);
  if (threadIdx.x < kLanes) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      float over = 1.0f / sums[r], *sink = active == 1 ? to + r * D : all + ((size_t)split * R + r) * (D + 2) + 2;
#pragma unroll
      for (int i = 0; i < 8; i++) sink[part * 8 + i] = active == 1 ? acc[r][i] * over : acc[r][i];
    }
  }
  if (active == 1) return;
  if (threadIdx.x < R) {
    all[((size_t)split * R + threadIdx.x) * (D + 2)] = tops[threadIdx.x];
    all[((size_t)split * R + threadIdx.x) * (D + 2) + 1] = sums[threadIdx.x];
  }
  if (!last_block(counters + group, active)) return;
  for (int r = warp; r < R; r += kAttendWarps) {
    float top = minus_infinity();
    for (int s = 0; s < active; s++) top = fmaxf(top, __ldcg(all + ((size_t)s * R + r) * (D + 2)));
    float sum = 0, o[(D + kWarp - 1) / kWarp] = {};
    for (int s = 0; s < active; s++) {
      const float* one = all + ((size_t)s * R + r) * (D + 2);
      float w = expf(__ldcg(one) - top);
      sum = fmaf(w, __ldcg(one + 1), sum);
#pragma unroll
      for (int i = 0; i < D / kWarp; i++) o[i] = fmaf(w, __ldcg(one + 2 + i * kWarp + lane), o[i]);
    }
#pragma unroll
    for (int i = 0; i < D / kWarp; i++) to[r * D + i * kWarp + lane] = o[i] / sum;
  }
}
