// The experts of a token: gate and up with SiLU, then down, the weighted sum in rank order and the residual.

constexpr int kGateUpThreads = 128, kGateUpBlocks = 3;  // blocks that a processor holds at once

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

struct ExpertPool {  // slot s of a layer lies at base + s * stride, its matrices at these offsets within
  const u8* base;
  u64 stride, gate, up, down;
};

// activation[t, r, f] = silu(gate h_t) * (up h_t) of the expert in slots[t, r]. With kChooses each block first makes the
// choice itself, from the logits, and the first block of a token writes it. Grid: (row blocks, tokens * top_k).
template <bool kChooses, class Gate, class Up>
__global__ void __launch_bounds__(kGateUpThreads, kGateUpBlocks)
    expert_gate_up(const ExpertPool pool, const Choice choice, const float* hidden, float* activation, int e, int f) {
  static_assert(Gate::kLanes == Up::kLanes && Gate::kRows == Up::kRows);
  extern __shared__ float4 shared[];
  constexpr int NR = Gate::kRows;
  let_next_start();
  wait_for_previous();
  int pair = blockIdx.y, top_k = choice.top_k, lane = threadIdx.x % Gate::kLanes;
  int number = 0;
  Staged s = staged((float*)shared, e, 1);
  auto stage_hidden = [&]() { stage<1, 2>(s, hidden + (size_t)(pair / top_k) * e, 1, e, nullptr, nullptr); };
  if constexpr (kChooses) {
    __shared__ int chosen[kMostChosen];
    stage_hidden();
    if (threadIdx.x < kWarp) {
      int id;
      float weight;
      choose(choice, pair / top_k, id, number, weight);
      chosen[threadIdx.x] = number;
      if (blockIdx.x == 0 && pair % top_k == 0 && threadIdx.x < top_k) {
        choice.ids[pair + threadIdx.x] = id;
        choice.slots[pair + threadIdx.x] = number;
        choice.weights[pair + threadIdx.x] = weight;
      }
    }
    __syncthreads();
    number = chosen[pair % top_k];
  } else {
    number = choice.slots[pair];
  }
  const u8* slot = pool.base + pool.stride * (u64)number;
  int base = ((int)blockIdx.x * (blockDim.x / Gate::kLanes) + threadIdx.x / Gate::kLanes) * NR;
  u64 blocks = blocks_in<typename Gate::Block>(f, e);
  int units = e / Gate::Block::kUnit;
  float gate[NR], up[NR];
  if constexpr (same<typename Gate::Block, typename Up::Block>) {
    const u8* w[2 * NR];
    int row[2 * NR];
#pragma unroll
    for (int r = 0; r < 2 * NR; r++) {
      w[r] = slot + (r < NR ? pool.gate : pool.up);
      row[r] = min(base + r % NR, f - 1);  // a group past the end repeats the last row
    }
    Rows<Gate, 2 * NR, 1> rows;
    rows.load(w, blocks, row, units);
    if constexpr (!kChooses) {
      stage_hidden();
      __syncthreads();
    }
    float acc[2 * NR][1] = {};
    rows.dot(w, blocks, row, units, s, acc);
#pragma unroll
    for (int r = 0; r < NR; r++) gate[r] = acc[r][0], up[r] = acc[NR + r][0];
  } else {
    const u8 *w_gate[NR], *w_up[NR];
    int row[NR], up_units = e / Up::Block::kUnit;
    u64 up_blocks = blocks_in<typename Up::Block>(f, e);
#pragma unroll
    for (int r = 0; r < NR; r++) {
      w_gate[r] = slot + pool.gate;
      w_up[r] = slot + pool.up;
      row[r] = min(base + r, f - 1);
    }
    Rows<Gate, NR, 1> gates;
    Rows<Up, NR, 1> ups;
    gates.load(w_gate, blocks, row, units);
    ups.load(w_up, up_blocks, row, up_units);
    if constexpr (!kChooses) {
      stage_hidden();
      __syncthreads();
    }
    float a[NR][1] = {}, b[NR][1] = {};
    gates.dot(w_gate, blocks, row, units, s, a);
    ups.dot(w_up, up_blocks, row, up_units, s, b);
#pragma unroll
    for (int r = 0; r < NR; r++) gate[r] = a[r][0], up[r] = b[r][0];
  }
#pragma unroll
  for (int r = 0; r < NR; r++)
    if (lane == r && base + r < f) activation[(size_t)pair * f + base + r] = gate[r] / (1.0f + expf(-gate[r])) * up[r];
}

// residual[t] += sum over ranks, in rank order, of weights[t, r] * down(activation[t, r]). Warps of a block go through
// the ranks of a few rows; the ranks' results meet in shared memory. Grid: (row blocks, tokens), kThreads threads.
template <class Down, int kThreads>
__global__ void __launch_bounds__(kThreads) expert_down(const ExpertPool pool, const int* slots, const float* weights,
                                                        const float* activation, float* residual, int e, int f,
                                                        int top_k) {
  extern __shared__ float4 shared[];
  using B = typename Down::Block;
  constexpr int NR = Down::kRows, kWarpRows = kWarp / Down::kLanes * NR;
  let_next_start();
  wait_for_previous();
  int t = blockIdx.y, warp = threadIdx.x / kWarp, rank = warp % top_k, set_rows = kThreads / kWarp / top_k * kWarpRows;
  int local = warp / top_k * kWarpRows + threadIdx.x % kWarp / Down::kLanes * NR, first = blockIdx.x * set_rows;
  int units = f / B::kUnit;
  u64 total = blocks_in<B>(e, f);
  const u8* down = pool.base + pool.stride * (u64)slots[t * top_k + rank] + pool.down;
  const u8* w[NR];
  int row[NR];
#pragma unroll
  for (int r = 0; r < NR; r++) {
    w[r] = down;
    row[r] = min(first + local + r, e - 1);
  }
  Rows<Down, NR, 1> rows;
  rows.load(w, total, row, units);
  int out = first + threadIdx.x;
  bool writes = threadIdx.x < set_rows && out < e;
  float before = writes ? residual[(size_t)t * e + out] : 0.0f;
  Staged s = staged((float*)shared, top_k * f, 1);
  float* results = (float*)shared + s.stride + s.sum_stride;  // [top_k, rows of the block]
  float* factors = results + top_k * set_rows;
  if (threadIdx.x < top_k) factors[threadIdx.x] = weights[t * top_k + threadIdx.x];
  stage<1>(s, activation + (size_t)t * top_k * f, 1, top_k * f, nullptr, nullptr);
  __syncthreads();
  s.origin = rank * f;
  float acc[NR][1] = {};
  rows.dot(w, total, row, units, s, acc);
#pragma unroll
  for (int r = 0; r < NR; r++)
    if (threadIdx.x % Down::kLanes == r) results[rank * set_rows + local + r] = acc[r][0];
  __syncthreads();
  if (!writes) return;
  float sum = 0;
  for (int i = 0; i < top_k; i++) sum = fmaf(factors[i], results[i * set_rows + threadIdx.x], sum);
  residual[(size_t)t * e + out] = before + sum;
}
