// Products of quantised rows with a few activation vectors: the core of every decode kernel.
//
// A warp takes 16 rows at a time. Lane t of the four lanes of row pair (g, g + 8) has units t, t + 4, ... of both rows; a
// team of kWarps warps shares the units of a row among them and meets in shared memory. All of that, and so the order of
// a row's sum, is fixed by the row's length and type: a row gives the same bits in any block, slot or launch.
//
// Quantised types go through the matrix units, activations in two halves, x = high + low to 2^-22, scaled by a power of two
// per 32 columns. As the four lanes of a row have different units and scales, each has two of the product's eight columns,
// high and low, to itself: the right operand is zero where a column meets another lane's units. Float types use float math.
#pragma once

constexpr int kTileRows = 16;

template <class B, int kWarps_, int kDepth_, bool kWhole_>
struct Tile {
  using Block = B;
  static constexpr int kWarps = kWarps_, kDepth = kDepth_;  // warps of a team; units that a lane has in flight per row
  static constexpr bool kWhole = kWhole_;                   // those are the whole row
};

// Where a column lies in shared memory, in floats. 16 floats of padding after the first half of every 128 columns and 20
// after the second put neighbouring lanes on different banks, for units of 64 columns as Q4_K and as Q6_K has them.
__device__ __forceinline__ int padded(int column) { return column + column / 128 * 36 + (column & 64) / 4; }

// Activations in shared memory: float columns, or for every 16 columns the high halves and then the low ones, each four
// columns as 0, 2, 1, 3. `groups` holds scale and sum of every 16 columns (of float columns not used).
struct Staged {
  float* x;
  float2* groups;
  int stride, group_stride;  // from one token to the next
  int origin;                // the row's column 0 is the staged column `origin`
};
__device__ __forceinline__ Staged staged(float* shared, int k, int tokens) {
  int stride = padded(k), groups = (k + 15) / 16;
  return {shared, (float2*)(shared + stride * tokens), stride, groups, 0};
}
__device__ __forceinline__ float* after(const Staged& s, int tokens) { return (float*)(s.groups + s.group_stride * tokens); }

// Stages `tokens` rows of k floats from `x`, times `norm` if given; tokens beyond count as zero. Every thread calls it; the
// caller synchronises. With `norm`, each warp leaves its part of the sum of x^2 per token in `squares`.
template <bool kHalves, int NT>
__device__ __forceinline__ void stage(const Staged& s, const float* x, int tokens, int k, const float* norm,
                                      float (*squares)[kWarp]) {
  for (int t = 0; t < NT; t++) {
    float square = 0;
#pragma unroll 2
    for (int base = 0; base < k; base += 4 * blockDim.x) {
      int c = base + 4 * threadIdx.x;
      float4 v = make_float4(0, 0, 0, 0);
      if (c < k && t < tokens) v = *(const float4*)(x + (size_t)t * k + c);
      if (c < k && norm) {
        float4 n = *(const float4*)(norm + c);
        square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        v = make_float4(v.x * n.x, v.y * n.y, v.z * n.z, v.w * n.w);
      }
      float* to = s.x + t * s.stride + padded(c);
      if constexpr (kHalves) {
        float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))), sum = (v.x + v.y) + (v.z + v.w);
#pragma unroll
        for (int o = 1; o < 8; o *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, o));
#pragma unroll
        for (int o = 1; o < 4; o *= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
        u32 power = max(__float_as_uint(most) & 0x7f800000u, 64u << 23);  // 2^e of the largest, and no denormals
        float scale = __uint_as_float(power), over = __uint_as_float((254u << 23) - power);
        v = make_float4(v.x * over, v.y * over, v.z * over, v.w * over);
        u32 even = pack_halves(v.x, v.z), odd = pack_halves(v.y, v.w);
        v = make_float4(v.x - half_to_float(even), v.y - half_to_float(odd), v.z - half_to_float(even >> 16),
                        v.w - half_to_float(odd >> 16));
        if (c < k) {
          to = s.x + t * s.stride + padded(c & ~15) + (c & 15) / 2;
          *(uint2*)to = make_uint2(even, odd);
          *(uint2*)(to + 8) = make_uint2(pack_halves(v.x, v.z), pack_halves(v.y, v.w));
          if (threadIdx.x % 4 == 0) s.groups[t * s.group_stride + c / 16] = make_float2(scale, sum);
        }
      } else if (c < k) {
        *(float4*)to = v;
      }
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

// acc[r][t] += unit `unit` of row r (the lane's own unit) times the same columns of token t. Whole warps call it; a lane
// that is not `active` has no unit.
template <class B, int NT>
__device__ __forceinline__ void unit_dot(const typename B::Raw (&raw)[2], int unit, bool active, const Staged& s,
                                         float (&acc)[2][NT]) {
  int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int sub = 0; sub < B::kSubs; sub++) {
    int column = s.origin + B::column(unit, sub);
    if constexpr (B::kCoded) {
      bool feeds = active && lane / 8 == lane % 4;  // this lane's column of the right operand is its own unit's
      const float* x = s.x + padded(column) + lane / 4 % 2 * 8;
      float c[NT][4] = {};
#pragma unroll
      for (int i = 0; i < B::kSubLen / 4; i += 2) {
        uint4 b[NT];
#pragma unroll
        for (int t = 0; t < NT; t++) {
          b[t] = make_uint4(0, 0, 0, 0);
          if (feeds) b[t] = *(const uint4*)(x + t * s.stride + i / 4 * 16 + i % 4 * 2);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
          u32 a[4];
          B::codes(raw[0], unit, sub, i + j, a[0], a[2]);
          B::codes(raw[1], unit, sub, i + j, a[1], a[3]);
#pragma unroll
          for (int t = 0; t < NT; t++) matrix_unit(c[t], a, j == 0 ? b[t].x : b[t].z, j == 0 ? b[t].y : b[t].w);
        }
      }
      if (!active) continue;
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const float2* groups = s.groups + t * s.group_stride + column / 16;
        float2 group = groups[0];
        if (B::kSubLen == 32) group.y += groups[1].y;
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float scale, min, codes = group.x * (c[t][2 * r] + c[t][2 * r + 1]);
          B::scales(raw[r], unit, sub, scale, min);
          acc[r][t] = fmaf(scale, fmaf(B::kAdd, group.y, codes), fmaf(-min, group.y, acc[r][t]));
        }
      }
    } else if (active) {
      const float* x = s.x + padded(column);
#pragma unroll
      for (int i = 0; i < B::kSubLen / 4; i++)
#pragma unroll
        for (int t = 0; t < NT; t++) {
          float4 a = *(const float4*)(x + t * s.stride + 4 * i);
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float4 v = B::quad(raw[r], unit, sub, i);
            acc[r][t] = fmaf(v.x, a.x, fmaf(v.y, a.y, fmaf(v.z, a.z, fmaf(v.w, a.w, acc[r][t]))));
          }
        }
    }
  }
}

// Two rows of a lane, `w` and `row` of each; `member` is the warp's number in its team. load() puts the first kDepth units
// in flight, before the activations are there; dot() leaves the warp's part of the sums in all four lanes.
template <class T, int NT>
struct Rows {
  using B = typename T::Block;
  typename B::Raw raw[T::kDepth][2];

  static __device__ __forceinline__ int unit(int step) { return step * 4 + threadIdx.x % 4; }

  __device__ __forceinline__ void load(const u8* const (&w)[2], u64 blocks, const int (&row)[2], int units, int step) {
#pragma unroll
    for (int d = 0; d < T::kDepth; d++, step += T::kWarps)
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (unit(step) < units) raw[d][r] = B::load(w[r], blocks, (u64)row[r] * units + unit(step));
  }

  __device__ __forceinline__ void dot(const u8* const (&w)[2], u64 blocks, const int (&row)[2], int units, int member,
                                      const Staged& s, float (&acc)[2][NT]) {
    for (int step = member; step * 4 < units;) {
      if (!T::kWhole && step > member) load(w, blocks, row, units, step);
#pragma unroll
      for (int d = 0; d < T::kDepth; d++, step += T::kWarps)
        if (step * 4 < units) unit_dot<B, NT>(raw[d], unit(step), unit(step) < units, s, acc);
      if (T::kWhole) break;
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int t = 0; t < NT; t++) acc[r][t] = lane_sum<4>(acc[r][t]);
  }
};

// Leaves a warp's sums where its team adds them up: parts [kTileRows][NT].
template <int NT>
__device__ __forceinline__ void leave(const float (&acc)[2][NT], float* parts) {
  int lane = threadIdx.x % kWarp;
  if (lane % 4 >= 2) return;
#pragma unroll
  for (int t = 0; t < NT; t++) parts[(lane / 4 + lane % 4 * 8) * NT + t] = lane % 4 == 0 ? acc[0][t] : acc[1][t];
}

// Blocks in a matrix of rows x k; it locates the matrix's planes.
template <class B>
__device__ __forceinline__ u64 blocks_in(int rows, int k) {
  return (u64)rows * k / B::kBlock;
}
