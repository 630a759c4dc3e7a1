// Products of quantised rows with a few activation vectors: the core of every decode kernel.
//
// A group of kLanes lanes owns a row; lane l takes units l, l + kLanes, ... of it, kDepth of them in flight, and the
// lanes' sums meet in a butterfly. All of that is fixed by the row's length and type, so a row's result is the same bits
// in any block, slot or launch. The activations lie in shared memory, with the sums of each 16 of them for block types
// whose codes carry an offset.
#pragma once

template <class B, int kLanes_, int kDepth_>
struct Tile {
  using Block = B;
  static constexpr int kLanes = kLanes_, kDepth = kDepth_;
};

// Four floats of padding after every 64 keep lanes that read columns 64 apart off each other's banks.
__device__ __forceinline__ int padded(int column) { return column + column / 64 * 4; }

struct Staged {
  const float* x;
  const float* sums;
  int stride, sum_stride;  // from one token to the next
  int origin;              // the row's column 0 is the staged column `origin`
};
__device__ __forceinline__ Staged staged(float* shared, int k, int tokens) {
  int stride = (padded(k) + 3) / 4 * 4;
  return {shared, shared + stride * tokens, stride, (k + 15) / 16, 0};
}

// Copies `tokens` rows of k floats from `x` into shared memory, times `norm` if given; tokens beyond count as zero.
// Every thread calls it; the caller synchronises. With `squares`, each warp leaves its part of the sum of x^2 per token.
template <int NT>
__device__ __forceinline__ void stage(const Staged& s, const float* x, int tokens, int k, const float* norm,
                                      float (*squares)[kWarp]) {
  for (int t = 0; t < NT; t++) {
    float square = 0;
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

// acc[t] += one unit of a row times the same columns of token t.
template <class B, int NT>
__device__ __forceinline__ void unit_dot(const typename B::Raw& raw, u64 unit, int unit_of_row, const Staged& s,
                                         float (&acc)[NT]) {
#pragma unroll
  for (int sub = 0; sub < B::kSubs; sub++) {
    int column = s.origin + B::column(unit_of_row, sub);
    float part[NT] = {};
    const float* x = s.x + padded(column);
#pragma unroll
    for (int i = 0; i < B::kSubLen / 4; i++) {
      float4 v = B::quad(raw, unit, sub, i);
#pragma unroll
      for (int t = 0; t < NT; t++) {
        float4 a = *(const float4*)(x + t * s.stride + 4 * i);
        part[t] = fmaf(v.x, a.x, part[t]);
        part[t] = fmaf(v.y, a.y, part[t]);
        part[t] = fmaf(v.z, a.z, part[t]);
        part[t] = fmaf(v.w, a.w, part[t]);
      }
    }
    float scale = 1, min = 0;
    if constexpr (B::kScaled) B::scales(raw, unit, sub, scale, min);
#pragma unroll
    for (int t = 0; t < NT; t++) {
      if constexpr (B::kSums) {
        const float* sums = s.sums + t * s.sum_stride + column / 16;
        float sum = B::kSubLen == 32 ? sums[0] + sums[1] : sums[0];
        acc[t] += scale * fmaf(B::kMul, part[t], B::kAdd * sum) - min * sum;
      } else {
        acc[t] = B::kScaled ? fmaf(scale, part[t], acc[t]) : acc[t] + part[t];
      }
    }
  }
}

// One row as one group sees it: load() puts the first kDepth units in flight, dot() finishes the row.
template <class T, int NT>
struct Row {
  using B = typename T::Block;
  typename B::Raw raw[T::kDepth];

  __device__ __forceinline__ void load(const u8* w, u64 blocks, int row, int units, int first = 0) {
    int lane = threadIdx.x % T::kLanes;
#pragma unroll
    for (int d = 0; d < T::kDepth; d++) {
      int u = first + d * T::kLanes + lane;
      if (u < units) raw[d] = B::load(w, blocks, (u64)row * units + u);
    }
  }

  __device__ __forceinline__ void dot(const u8* w, u64 blocks, int row, int units, const Staged& s, float (&acc)[NT]) {
    int lane = threadIdx.x % T::kLanes;
    for (int first = 0; first < units; first += T::kDepth * T::kLanes) {
      if (first > 0) load(w, blocks, row, units, first);
#pragma unroll
      for (int d = 0; d < T::kDepth; d++) {
        int u = first + d * T::kLanes + lane;
        if (u < units) unit_dot<B, NT>(raw[d], (u64)row * units + u, u, s, acc);
      }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) acc[t] = lane_sum<T::kLanes>(acc[t]);
  }
};

// Blocks in a matrix of rows x k; it locates the matrix's planes.
template <class B>
__device__ __forceinline__ u64 blocks_in(int rows, int k) {
  return (u64)rows * k / B::kBlock;
}
