// Makes the experts of a call ready: which are missing, whose slots they take, and their bytes out of page-locked memory.

constexpr int kReadyThreads = 512, kReadyDepth = 4;
constexpr int kMostAsked = 256;  // experts that a call asks for, the same ones of several tokens counted each
constexpr u32 kHeld = 0xffffffffu;

struct Residency {    // of one pool's slots and all layers; a key is layer * experts + expert
  int* slot_of;       // [keys]; -1: in none
  int* owner;         // [slots]: key; -1: none
  uint2* use;         // [keys]: the call of its layer that used it last, and how many did
  u32* calls;         // [layers]
  const u64* source;  // [keys]: where the device reads its bytes; 0: the host has to bring them
  u64* counts;        // [4]: hits, misses, evictions, bytes that were filled here
  int* wanted;        // [1 + 2 * asked]: how many experts the host has to bring, and each one's key and slot
  u8* base;           // of slot 0
  u64 stride, bytes;  // of a slot, of an expert
  int slots, experts, layer, policy;
};

// How much the expert in a slot is worth, ordered as the policies of `strata.kernels.numpy_residency` order them: an empty
// slot is worth nothing. The call that is being made counts already.
__device__ __forceinline__ u32 worth_of(const Residency& r, int slot) {
  int key = __ldcg(r.owner + slot);
  if (key < 0) return 0;
  int layer = (u32)key / (u32)r.experts;
  uint2 use = __ldcg(r.use + key);
  float age = (float)(__ldcg(r.calls + layer) + (layer == r.layer) - use.x);
  float worth = r.policy == 0 ? -age : r.policy == 1 ? __fdiv_rn((float)use.y, age + 1.0f) : (float)use.y;
  u32 bits = __float_as_uint(worth);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One token, whose experts differ, and nothing is missing: what nearly every step is. True where it was so.
__device__ __forceinline__ bool all_there(const Residency& r, const int* ids, int asked, int* slots) {
  int lane = threadIdx.x % kWarp, key = r.layer * r.experts + (lane < asked ? __ldcg(ids + lane) : 0);
  int slot = __ldcg(r.slot_of + key);
  u32 call = __ldcg(r.calls + r.layer) + 1, uses = __ldcg(&r.use[key].y);
  if (__any_sync(kAllLanes, slot < 0 && lane < asked)) return false;
  if (blockIdx.x || threadIdx.x >= kWarp) return true;
  if (lane < asked) {
    slots[lane] = slot;
    r.use[key] = make_uint2(call, uses + (r.policy == 2 ? 0 : 1));
  }
  if (lane) return true;
  r.calls[r.layer] = call;
  r.wanted[0] = 0;
  atomicAdd(r.counts, (u64)asked);
  return true;
}

// Every block finds the same misses and victims from the same tables and copies its part; the last one to end writes
// the tables, which nobody reads any more. kKept: `kept` has room for each slot's worth, else for one bit of each slot.
template <class Word, bool kKept>
__global__ void __launch_bounds__(kReadyThreads) make_ready(const Residency r, const int* ids, int asked, int tokens,
                                                            int* slots, u32* counter) {
  extern __shared__ u32 kept[];
  __shared__ int id[kMostAsked], same[kMostAsked], at[kMostAsked], missing[kMostAsked], victim[kMostAsked];
  __shared__ u64 best[2][kReadyThreads / kWarp];
  __shared__ int misses, filled;
  int thread = threadIdx.x, lane = thread % kWarp;
  wait_for_previous();
  let_next_start();  // only now, so that expert_gate_up may use what the router wrote
  if (tokens == 1 && all_there(r, ids, asked, slots)) return;
#pragma unroll 8
  for (int s = thread; s < (kKept ? r.slots : (r.slots + 31) / 32); s += kReadyThreads) kept[s] = kKept ? worth_of(r, s) : 0;
  if (thread < asked) id[thread] = __ldcg(ids + thread);
  if (thread == 0) misses = filled = 0;
  __syncthreads();
  auto hold = [&](int slot) {
    if (kKept) kept[slot] = kHeld;
    else atomicOr(kept + slot / 32, 1u << slot % 32);
  };
  if (thread < asked) {
    int first = thread;
    for (int j = 0; j < thread && first == thread; j++)
      if (id[j] == id[thread]) first = j;
    same[thread] = first;
    at[thread] = __ldcg(r.slot_of + r.layer * r.experts + id[thread]);
    if (at[thread] >= 0) hold(at[thread]);
  }
  __syncthreads();
  if (thread < asked && same[thread] == thread && at[thread] < 0) {
    int before = 0;
    for (int j = 0; j < thread; j++) before += same[j] == j && at[j] < 0;
    missing[before] = thread;
    atomicAdd(&misses, 1);
  }
  __syncthreads();
  int count = misses;
  if (count) {
    auto least = [&]() {  // of this thread's slots
      u64 found = ~0ull;
#pragma unroll 4
      for (int s = thread; s < r.slots; s += kReadyThreads) {
        u32 worth = kKept ? kept[s] : kept[s / 32] >> s % 32 & 1 ? kHeld : worth_of(r, s);
        u64 mine = (u64)worth << 32 | (u32)s;
        found = mine < found ? mine : found;
      }
      return found;
    };
    u64 mine = least();
    for (int m = 0; m < count; m++) {
      u64 smallest = mine;
#pragma unroll
      for (int o = kWarp / 2; o > 0; o /= 2) {
        u64 other = __shfl_xor_sync(kAllLanes, smallest, o);
        smallest = other < smallest ? other : smallest;
      }
      if (lane == 0) best[m % 2][thread / kWarp] = smallest;
      __syncthreads();
      smallest = best[m % 2][lane % (kReadyThreads / kWarp)];
#pragma unroll
      for (int o = kReadyThreads / kWarp / 2; o > 0; o /= 2) {
        u64 other = __shfl_xor_sync(kAllLanes, smallest, o);
        smallest = other < smallest ? other : smallest;
      }
      int slot = (int)(u32)smallest;
      if (thread == 0) victim[m] = slot;
      if (slot % kReadyThreads == thread) {
        hold(slot);
        mine = least();
      }
    }
    __syncthreads();
    u64 words = r.bytes / sizeof(Word), tile = kReadyThreads * kReadyDepth;
    int tiles = (int)((words + tile - 1) / tile);
    for (int t = blockIdx.x; t < count * tiles; t += gridDim.x) {
      int m = t / tiles, expert = id[missing[m]];
      const Word* from = (const Word*)__ldg(r.source + r.layer * r.experts + expert);
      if (!from) continue;
      Word* to = (Word*)(r.base + r.stride * (u64)victim[m]);
      u64 first = (u64)(t % tiles) * tile + thread;
      Word held[kReadyDepth];
#pragma unroll
      for (int i = 0; i < kReadyDepth; i++)
        if (first + i * kReadyThreads < words) held[i] = __ldcs(from + first + i * kReadyThreads);
#pragma unroll
      for (int i = 0; i < kReadyDepth; i++)
        if (first + i * kReadyThreads < words) to[first + i * kReadyThreads] = held[i];
    }
  }
  if (!last_block(counter, gridDim.x)) return;
  u32 call = __ldcg(r.calls + r.layer) + 1;
  if (thread < asked && same[thread] == thread) {
    uint2* use = r.use + r.layer * r.experts + id[thread];
    *use = make_uint2(call, __ldcg(&use->y) + (r.policy == 2 ? 0 : 1));
  }
  u64 evicted = 0;
  if (thread < count) {
    int key = r.layer * r.experts + id[missing[thread]], slot = victim[thread], before = __ldcg(r.owner + slot);
    if (before >= 0) r.slot_of[before] = -1, evicted = 1;
    r.owner[slot] = key;
    r.slot_of[key] = slot;
    at[missing[thread]] = slot;
    if (__ldg(r.source + key)) atomicAdd(&filled, 1);
    else {
      int place = 0;
      for (int j = 0; j < thread; j++) place += !__ldg(r.source + r.layer * r.experts + id[missing[j]]);
      r.wanted[1 + 2 * place] = key;
      r.wanted[2 + 2 * place] = slot;
    }
  }
  int evictions = __syncthreads_count(evicted != 0), distinct = __syncthreads_count(thread < asked && same[thread] == thread);
  if (thread < asked) slots[thread] = at[same[thread]];
  if (thread) return;
  r.calls[r.layer] = call;
  r.wanted[0] = count - filled;
  u64 done[] = {(u64)(distinct - count), (u64)count, (u64)evictions, (u64)filled * r.bytes};
#pragma unroll
  for (int i = 0; i < 4; i++) r.counts[i] = __ldcg(r.counts + i) + done[i];
}
