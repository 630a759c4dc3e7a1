// Tiles in shared memory for the matrix units, whose rows are swizzled.
#pragma once

// Where chunk `c` of 16 bytes of row `r` lies in a tile whose rows have kChunks of them (a power of two), in chunks: eight
// rows of a column of chunks are on different banks, as load_matrices() reads them.
template <int kChunks>
__device__ __forceinline__ int swizzled(int r, int c) {
  if constexpr (kChunks >= 8) return r * kChunks + (c ^ (r & 7));
  return r * kChunks + (c ^ (r / (8 / kChunks) & (kChunks - 1)));
}
