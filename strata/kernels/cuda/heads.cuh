// Heads of queries, keys and values: how a warp norms and rotates one. What the KV cache keeps of them is in kv.cuh.
#pragma once

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
  static constexpr int kColumns = D, kPairs = D / 2, kEach = (kPairs + kWarp - 1) / kWarp;
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
  template <class F>
  __device__ __forceinline__ void each(int dims, F f) const {  // f(column, value)
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (has(i)) f(column_a(i, dims), a[i]), f(column_b(i, dims), b[i]);
  }
  template <class F>
  __device__ __forceinline__ void map(int dims, F f) {  // each value becomes f(column, value)
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (has(i)) a[i] = f(column_a(i, dims), a[i]), b[i] = f(column_b(i, dims), b[i]);
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

// One warp norms (unless `norm` is null) and rotates one head of the token at `cell`; `write` gets a pair's number, a and b.
template <int D, bool kNeox, class Write>
__device__ __forceinline__ void prepare_head(const Heads& h, const Pairs<D, kNeox>& x, const Pairs<D, kNeox>* norm,
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
    write(i, a * c - b * s, b * c + a * s);
  }
}
