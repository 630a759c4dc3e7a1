// Attention over the KV cache: per-head norm, rotary embedding and append, then split-KV attention with grouped heads.

// Prepares and appends the keys and values of T tokens from cell *position on. One warp a head. Grid: (warps, T).
template <int D, bool kNeox, class Kv>
__global__ void __launch_bounds__(128) append(const Heads h, const int* position, const typename Kv::Cache keys,
                                              const typename Kv::Cache values) {
  let_next_start();
  HeadConstants<D, kNeox> constants;
  constants.load(h);
  wait_for_previous();
  int head = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp, t = blockIdx.y;
  if (head >= 2 * h.kv_heads) return;
  bool is_key = head < h.kv_heads;
  int g = head % h.kv_heads, cell = *position + t;
  Pairs<D, kNeox> x;
  x.load((is_key ? h.k : h.v) + ((size_t)t * h.kv_heads + g) * D, h.dims);
  keep_head<Kv, D, kNeox>(h, x, is_key && h.k_norm ? &constants.k_norm : nullptr,
                          is_key ? constants.frequency : nullptr, cell, is_key ? keys : values,
                          (size_t)cell * h.kv_heads + g, false, keys, 0);
}

constexpr int kAttendThreads = 256, kAttendWarps = kAttendThreads / kWarp, kTileCells = 256;
constexpr int kSplits = 32;  // of the cells, at most
constexpr int kFresh = 8;   // the most new tokens that attend() appends itself

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
__global__ void __launch_bounds__(kAttendThreads)
    attend(const Heads h, const int* position, const typename Kv::Cache keys, const typename Kv::Cache values, float scale,
           float* out, float* partial, u32* counters) {
  using Cache = typename Kv::Cache;
  constexpr int kAhead = Kv::kAhead;
  constexpr int kLanes = D / 8, kCells = kAttendThreads / kLanes;  // lanes of a cell, cells side by side
  constexpr int kStride = R + 4 - R % 4;
  __shared__ float4 scores4[kTileCells * kStride / 4];      // [cell][head]
  __shared__ float4 joined4[kAttendWarps / 2 * R * D / 4];  // halves of the block's sums; before that the queries
  __shared__ typename Kv::template Store<D, kAppends ? kFresh : 1> fresh[2];
  __shared__ float tops[R], sums[R], fade[R];
  float *scores = (float*)scores4, *joined = (float*)joined4;
  Cache fresh_keys = fresh[0].cache(), fresh_values = fresh[1].cache();
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
  auto fetch = [&](typename Kv::Raw (&raw)[kAhead], const Cache& cache, int from, int stop) {
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      int cell = from + a * kCells + side;
      if (cell < min(stop, fresh_begin)) raw[a] = Kv::template fetch<D>(cache, (size_t)cell * h.kv_heads + g, part);
    }
  };
  auto patch = [&](typename Kv::Raw (&raw)[kAhead], const Cache& fresh_cells, int from, int stop) {
    if (!kAppends || stop <= fresh_begin) return;
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      int cell = from + a * kCells + side;
      if (cell >= fresh_begin && cell < stop) raw[a] = Kv::template fetch<D>(fresh_cells, cell - fresh_begin, part);
    }
  };
  typename Kv::Raw key_raw[kAhead] = {}, value_raw[kAhead] = {};
  fetch(key_raw, keys, begin, min(end, begin + kTileCells));
  fetch(value_raw, values, begin, min(end, begin + kTileCells));

  for (int item = warp; item < items; item += kAttendWarps) {
    if (item < R) {
      float* to = joined + item * D;
      prepare_head<D, kNeox>(h, mine, h.q_norm ? &constants.q_norm : nullptr, constants.frequency, first + t,
                             [&](int i, float a, float b) {
                               to[Pairs<D, kNeox>::column_a(i, h.dims)] = a * scale;
                               to[Pairs<D, kNeox>::column_b(i, h.dims)] = b * scale;
                             });
    } else if constexpr (kAppends) {
      bool is_key = item % 2 == R % 2;
      int cell = fresh_begin + (item - R) / 2;
      bool writes = cell == first + t && first_head % heads_of_one == 0;
      Pairs<D, kNeox> x;
      x.load((is_key ? h.k : h.v) + ((size_t)(cell - first) * h.kv_heads + g) * D, h.dims);
      keep_head<Kv, D, kNeox>(h, x, is_key && h.k_norm ? &constants.k_norm : nullptr,
                              is_key ? constants.frequency : nullptr, cell, is_key ? fresh_keys : fresh_values,
                              cell - fresh_begin, writes, is_key ? keys : values, (size_t)cell * h.kv_heads + g);
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
