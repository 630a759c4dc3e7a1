// Runs the kernels' own sources on a CPU, compiled by a C++ compiler with this header in the place of ptx.cuh: each thread of
// a block is a coroutine, which goes on until it meets others (at a barrier, in a shuffle, at a matrix unit). One block runs
// after the other. A meeting that not all come to ends the process with a word, so what would hang or race there fails here.
#pragma once
#undef _FORTIFY_SOURCE
#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(8) uint2 { u32 x, y; };
struct uint3 { u32 x, y, z; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

constexpr size_t kStack = 256 << 10;

struct Exchange { u32 tag[32]; u64 value[32]; u32 a[32][4], b[32][2]; };
struct Group { u32 size, arrived, generation; };  // threads that have to meet
struct Thread {
  ucontext_t start;
  jmp_buf at;
  bool started, done;
  u32 meetings;
  std::unique_ptr<char[]> stack;
};

static std::vector<Thread> threads;
static std::vector<Group> warps;
static std::vector<Exchange> exchanges;  // two a warp, used in turn: none is a whole meeting ahead
static std::vector<float4> dynamic;
static Group block;
static jmp_buf scheduler;
static u32 self, moves;
static void (*body)(void*);
static void* body_argument;

[[noreturn]] inline void fail(const char* why) {
  fprintf(stderr, "simt: %s (block %u %u %u, thread %u)\n", why, blockIdx.x, blockIdx.y, blockIdx.z, self);
  abort();
}
inline void release(Group& group) {
  if (group.arrived && group.arrived == group.size) group.arrived = 0, group.generation++, moves++;
}
inline void meet(Group& group) {
  u32 before = group.generation;
  group.arrived++, moves++;
  release(group);
  while (group.generation == before)
    if (!_setjmp(threads[self].at)) _longjmp(scheduler, 1);
}
inline void enter() {
  body(body_argument);
  threads[self].done = true;
  block.size--, moves++;  // a barrier of the block waits for those that are left; a warp's for all
  release(block);
  _longjmp(scheduler, 1);
}
// What all lanes of the warp gave: `tag` says what they meet for, and must be the same in all.
template <class Put>
inline Exchange& exchange(u32 tag, Put put) {
  u32 warp = self / 32, lane = self % 32;
  Exchange& found = exchanges[2 * warp + threads[self].meetings++ % 2];
  found.tag[lane] = tag;
  put(found, lane);
  meet(warps[warp]);
  if (found.tag[0] != tag) fail("lanes of a warp meet for different things");
  return found;
}
inline void run_block() {
  u32 count = blockDim.x;
  if (count % 32) fail("not whole warps");
  block = {count, 0, 0};
  warps.assign(count / 32, {32, 0, 0});
  exchanges.resize(count / 16);
  if (threads.size() < count) threads.resize(count);
  for (u32 i = 0; i < count; i++) threads[i].started = threads[i].done = false, threads[i].meetings = 0;
  std::fill(dynamic.begin(), dynamic.end(), float4{NAN, NAN, NAN, NAN});
  for (u32 left = count; left > 0;) {
    u32 before = moves;
    for (u32 i = 0; i < count; i++) {
      Thread& thread = threads[i];
      if (thread.done) continue;
      self = i;
      threadIdx = {i, 0, 0};
      if (!_setjmp(scheduler)) {
        if (thread.started) _longjmp(thread.at, 1);
        thread.started = true;
        if (!thread.stack) thread.stack.reset(new char[kStack]);
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = thread.stack.get();
        thread.start.uc_stack.ss_size = kStack;
        makecontext(&thread.start, enter, 0);
        setcontext(&thread.start);
      }
      if (threads[i].done) left--;
    }
    if (moves == before) fail("threads wait for others that do not come");
  }
}
template <class... A, size_t... I>
void run(void (*kernel)(A...), const u32* grid, u32 count, void** arguments, u32 shared, std::index_sequence<I...>) {
  auto call = [&] { kernel(*(typename std::remove_const<A>::type*)arguments[I]...); };
  body = [](void* f) { (*(decltype(call)*)f)(); };
  body_argument = &call;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {count, 1, 1};
  dynamic.resize(shared / 16 + 1);
  for (u32 z = 0; z < grid[2]; z++)
    for (u32 y = 0; y < grid[1]; y++)
      for (u32 x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        run_block();
      }
}
template <class... A>
void run(void (*kernel)(A...), const u32* grid, u32 count, void** arguments, u32 shared) {
  run(kernel, grid, count, arguments, shared, std::index_sequence_for<A...>{});
}
inline float4* dynamic_shared() { return dynamic.data(); }

}  // namespace simt

inline void __syncthreads() { simt::meet(simt::block); }
inline void __syncwarp() { simt::exchange(0x10, [](simt::Exchange&, u32) {}); }
inline void __threadfence() {}
template <class T>
T __shfl_xor_sync(u32, T v, int lanes) {
  u64 bits = 0;
  memcpy(&bits, &v, sizeof v);
  auto& all = simt::exchange(0x100 + lanes, [&](simt::Exchange& e, u32 lane) { e.value[lane] = bits; });
  memcpy(&v, &all.value[simt::self % 32 ^ lanes], sizeof v);
  return v;
}
template <class T>
T __shfl_sync(u32, T v, int source) {
  u64 bits = 0;
  memcpy(&bits, &v, sizeof v);
  auto& all = simt::exchange(0x200, [&](simt::Exchange& e, u32 lane) { e.value[lane] = bits; });
  memcpy(&v, &all.value[source % 32], sizeof v);
  return v;
}
inline u32 __ballot_sync(u32, bool v) {
  auto& all = simt::exchange(0x300, [&](simt::Exchange& e, u32 lane) { e.value[lane] = v; });
  u32 found = 0;
  for (int i = 0; i < 32; i++) found |= (u32)all.value[i] << i;
  return found;
}
inline bool __any_sync(u32 lanes, bool v) { return __ballot_sync(lanes, v) != 0; }
inline int __syncthreads_count(bool v) {
  static int count;
  __syncthreads();
  count = 0;
  __syncthreads();
  count += v;
  __syncthreads();
  return count;
}
template <class T, class U>
T atomicAdd(T* p, U v) { return std::exchange(*p, *p + v); }
template <class T, class U>
T atomicOr(T* p, U v) { return std::exchange(*p, *p | v); }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
T __ldg(const T* p) { return *p; }

template <class To, class From>
To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(u32 v) { return bits_of<float>(v); }
inline float __int_as_float(u32 v) { return bits_of<float>(v); }
inline u32 __float_as_uint(float v) { return bits_of<u32>(v); }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs(v); }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  u64 bytes = (u64)b << 32 | a;
  u32 found = 0;
  for (int i = 0; i < 4; i++) {
    u32 byte = (u32)(bytes >> 8 * (selector >> 4 * i & 7)) & 0xff;
    if (selector >> 4 * i & 8) byte = byte & 0x80 ? 0xff : 0;
    found |= byte << 8 * i;
  }
  return found;
}
inline u32 __vadd4(u32 a, u32 b) { return ((a & 0x7f7f7f7f) + (b & 0x7f7f7f7f)) ^ ((a ^ b) & 0x80808080); }

// ---- what ptx.cuh has ----

inline void wait_for_previous() {}
inline void let_next_start() {}
template <class T>
T aligned(const void* p) {
  if ((size_t)p % sizeof(T)) simt::fail("a load is not aligned");
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline uint4 load16(const void* p) { return aligned<uint4>(p); }
inline uint2 load8(const void* p) { return aligned<uint2>(p); }
inline u32 load4(const void* p) { return aligned<u32>(p); }
inline u16 load2(const void* p) { return aligned<u16>(p); }
inline u32 load1(const void* p) { return *(const u8*)p; }
inline float half_to_float(u32 bits) { return (float)bits_of<_Float16>((u16)bits); }
inline u32 float_to_half(float f) { return bits_of<u16>((_Float16)f); }
inline u32 add_halves(u32 a, u32 b) {
  return float_to_half(half_to_float(a) + half_to_float(b)) | float_to_half(half_to_float(a >> 16) + half_to_float(b >> 16)) << 16;
}
inline u32 field(u32 w, u32 mask, u32 base) { return (w & mask) | base; }
inline u32 shared_address(const void* p) { return (u32)((const char*)p - (const char*)simt::dynamic_shared()); }
template <class T>
void copy(void* to, const void* from, bool valid) {
  if ((size_t)to % sizeof(T)) simt::fail("a copy's place is not aligned");
  T v = {};
  if (valid) v = aligned<T>(from);
  memcpy(to, &v, sizeof v);
}
inline void copy16(void* to, const void* from, bool valid) { copy<uint4>(to, from, valid); }
inline void copy4(void* to, const void* from, bool valid) { copy<u32>(to, from, valid); }
inline void copies_end() {}
template <int kLeft>
void copies_complete() {}
inline void load_matrices(u32 (&r)[4], const void* row, bool transposed) {
  if ((size_t)row % 16) simt::fail("a row of a matrix is not aligned");
  auto& all = simt::exchange(0x500 + transposed, [&](simt::Exchange& e, u32 lane) { e.value[lane] = (u64)row; });
  int lane = simt::self % 32;
  for (int m = 0; m < 4; m++) {
    u32 halves[2];
    for (int i = 0; i < 2; i++) {
      int along = lane % 4 * 2 + i, of = transposed ? along : lane / 4, column = transposed ? lane / 4 : along;
      halves[i] = ((const u16*)all.value[m * 8 + of])[column];
    }
    r[m] = halves[0] | halves[1] << 16;
  }
}
inline void load_matrices(u32 (&r)[4], const void* row) { load_matrices(r, row, false); }
inline void load_matrices(u32 (&r)[4], u32 row) { load_matrices(r, (const char*)simt::dynamic_shared() + row, false); }
inline void load_transposed(u32 (&r)[4], const void* row) { load_matrices(r, row, true); }
inline void matrix_unit(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  auto& all = simt::exchange(0x400, [&](simt::Exchange& e, u32 lane) {
    memcpy(e.a[lane], a, sizeof a);
    e.b[lane][0] = b0, e.b[lane][1] = b1;
  });
  int g = simt::self % 32 / 4, t = simt::self % 4;
  for (int i = 0; i < 4; i++) {
    double sum = c[i];
    for (int k = 0; k < 16; k++) {
      int of = k % 8 / 2, shift = k % 2 * 16;
      u32 left = all.a[g * 4 + of][k / 8 * 2 + i / 2], right = all.b[(2 * t + i % 2) * 4 + of][k / 8];
      sum += (double)half_to_float(left >> shift) * half_to_float(right >> shift);
    }
    c[i] = (float)sum;
  }
}
inline void matrix_product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  c[0] = c[1] = c[2] = c[3] = 0;
  matrix_unit(c, a, b0, b1);
}
