// Products of quantised rows with a few activation vectors: the core of every decode kernel.
//
// A group of kLanes lanes owns kRows rows; lane l takes units l, l + kLanes, ... of each, kDepth of them in flight, and
// the lanes' sums meet in a butterfly. A row's sum is thus fixed by its length and type (kLanes depends on nothing
// else) and is the same bits in any block, slot or launch. The activations lie in shared memory, where every value
// read serves all rows of the group, with the sums of each 16 of them for block types whose codes carry an offset.
#pragma once

template <class B, int kLanes_, int kDepth_, int kRows_>
struct Tile {
  using Block = B;
  static constexpr int kLanes = kLanes_, kDepth = kDepth_, kRows = kRows_;
};

// Where a column lies in shared memory. 16 floats of padding after the first half of every 128 and 20 after the second
// put the 16-byte reads of 8 neighbouring lanes on different banks, for units of 64 columns as Q4_K and as Q6_K has them.
__device__ __forceinline__ int padded(int column) { return column + column / 128 * 36 + (column & 64) / 4; }

struct Staged {
  const float* x;
  const float* sums;
  int stride, sum_stride;  // from one token to the next
  int origin;              // the row's column 0 is the staged column `origin`
};
__device__ __forceinline__ Staged staged(float* shared, int k, int tokens) {
  int stride = padded(k);
  return {shared, shared + stride * tokens, stride, (k + 15) / 16, 0};
}

// Copies `tokens` rows of k floats from `x` into shared memory, times `norm` if given; tokens beyond count as zero.
// Every thread calls it, with kAhead loads in flight; the caller synchronises. With `norm`, each warp leaves its part of the sum of x^2 per token.
template <int NT, int kAhead = 4>
__device__ __forceinline__ void stage(const Staged& s, const float* x, int tokens, int k, const float* norm,
                                      float (*squares)[kWarp]) {
  for (int t = 0; t < NT; t++) {
    float square = 0;
#pragma unroll kAhead
    for (int base = 0; base < k; base += 4 * blockDim.x) {
      int c = base + 4 * threadIdx.x;
      float4 v = make_float4(0, 0, 0, 0);
      if (c < k) {
        if (t < tokens) v = *(const float4*)(x + (size_t)t * k + c);
        if (norm) {
          float4 n = *(const float4*)(norm + c);
          square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
          v = make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w);
        }
        *(float4*)const_cast<float*>(s.x + t * s.stride + padded(c)) = v;
      }
      float sum = (v.x + v.y) + (v.z + v.w);
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (c < k && threadIdx.x % 4 == 0) const_cast<float*>(s.sums)[t * s.sum_stride + c / 16] = sum;
    }
    if (norm) {
      square = lane_sum(square);
      if (threadIdx.x % kWarp == 0) squares[t][threadIdx.x / kWarp] = square;
    }
  }
}

// 1 / rms of a staged token, from the warps' parts; every lane gets it.
__device__ __forceinline__ float inverse_rms(const float* squares, int k, float eps) {
  int lane = threadIdx.x % kWarp;
  float sum = lane_sum(lane < (blockDim.x + kWarp - 1) / kWarp ? squares[lane] : 0.0f);
  return 1.0f / sqrtf(sum / k + eps);
}

// acc[r][t] += unit `unit` of row r times the same columns of token t.
template <class B, int NR, int NT>
__device__ __forceinline__ void unit_dot(const typename B::Raw (&raw)[NR], int unit, const Staged& s,
                                         float (&acc)[NR][NT]) {
#pragma unroll
  for (int sub = 0; sub < B::kSubs; sub++) {
    int column = s.origin + B::column(unit, sub);
    float part[NR][NT] = {};
    const float* x = s.x + padded(column);
#pragma unroll
    for (int i = 0; i < B::kSubLen / 4; i++) {
      float4 a[NT];
#pragma unroll
      for (int t = 0; t < NT; t++) a[t] = *(const float4*)(x + t * s.stride + 4 * i);
#pragma unroll
      for (int r = 0; r < NR; r++) {
        float4 v = B::quad(raw[r], unit, sub, i);
#pragma unroll
        for (int t = 0; t < NT; t++) {
          part[r][t] = fmaf(v.x, a[t].x, part[r][t]);
          part[r][t] = fmaf(v.y, a[t].y, part[r][t]);
          part[r][t] = fmaf(v.z, a[t].z, part[r][t]);
          part[r][t] = fmaf(v.w, a[t].w, part[r][t]);
        }
      }
    }
    float sum[NT];
    if constexpr (B::kSums) {
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const float* sums = s.sums + t * s.sum_stride + column / 16;
        sum[t] = B::kSubLen == 32 ? sums[0] + sums[1] : sums[0];
      }
    }
#pragma unroll
    for (int r = 0; r < NR; r++) {
      float scale = 1, min = 0;
      if constexpr (B::kScaled) B::scales(raw[r], unit, sub, scale, min);
#pragma unroll
      for (int t = 0; t < NT; t++) {
        if constexpr (B::kSums)
          acc[r][t] = fmaf(scale, fmaf(B::kMul, part[r][t], B::kAdd * sum[t]), fmaf(-min, sum[t], acc[r][t]));
        else
          acc[r][t] = fmaf(scale, part[r][t], acc[r][t]);
      }
    }
  }
}

// Rows as a group sees them, each a matrix and a row number: load() puts the first kDepth units of each in flight, before
// the activations are there; dot() finishes the rows.
template <class T, int NR, int NT>
struct Rows {
  using B = typename T::Block;
  typename B::Raw raw[T::kDepth][NR];

  __device__ __forceinline__ void load(const u8* const (&w)[NR], u64 blocks, const int (&row)[NR], int units,
                                       int first = 0) {
    int lane = threadIdx.x % T::kLanes;
#pragma unroll
    for (int d = 0; d < T::kDepth; d++) {
      int u = first + d * T::kLanes + lane;
#pragma unroll
      for (int r = 0; r < NR; r++)
        if (u < units) raw[d][r] = B::load(w[r], blocks, (u64)row[r] * units + u);
    }
  }

  __device__ __forceinline__ void dot(const u8* const (&w)[NR], u64 blocks, const int (&row)[NR], int units,
                                      const Staged& s, float (&acc)[NR][NT]) {
    int lane = threadIdx.x % T::kLanes;
    for (int first = 0; first < units; first += T::kDepth * T::kLanes) {
      if (first > 0) load(w, blocks, row, units, first);
#pragma unroll
      for (int d = 0; d < T::kDepth; d++) {
        int u = first + d * T::kLanes + lane;
        if (u < units) unit_dot<B, NR, NT>(raw[d], u, s, acc);
      }
    }
#pragma unroll
    for (int r = 0; r < NR; r++)
#pragma unroll
      for (int t = 0; t < NT; t++) acc[r][t] = lane_sum<T::kLanes>(acc[r][t]);
  }
};

// Blocks in a matrix of rows x k; it locates the matrix's planes.
template <class B>
__device__ __forceinline__ u64 blocks_in(int rows, int k) {
  return (u64)rows * k / B::kBlock;
}
