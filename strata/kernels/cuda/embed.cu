// Rows of a quantised table as floats: token embeddings, and whole matrices for tests and dense products.

// out[i] = factor * table[rows[i]] (rows null: row i), [count, k] floats. Grid: (unit blocks, count).
template <class B>
__global__ void __launch_bounds__(128) gather_rows(const u8* table, const int* rows, float* out, int table_rows, int k,
                                                   float factor) {
  let_next_start();
  wait_for_previous();
  int units = k / B::kUnit, u = blockIdx.x * blockDim.x + threadIdx.x;
  if (u >= units) return;
  u64 row = rows ? rows[blockIdx.y] : blockIdx.y;
  typename B::Raw raw = B::load(table, blocks_in<B>(table_rows, k), row * units + u);
#pragma unroll
  for (int s = 0; s < B::kSubs; s++) {
    float scale, min;
    B::scales(raw, u, s, scale, min);
#pragma unroll
    for (int i = 0; i < B::kSubLen / 4; i++) {
      float4 v;
      if constexpr (B::kCoded) {
        u32 even, odd;
        B::codes(raw, u, s, i, even, odd);
        v = make_float4(half_to_float(even), half_to_float(odd), half_to_float(even >> 16), half_to_float(odd >> 16));
        v = make_float4(fmaf(scale, v.x + B::kAdd, -min), fmaf(scale, v.y + B::kAdd, -min),
                        fmaf(scale, v.z + B::kAdd, -min), fmaf(scale, v.w + B::kAdd, -min));
      } else {
        v = B::quad(raw, u, s, i);
      }
      v = make_float4(factor * v.x, factor * v.y, factor * v.z, factor * v.w);
      *(float4*)(out + (size_t)blockIdx.y * k + B::column(u, s) + 4 * i) = v;
    }
  }
}
