// The experts of a token: gate and up with SiLU, then down, the weighted sum in rank order and the residual.

struct ExpertPool {  // slot s of a layer lies at base + s * stride, its matrices at these offsets within
  const u8* base;
  u64 stride, gate, up, down;
};

// Where an expert lies, or -1: the slots of those that are missing are written when their bytes are there.
__device__ __forceinline__ int there(const int* slot_of) {
  int slot;
#if __CUDA_ARCH__ >= 700
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(slot) : "l"(slot_of) : "memory");
#else
  slot = __ldcg(slot_of);
#endif
  return slot;
}

// activation[t, r, f] = silu(gate h_t) * (up h_t) of the expert in slots[t, r]; gate and up are of one type. A
// team's tile is 8 rows of gate and the same of up; kTeams teams a block. With `slot_of` [experts], which make_ready in
// front of this kernel keeps, a block whose expert is there does not wait for it. Grid: (row blocks, tokens * top_k).
template <class T, int kTeams>
__global__ void __launch_bounds__(T::kWarps * kTeams * kWarp, (T::Block::kLean ? 1024 : 768) / (T::kWarps * kTeams * kWarp))
    expert_gate_up(const ExpertPool pool, const int* slots, const int* slot_of, const int* ids, const float* hidden,
                   float* activation, int e, int f, int top_k) {
  extern __shared__ float4 shared[];
  __shared__ float parts[kTeams][T::kWarps][kTileRows];
  using B = typename T::Block;
  int pair = blockIdx.y, team = threadIdx.x / kWarp / T::kWarps, member = threadIdx.x / kWarp % T::kWarps;
  int where = slot_of ? there(slot_of + __ldcg(ids + pair)) : -1;
  if (where < 0) {
    wait_for_previous();
    if (!slot_of) let_next_start();
    where = __ldcg(slots + pair);
  }
  const u8* slot = pool.base + pool.stride * (u64)where;
  int first = (blockIdx.x * kTeams + team) * 8, at = min(first + (int)threadIdx.x % kWarp / 4, f - 1);
  int row[2] = {at, at}, units = e / B::kUnit;  // a row past the end repeats the last one
  const u8* w[2] = {slot + pool.gate, slot + pool.up};
  u64 blocks = blocks_in<B>(f, e);
  Rows<T, 1> rows;
  rows.load(w, blocks, row, units, member);
  Staged s = staged((float*)shared, e, 1);
  stage<B::kCoded, 1>(s, hidden + (size_t)(pair / top_k) * e, 1, e, nullptr, nullptr);
  if (slot_of) {
    wait_for_previous();
    let_next_start();  // only now, so that expert_down may use what was complete before this kernel
  }
  __syncthreads();
  float acc[2][1] = {};
  rows.dot(w, blocks, row, units, member, s, acc);
  leave<1>(acc, parts[team][member]);
  __syncthreads();
  if (threadIdx.x >= kTeams * 8) return;
  float gate = 0, up = 0;
  team = threadIdx.x / 8;
  int mine = blockIdx.x * kTeams * 8 + threadIdx.x;
#pragma unroll
  for (int i = 0; i < T::kWarps; i++) {
    gate += parts[team][i][threadIdx.x % 8];
    up += parts[team][i][threadIdx.x % 8 + 8];
  }
  if (mine < f) activation[(size_t)pair * f + mine] = gate / (1.0f + expf(-gate)) * up;
}

// residual[t] += sum over ranks, in rank order, of weights[t, r] * down(activation[t, r]). A block has a team for each rank;
// their results of 16 rows meet in shared memory. Must follow expert_gate_up. Grid: (row blocks, tokens), kThreads threads.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads) expert_down(const ExpertPool pool, const int* slots, const float* weights,
                                                        const float* activation, float* residual, int e, int f,
                                                        int top_k) {
  extern __shared__ float4 shared[];
  __shared__ float factors[kWarp];
  using B = typename T::Block;
  let_next_start();
  int t = blockIdx.y, warp = threadIdx.x / kWarp, rank = warp / T::kWarps, member = warp % T::kWarps;
  int first = blockIdx.x * kTileRows, units = f / B::kUnit, g = threadIdx.x % kWarp / 4;
  int row[2] = {min(first + g, e - 1), min(first + g + 8, e - 1)};
  u64 total = blocks_in<B>(e, f);
  // Slots, weights and residual were complete before expert_gate_up let this kernel start.
  const u8* down = pool.base + pool.stride * (u64)__ldcg(slots + t * top_k + rank) + pool.down;
  const u8* w[2] = {down, down};
  Rows<T, 1> rows;
  rows.load(w, total, row, units, member);
  int out = first + threadIdx.x;
  bool writes = threadIdx.x < kTileRows && out < e;
  float before = writes ? __ldcg(residual + (size_t)t * e + out) : 0.0f;
  if (threadIdx.x < top_k) factors[threadIdx.x] = __ldcg(weights + t * top_k + threadIdx.x);
  wait_for_previous();
  Staged s = staged((float*)shared, top_k * f, 1);
  float* parts = after(s, 1);  // [top_k, kWarps, kTileRows]
  stage<B::kCoded, 1>(s, activation + (size_t)t * top_k * f, 1, top_k * f, nullptr, nullptr);
  __syncthreads();
  s.origin = rank * f;
  float acc[2][1] = {};
  rows.dot(w, total, row, units, member, s, acc);
  leave<1>(acc, parts + warp * kTileRows);
  __syncthreads();
  if (!writes) return;
  float sum = 0;
  for (int r = 0; r < top_k; r++) {
    float result = 0;
#pragma unroll
    for (int i = 0; i < T::kWarps; i++) result += parts[(r * T::kWarps + i) * kTileRows + threadIdx.x];
    sum = fmaf(factors[r], result, sum);
  }
  residual[(size_t)t * e + out] = before + sum;
}
