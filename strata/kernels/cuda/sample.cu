// Chooses the next token as `strata.runtime.sampler` defines it: top-k, top-p, min-p, then temperature, one Philox draw.

constexpr int kSampleThreads = 256, kStretch = 64;  // logits that one maximum stands for
constexpr int kMostKept = 64;                       // the largest top-k
constexpr int kMostCandidates = 1024;               // logits not below the k-th largest maximum
constexpr int kNotFinite = -1, kTooMany = -2;

struct Sampling {
  double temperature;  // 0: the likeliest, with top_k 1
  double top_p;        // 1: all
  double log_min_p;    // minus infinity: all
  u64 seed;
  int top_k;  // 1 to kMostKept
  int unused;
};

// Ordered as the floats are, with -0 as 0 and NaN above all.
__device__ __forceinline__ u32 ordered(float v) {
  if (v != v) return 0xffffffffu;
  u32 bits = __float_as_uint(v == 0 ? 0.0f : v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The draw of `strata.kernels.philox.uniform`.
__device__ __forceinline__ double uniform_draw(u64 seed, u32 position) {
  u32 c0 = position, c1 = 0, c2 = 0, c3 = 0, k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return (double)(((u64)c0 << 32 | c1) >> 11) * 0x1p-53;
}

// The k-th largest of n keys, by four passes over their bytes; 0 when there are fewer.
__device__ u32 kth_largest(const u32* keys, int n, int k, u32* histogram, u32* chosen) {
  if (n < k) return 0;
  u32 prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      u32 key = __ldcg(keys + i);
      if ((key & mask) == prefix) atomicAdd(histogram + (key >> shift & 255), 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int bin = 255;
      for (; bin > 0 && (int)histogram[bin] < k; bin--) k -= histogram[bin];
      chosen[0] = bin;
      chosen[1] = k;
    }
    __syncthreads();
    prefix |= chosen[0] << shift;
    mask |= 255u << shift;
    k = chosen[1];
    __syncthreads();
  }
  return prefix;
}

// Sorts n (a power of two) keys, the largest first.
__device__ void sort_down(u64* keys, int n) {
  for (int size = 2; size <= n; size *= 2)
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
        int low = 2 * i - (i & (stride - 1)), high = low + stride;
        bool down = (low & size) == 0;
        u64 a = keys[low], b = keys[high];
        if ((a < b) == down) keys[low] = b, keys[high] = a;
      }
      __syncthreads();
    }
}

// Of `count` candidates, the largest first, the one that is drawn. Sums run in the order of the definition's.
__device__ int draw(const u64* sorted, int count, const Sampling& s, u32 position, double* weight, u64* by_id) {
  int i = threadIdx.x;
  double top = unordered((u32)(sorted[0] >> 32));
  double value = i < count ? (double)unordered((u32)(sorted[i] >> 32)) : 0;
  if (s.top_p < 1) {
    if (i < count) weight[i] = exp(value - top);
    __syncthreads();
    double total = 0, sum = 0;
    for (int j = 0; j < count; j++) total += weight[j];
    int keep = 0;
    do sum += weight[keep++];
    while (keep < count && sum < s.top_p * total);
    count = keep;
    __syncthreads();
  }
  // What min-p leaves out is at the end of the order.
  int kept = 0;
  for (; kept < count && (double)unordered((u32)(sorted[kept] >> 32)) >= top + s.log_min_p; kept++) {}
  count = kept;
  int rank = 0;
  u32 id = ~(u32)sorted[i < count ? i : 0];
  for (int j = 0; j < count; j++) rank += ~(u32)sorted[j] < id;
  if (i < count) {
    weight[rank] = exp((value - top) / s.temperature);
    by_id[rank] = id;
  }
  __syncthreads();
  double total = 0, sum = 0;
  for (int j = 0; j < count; j++) total += weight[j];
  double drawn = uniform_draw(s.seed, position) * total;
  for (int j = 0; j < count; j++) {
    sum += weight[j];
    if (sum > drawn) return (int)by_id[j];
  }
  return (int)by_id[count - 1];
}

// Chooses the token at *position + 1, makes it the next step's and moves on; `chosen` also tells of a failure, which the
// host resolves. A block finds the maxima of some stretches; the last one looks into the stretches that can matter.
__global__ void __launch_bounds__(kSampleThreads) sample_token(const float* logits, int vocab, u32* maxima, u32* counter,
                                                               const Sampling* sampling, int* token, int* position,
                                                               int* chosen) {
  __shared__ u64 candidates[kMostCandidates], by_id[kMostKept];
  __shared__ double weight[kMostKept];
  __shared__ u32 histogram[256], found[2], number;
  let_next_start();
  wait_for_previous();
  int lane = threadIdx.x % kWarp, warps = kSampleThreads / kWarp, stretches = (vocab + kStretch - 1) / kStretch;
  int mine = blockIdx.x * warps + threadIdx.x / kWarp;
  if (mine < stretches) {
    u32 best = 0;
    for (int i = lane; i < kStretch; i += kWarp)
      if (mine * kStretch + i < vocab) best = max(best, ordered(logits[mine * kStretch + i]));
    best = warp_max(best);
    if (lane == 0) maxima[mine] = best;
  }
  if (!last_block(counter, gridDim.x)) return;
  if (threadIdx.x == 0) number = 0;
  Sampling s = *sampling;
  u32 edge = kth_largest(maxima, stretches, s.top_k, histogram, found);
  __syncthreads();
  for (int stretch = threadIdx.x / kWarp; stretch < stretches; stretch += warps) {
    if (__ldcg(maxima + stretch) < edge) continue;
    for (int i = lane; i < kStretch; i += kWarp) {
      int id = stretch * kStretch + i;
      u32 key = id < vocab ? ordered(__ldcg(logits + id)) : 0;
      if (id >= vocab || key < edge) continue;
      u32 at = atomicAdd(&number, 1u);
      if (at < kMostCandidates) candidates[at] = (u64)key << 32 | ~(u32)id;
    }
  }
  __syncthreads();
  int n = number, result = kTooMany;
  if (n <= kMostCandidates) {
    int padded = 2;
    while (padded < n) padded *= 2;
    for (int i = n + threadIdx.x; i < padded; i += kSampleThreads) candidates[i] = 0;
    __syncthreads();
    sort_down(candidates, padded);
    float top = unordered((u32)(candidates[0] >> 32));
    if (!(fabsf(top) < __int_as_float(0x7f800000))) result = kNotFinite;
    else if (s.temperature == 0) result = (int)~(u32)candidates[0];
    else result = draw(candidates, min(n, s.top_k), s, (u32)*position + 1, weight, by_id);
  }
  __syncthreads();  // everyone has read the position
  if (threadIdx.x != 0) return;
  *chosen = result;
  *token = max(result, 0);
  *position += 1;
}
