// How cells of the KV cache keep a head: Cache is where they lie, Raw what a lane fetches of eight columns, Store some cells in
// shared memory. `head` counts heads from the start of a Cache.
#pragma once

template <class Cell_>
struct KvFloats {
  using Cell = Cell_;
  static constexpr bool kQuantised = false;
  static constexpr int kHalves = sizeof(Cell) / 2;  // that hold a cell: what float32 has beyond two is lost
  static constexpr int kAhead = 4;  // loads of keys or values that a lane has in flight
  struct Cache {
    Cell* cells;
  };
  template <int D, int kCells>
  struct Store {
    uint4 cells[kCells * D * sizeof(Cell) / 16];
    __device__ __forceinline__ Cache cache() { return {(Cell*)cells}; }
  };
};

struct KvF32 : KvFloats<float> {
  struct Raw {
    float4 a, b;
  };
  static __device__ __forceinline__ Cell pack(float v) { return v; }
  static __device__ __forceinline__ Raw fetch(const Cell* p) { return {*(const float4*)p, *(const float4*)(p + 4)}; }
  template <int D>
  static __device__ __forceinline__ Raw fetch(const Cache& from, size_t head, int part) {
    return fetch(from.cells + head * D + part * 8);
  }
  static __device__ __forceinline__ void unpack(const Raw& r, float (&v)[8]) {
    v[0] = r.a.x, v[1] = r.a.y, v[2] = r.a.z, v[3] = r.a.w, v[4] = r.b.x, v[5] = r.b.y, v[6] = r.b.z, v[7] = r.b.w;
  }
};

struct KvF16 : KvFloats<u16> {
  using Raw = uint4;
  static __device__ __forceinline__ Cell pack(float v) { return (u16)float_to_half(v); }
  template <int D>
  static __device__ __forceinline__ Raw fetch(const Cache& from, size_t head, int part) {
    return *(const uint4*)(from.cells + head * D + part * 8);
  }
  static __device__ __forceinline__ void unpack(const Raw& w, float (&v)[8]) {
    v[0] = half_to_float(w.x), v[1] = half_to_float(w.x >> 16), v[2] = half_to_float(w.y);
    v[3] = half_to_float(w.y >> 16), v[4] = half_to_float(w.z), v[5] = half_to_float(w.z >> 16);
    v[6] = half_to_float(w.w), v[7] = half_to_float(w.w >> 16);
  }
};

// int8 with an f16 scale for 64 columns of a head, or for all of a smaller one: as strata/kernels/kv_int8.py defines it.
struct KvInt8 {
  static constexpr bool kQuantised = true;
  static constexpr int kHalves = 2;
  static constexpr int kAhead = 8;  // as many bytes as KvF16 has
  struct Cache {
    i8* codes;
    u16* scales;
  };
  template <int D>
  static constexpr int kGroup = D < 64 ? D : 64;
  struct Raw {
    uint2 codes;
    u16 scale;
  };
  template <int D, int kCells>
  struct Store {
    uint2 codes[kCells * D / 8];
    u16 scales[kCells * (D / kGroup<D>)];
    __device__ __forceinline__ Cache cache() { return {(i8*)codes, scales}; }
  };
  template <class P>
  struct Packed {
    static constexpr int kScales = P::kColumns / kGroup<P::kColumns>;
    P codes;
    u32 scales[kScales];
  };
  template <class P>  // of a warp's head
  static __device__ __forceinline__ Packed<P> pack(const P& x, int dims) {
    constexpr int kGroupOf = kGroup<P::kColumns>;
    Packed<P> packed = {x};
#pragma unroll
    for (int s = 0; s < Packed<P>::kScales; s++) {
      u32 most = 0;  // as bits, whose order NaN tops: it becomes the scale and so is not lost
      x.each(dims, [&](int c, float v) {
        if (c / kGroupOf == s) most = max(most, __float_as_uint(v) & 0x7fffffffu);
      });
      packed.scales[s] = float_to_half(__uint_as_float(warp_max(most)) / 127.0f);
      float scale = half_to_float(packed.scales[s]), over = scale > 0 ? scale : -minus_infinity();
      packed.codes.map(dims, [&](int c, float v) {
        return c / kGroupOf == s ? fminf(fmaxf(rintf(v / over), -127.0f), 127.0f) : v;
      });
    }
    return packed;
  }
  template <class P>
  static __device__ __forceinline__ void put(const Packed<P>& x, int dims, const Cache& to, size_t head) {
    x.codes.each(dims, [&](int c, float v) { to.codes[head * P::kColumns + c] = (i8)(int)v; });
#pragma unroll
    for (int s = 0; s < Packed<P>::kScales; s++)
      if (threadIdx.x % kWarp == s) to.scales[head * Packed<P>::kScales + s] = (u16)x.scales[s];
  }
  template <int D>
  static __device__ __forceinline__ Raw fetch(const Cache& from, size_t head, int part) {
    return {*(const uint2*)(from.codes + head * D + part * 8),
            from.scales[head * (D / kGroup<D>) + part * 8 / kGroup<D>]};
  }
  static __device__ __forceinline__ void unpack(const Raw& r, float (&v)[8]) {
    float scale = half_to_float(r.scale);
#pragma unroll
    for (int i = 0; i < 8; i++) {  // as the last byte of 2^23, from where 128 more takes it back
      u32 bits = __byte_perm((i < 4 ? r.codes.x : r.codes.y) ^ 0x80808080u, 0x4b000000u, 0x7440u + i % 4);
      v[i] = (__uint_as_float(bits) - 8388736.0f) * scale;
    }
  }
};

// One warp prepares a head as prepare_head() does and keeps it at `head` of `to` and, if it `copies`, at `at` of `copy`.
template <class Kv, int D, bool kNeox>
__device__ __forceinline__ void keep_head(const Heads& h, const Pairs<D, kNeox>& x, const Pairs<D, kNeox>* norm,
                                          const float* frequency, int cell, const typename Kv::Cache& to, size_t head,
                                          bool copies, const typename Kv::Cache& copy, size_t at) {
  using P = Pairs<D, kNeox>;
  if constexpr (Kv::kQuantised) {
    P prepared = {};
    prepare_head<D, kNeox>(h, x, norm, frequency, cell,
                           [&](int i, float a, float b) { prepared.a[i] = a, prepared.b[i] = b; });
    auto packed = Kv::pack(prepared, h.dims);
    Kv::put(packed, h.dims, to, head);
    if (copies) Kv::put(packed, h.dims, copy, at);
  } else {
    typename Kv::Cell *out = to.cells + head * D, *second = copy.cells + at * D;
    auto write = [&](int c, float v) {
      out[c] = Kv::pack(v);
      if (copies) second[c] = out[c];
    };
    prepare_head<D, kNeox>(h, x, norm, frequency, cell, [&](int i, float a, float b) {
      write(P::column_a(i, h.dims), a);
      write(P::column_b(i, h.dims), b);
    });
  }
}
