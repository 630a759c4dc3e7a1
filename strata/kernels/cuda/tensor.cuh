// Tiles in shared memory for the matrix units: asynchronous copies, swizzled rows, fragments.
#pragma once

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 (or 4) bytes to shared memory, or zeros where not `valid`; complete after arrive() and copies_complete().
__device__ __forceinline__ void copy16(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0));
#else
  *(uint4*)to = valid ? __ldcg((const uint4*)from) : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void copy4(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0));
#else
  *(u32*)to = valid ? __ldcg((const u32*)from) : 0u;
#endif
}
// Ends a group of a thread's copies.
__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
// Waits for all of the thread's groups but the last kLeft.
template <int kLeft>
__device__ __forceinline__ void copies_complete() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// Where chunk `c` of 16 bytes of row `r` lies in a tile whose rows have kChunks of them (a power of two), in chunks: eight
// rows of a column of chunks are on different banks, as load_matrices() reads them.
template <int kChunks>
__device__ __forceinline__ int swizzled(int r, int c) {
  if constexpr (kChunks >= 8) return r * kChunks + (c ^ (r & 7));
  return r * kChunks + (c ^ (r / (8 / kChunks) & (kChunks - 1)));
}

// Four matrices of 8 rows of 16 bytes; lane l has the shared address of row l % 8 of matrix l / 8. Lane l gets of each the halves
// 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; transposed: of column l / 4, rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) { load_matrices(r, shared_address(row)); }
__device__ __forceinline__ void load_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// c = a b, as matrix_unit() adds it.
__device__ __forceinline__ void matrix_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
#else
  c[0] = c[1] = c[2] = c[3] = 0;
  matrix_unit(c, a, b0, b1);
#endif
}

__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
