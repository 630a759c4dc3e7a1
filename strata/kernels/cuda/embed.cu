// Rows of a quantised table as floats: token embeddings, and whole matrices for tests and dense products.

// out[i] = table[rows[i]] (rows null: row i), [count, k] floats. Grid: (unit blocks, count).
template <class B>
__global__ void __launch_bounds__(128) gather_rows(const u8* table, const int* rows, float* out, int table_rows, int k) {
  let_next_start();
  wait_for_previous();
  int units = k / B::kUnit, u = blockIdx.x * blockDim.x + threadIdx.x;
  if (u >= units) return;
  u64 unit = (u64)(rows ? rows[blockIdx.y] : (int)blockIdx.y) * units + u;
  typename B::Raw raw = B::load(table, blocks_in<B>(table_rows, k), unit);
#pragma unroll
  for (int s = 0; s < B::kSubs; s++) {
    float scale, min;
    B::scales(raw, u, s, scale, min);
#pragma unroll
    for (int i = 0; i < B::kSubLen / 4; i++) {
      float4 v = B::quad(raw, u, s, i);
      v = make_float4(fmaf(scale, fmaf(v.x, B::kMul, B::kAdd), -min), fmaf(scale, fmaf(v.y, B::kMul, B::kAdd), -min),
                      fmaf(scale, fmaf(v.z, B::kMul, B::kAdd), -min), fmaf(scale, fmaf(v.w, B::kMul, B::kAdd), -min));
      *(float4*)(out + (size_t)blockIdx.y * k + B::column(u, s) + 4 * i) = v;
    }
  }
}
