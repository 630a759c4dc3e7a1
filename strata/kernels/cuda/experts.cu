// The experts of a token: gate and up with SiLU, then down, the weighted sum in rank order and the residual.

constexpr int kGateUpThreads = 256, kDownThreads = 512;

struct ExpertPool {  // slot s of a layer lies at base + s * stride, its matrices at these offsets within
  const u8* base;
  u64 stride, gate, up, down;
};

// activation[t, r, f] = silu(gate h_t) * (up h_t) of the expert in slots[t, r]. Grid: (row blocks, tokens * top_k).
template <class Gate, class Up>
__global__ void __launch_bounds__(kGateUpThreads) expert_gate_up(const ExpertPool pool, const int* slots,
                                                              const float* hidden, float* activation, int e, int f,
                                                              int top_k) {
  static_assert(Gate::kLanes == Up::kLanes);
  extern __shared__ float4 shared[];
  let_next_start();
  wait_for_previous();
  int pair = blockIdx.y;
  const u8* slot = pool.base + pool.stride * (u64)slots[pair];
  const u8 *gate = slot + pool.gate, *up = slot + pool.up;
  int group = threadIdx.x / Gate::kLanes, groups = blockDim.x / Gate::kLanes;
  int row = min((int)blockIdx.x * groups + group, f - 1);  // a group past the end repeats the last row
  u64 gate_blocks = blocks_in<typename Gate::Block>(f, e), up_blocks = blocks_in<typename Up::Block>(f, e);
  int gate_units = e / Gate::Block::kUnit, up_units = e / Up::Block::kUnit;

  Row<Gate, 1> g;
  Row<Up, 1> u;
  g.load(gate, gate_blocks, row, gate_units);
  u.load(up, up_blocks, row, up_units);
  Staged s = staged((float*)shared, e, 1);
  stage<1>(s, hidden + (size_t)(pair / top_k) * e, 1, e, nullptr, nullptr);
  __syncthreads();
  float a[1] = {}, b[1] = {};
  g.dot(gate, gate_blocks, row, gate_units, s, a);
  u.dot(up, up_blocks, row, up_units, s, b);
  if (blockIdx.x * groups + group < f && threadIdx.x % Gate::kLanes == 0)
    activation[(size_t)pair * f + row] = a[0] / (1.0f + expf(-a[0])) * b[0];
}

// residual[t] += sum over ranks, in rank order, of weights[t, r] * down(activation[t, r]). Warps of a block go through
// the ranks of a few rows; the ranks' results meet in shared memory. Grid: (row blocks, tokens).
template <class Down>
__global__ void __launch_bounds__(kDownThreads) expert_down(const ExpertPool pool, const int* slots, const float* weights,
                                                           const float* activation, float* residual, int e, int f,
                                                           int top_k) {
  extern __shared__ float4 shared[];
  constexpr int kRows = kWarp / Down::kLanes;  // of one warp
  using B = typename Down::Block;
  let_next_start();
  wait_for_previous();
  int t = blockIdx.y, warp = threadIdx.x / kWarp, sets = blockDim.x / kWarp / top_k;
  int rank = warp % top_k, local = warp / top_k * kRows + threadIdx.x % kWarp / Down::kLanes;
  int first = blockIdx.x * sets * kRows, row = min(first + local, e - 1), units = f / B::kUnit;
  u64 total = blocks_in<B>(e, f);
  const u8* down = pool.base + pool.stride * (u64)slots[t * top_k + rank] + pool.down;

  Row<Down, 1> r;
  r.load(down, total, row, units);
  Staged s = staged((float*)shared, top_k * f, 1);
  float* results = (float*)shared + s.stride + s.sum_stride;  // [top_k, rows of the block]
  stage<1>(s, activation + (size_t)t * top_k * f, 1, top_k * f, nullptr, nullptr);
  __syncthreads();
  s.origin = rank * f;
  float acc[1] = {};
  r.dot(down, total, row, units, s, acc);
  if (threadIdx.x % Down::kLanes == 0) results[rank * sets * kRows + local] = acc[0];
  __syncthreads();
  int out = first + threadIdx.x;
  if (threadIdx.x < sets * kRows && out < e) {
    float sum = 0;
    for (int i = 0; i < top_k; i++) sum = fmaf(weights[t * top_k + i], results[i * sets * kRows + threadIdx.x], sum);
    residual[(size_t)t * e + out] += sum;
  }
}
