// What lies between the products of a prompt: activations split into halves, tokens sorted by expert, results combined.

// A split row has k columns as halves, high ones and then low ones, each four of them as 0, 2, 1, 3, as codes come out of
// blocks (see blocks.cuh). x * scale = high + low to 2^-22 of the row's largest. It takes as many bytes as its floats. `scales` has 1 / scale, a power of two; `sums` x * scale over every 16 columns, in
// rows of sums_of(k).
__device__ __forceinline__ int sums_of(int k) { return (k + 63) / 64 * 4; }

// Splits `count` rows of k columns, a multiple of 16, after an RMS norm if `norm` is given. One warp a row.
__global__ void __launch_bounds__(128) split_rows(const float* x, const float* norm, float eps, int k, int count, u16* out,
                                                  float* sums, float* scales) {
  wait_for_previous();
  let_next_start();
  int row = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (row >= count) return;
  x += (size_t)row * k;
  out += (size_t)row * k * 2;
  sums += (size_t)row * sums_of(k);
  float square = 0, most = 0;
  for (int c = 4 * lane; c < k; c += 4 * kWarp) {
    float4 v = *(const float4*)(x + c), n = norm ? *(const float4*)(norm + c) : make_float4(1, 1, 1, 1);
    square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x * n.x), fabsf(v.y * n.y)), fmaxf(fabsf(v.z * n.z), fabsf(v.w * n.w))));
  }
  float inverse = norm ? 1.0f / sqrtf(lane_sum(square) / k + eps) : 1.0f;
  // 2^13 times the power of two of the largest: no half overflows, and no low half of note is denormal.
  u32 power = max(__float_as_uint(warp_max(most) * inverse) & 0x7f800000u, 64u << 23);
  float scale = __uint_as_float((267u << 23) - power);
  if (lane == 0) scales[row] = __uint_as_float(power - (13u << 23));
  for (int base = 0; base < k; base += 4 * kWarp) {  // whole warps, as four lanes make a sum
    int c = base + 4 * lane;
    float4 v = make_float4(0, 0, 0, 0);
    if (c < k) {
      v = *(const float4*)(x + c);
      float4 n = norm ? *(const float4*)(norm + c) : make_float4(1, 1, 1, 1);
      v = make_float4(v.x * n.x * inverse * scale, v.y * n.y * inverse * scale, v.z * n.z * inverse * scale,
                      v.w * n.w * inverse * scale);
    }
    float sum = (v.x + v.y) + (v.z + v.w);
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    if (lane % 4 == 0 && c < sums_of(k) * 16) sums[c / 16] = sum;  // 0 past the end
    if (c >= k) continue;
    u32 even = pack_halves(v.x, v.z), odd = pack_halves(v.y, v.w);
    *(uint2*)(out + c) = make_uint2(even, odd);
    even = pack_halves(v.x - half_to_float(even), v.z - half_to_float(even >> 16));
    odd = pack_halves(v.y - half_to_float(odd), v.w - half_to_float(odd >> 16));
    *(uint2*)(out + k + c) = make_uint2(even, odd);
  }
}

constexpr int kSortThreads = 128;

// Sorts `count` (token, rank) pairs by expert, within one by token: `pairs` gets their numbers, `counts` how many of each
// of n experts, `firsts` where they start. Then the last block cuts them into tiles of up to `most` pairs of one expert:
// slot, start, pairs; `tile_count` says how many. One warp an expert; `counter` is zero.
__global__ void __launch_bounds__(kSortThreads) sort_experts(const int* ids, const int* slot_of, int count, int n, int most,
                                                             int* pairs, int* counts, int* firsts, int4* tiles,
                                                             int* tile_count, u32* counter) {
  __shared__ int ends[kSortThreads];
  wait_for_previous();
  let_next_start();
  int expert = blockIdx.x * (kSortThreads / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  auto four = [&](int base, int (&id)[4]) {
    int at = base + 4 * lane;
    int4 v = make_int4(-1, -1, -1, -1);
    if (at + 4 <= count) v = *(const int4*)(ids + at);
    else {
      if (at < count) v.x = ids[at];
      if (at + 1 < count) v.y = ids[at + 1];
      if (at + 2 < count) v.z = ids[at + 2];
    }
    id[0] = v.x, id[1] = v.y, id[2] = v.z, id[3] = v.w;
  };
  if (expert < n) {
    int less = 0, equal = 0;
#pragma unroll 4
    for (int base = 0; base < count; base += 4 * kWarp) {
      int id[4];
      four(base, id);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        less += id[j] >= 0 && id[j] < expert;
        equal += id[j] == expert;
      }
    }
#pragma unroll
    for (int o = kWarp / 2; o > 0; o /= 2) {
      less += __shfl_xor_sync(kAllLanes, less, o);
      equal += __shfl_xor_sync(kAllLanes, equal, o);
    }
    if (lane == 0) {
      counts[expert] = equal;
      firsts[expert] = less;
    }
    int at = less;
    for (int base = 0; base < count && at < less + equal; base += 4 * kWarp) {
      int id[4], before = 0, all = 0;
      four(base, id);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 has = __ballot_sync(kAllLanes, id[j] == expert);
        before += __popc(has & ((1u << lane) - 1));
        all += __popc(has);
      }
      int to = at + before;
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (id[j] == expert) pairs[to++] = base + 4 * lane + j;
      at += all;
    }
  }
  if (!last_block(counter, gridDim.x)) return;
  int each = (n + kSortThreads - 1) / kSortThreads, begin = min(n, (int)threadIdx.x * each), end = min(n, begin + each);
  int mine = 0;
  for (int e = begin; e < end; e++) mine += (__ldcg(counts + e) + most - 1) / most;
  ends[threadIdx.x] = mine;
  for (int o = 1; o < kSortThreads; o *= 2) {
    __syncthreads();
    int before = threadIdx.x >= o ? ends[threadIdx.x - o] : 0;
    __syncthreads();
    ends[threadIdx.x] += before;
  }
  int at = ends[threadIdx.x] - mine;
  if (threadIdx.x == kSortThreads - 1) *tile_count = ends[threadIdx.x];
  for (int e = begin; e < end; e++) {
    int first = __ldcg(firsts + e), has = __ldcg(counts + e), slot = slot_of ? slot_of[e] : e;
    for (int i = 0; i < has; i += most) tiles[at++] = make_int4(slot, first + i, min(most, has - i), 0);
  }
}

// residual[t] += sum over ranks, in rank order, of weights[t, r] * results[t, r]; e is a multiple of 4. Grid: (columns, T).
__global__ void __launch_bounds__(128) combine(const float* results, const float* weights, float* residual, int e, int top_k) {
  wait_for_previous();
  let_next_start();
  int c = 4 * (blockIdx.x * blockDim.x + threadIdx.x), t = blockIdx.y;
  if (c >= e) return;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int r = 0; r < top_k; r++) {
    float w = weights[t * top_k + r];
    float4 v = *(const float4*)(results + ((size_t)t * top_k + r) * e + c);
    sum.x = fmaf(w, v.x, sum.x);
    sum.y = fmaf(w, v.y, sum.y);
    sum.z = fmaf(w, v.z, sum.z);
    sum.w = fmaf(w, v.w, sum.w);
  }
  float4* to = (float4*)(residual + (size_t)t * e + c);
  float4 v = *to;
  *to = make_float4(v.x + sum.x, v.y + sum.y, v.z + sum.z, v.w + sum.w);
}
