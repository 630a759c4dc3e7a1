// What every kernel shares: reductions over lanes, and the last block of several.
#pragma once

constexpr int kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;

__device__ __forceinline__ u32 pack_halves(float low, float high) { return float_to_half(low) | float_to_half(high) << 16; }

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

template <int kLanes = kWarp>
__device__ __forceinline__ float lane_sum(float v) {
#pragma unroll
  for (int o = kLanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(kAllLanes, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
}
__device__ __forceinline__ u32 warp_max(u32 v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, v);
#else
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) v = max(v, __shfl_xor_sync(kAllLanes, v, o));
  return v;
#endif
}

// True in exactly one block of `blocks` that share `counter`: the last to arrive, which then sees what the others wrote.
// Leaves the counter at zero for the next launch. What that block computes must not depend on which one it is.
__device__ __forceinline__ bool last_block(u32* counter, u32 blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == blocks - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}
