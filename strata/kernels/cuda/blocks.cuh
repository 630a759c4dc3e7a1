// The block types, one struct each, behind one interface; rows are read in units of kUnit columns, one unit a lane.
//
//   Raw                      what a lane loads for one unit, in registers
//   load(w, blocks, unit)    `w` start of the matrix, `blocks` in all of it, `unit` counted from its start; below, from
//                            the start of the row
//   column(unit, s)          first column of sub-block s of kSubs; a sub-block is kSubLen consecutive columns
//   scales(raw, unit, s, scale, min) and codes(raw, unit, s, i, even, odd): columns 4i, 4i+2 and 4i+1, 4i+3 of sub-block
//                            s as pairs of halves; the weight is scale * (code + kAdd) - min
//
// The codes feed matrix units, so they are made in twos and without conversions: a field is masked into the mantissa of
// 64, which kAdd takes off again. Such halves are exact. Float types have quad() instead: four columns in float32.
//
// kLean: few enough registers for 1024 threads of a processor.
//
// Matrices whose blocks are not a multiple of 16 bytes are stored field by field ("planes", see layout.cu).
#pragma once

constexpr u32 kNibble = 0x00f000f0u, k64 = 0x54005400u;  // a field of 64 + code: bits 4 to 9 of each half

__device__ __forceinline__ u32 field(u32 w, u32 mask, u32 base) {  // one instruction, which the compiler makes two
  u32 v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w), "r"(mask), "r"(base));
  return v;
}
// The nibbles of four bytes, low or high ones, as 64 + nibble.
__device__ __forceinline__ void nibbles(u32 w, bool high, u32& even, u32& odd) {
  even = field(high ? w : w << 4, kNibble, k64);
  odd = field(high ? w >> 8 : w >> 4, kNibble, k64);
}
// Four int8 as they are: masked into 1024, from where 1152 takes them back. Their sums would lose four bits beside 1152.
__device__ __forceinline__ void signed_bytes(u32 w, u32& even, u32& odd) {
  w ^= 0x80808080u;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(even) : "r"(__byte_perm(w, 0x64646464u, 0x4240)), "r"(0xe480e480u));
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(odd) : "r"(__byte_perm(w, 0x64646464u, 0x4341)), "r"(0xe480e480u));
}
__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ u32 word(const uint2& v, int i) { return i == 0 ? v.x : v.y; }

// ---- floats ----

struct Plain {
  static constexpr bool kCoded = false, kLean = true;
  static constexpr int kBlock = 1;  // columns of one block
  static constexpr int kSubs = 1;
  template <class Raw>
  static __device__ __forceinline__ void scales(const Raw&, int, int, float& scale, float& min) {
    scale = 1;
    min = 0;
  }
};

struct F32 : Plain {
  static constexpr int kUnit = 4, kSubLen = 4;
  using Raw = uint4;
  static __device__ __forceinline__ Raw load(const u8* w, u64, u64 unit) { return load16(w + unit * 16); }
  static __device__ __forceinline__ int column(int unit, int) { return unit * 4; }
  static __device__ __forceinline__ float4 quad(const Raw& r, int, int, int) {
    return make_float4(__uint_as_float(r.x), __uint_as_float(r.y), __uint_as_float(r.z), __uint_as_float(r.w));
  }
};

struct F16 : Plain {
  static constexpr int kUnit = 8, kSubLen = 8;
  using Raw = uint4;
  static __device__ __forceinline__ Raw load(const u8* w, u64, u64 unit) { return load16(w + unit * 16); }
  static __device__ __forceinline__ int column(int unit, int) { return unit * 8; }
  static __device__ __forceinline__ float4 quad(const Raw& r, int, int, int i) {
    u32 a = word(r, 2 * i), b = word(r, 2 * i + 1);
    return make_float4(half_to_float(a), half_to_float(a >> 16), half_to_float(b), half_to_float(b >> 16));
  }
};

struct BF16 : F16 {
  static __device__ __forceinline__ float4 quad(const Raw& r, int, int, int i) {
    u32 a = word(r, 2 * i), b = word(r, 2 * i + 1);
    return make_float4(__uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u), __uint_as_float(b << 16),
                       __uint_as_float(b & 0xffff0000u));
  }
};

// ---- blocks of 32 ----

struct Q8_0 {  // planes: codes 32, d 2
  static constexpr bool kCoded = true, kLean = true;
  static constexpr int kBlock = 32, kUnit = 32, kSubs = 1, kSubLen = 32;
  static constexpr float kAdd = 0;
  struct Raw {
    uint4 a, b;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 32), load16(w + unit * 32 + 16), load2(w + blocks * 32 + unit * 2)};
  }
  static __device__ __forceinline__ int column(int unit, int) { return unit * 32; }
  static __device__ __forceinline__ void scales(const Raw& r, int, int, float& scale, float& min) {
    scale = half_to_float(r.d);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int, int i, u32& even, u32& odd) {
    signed_bytes(i < 4 ? word(r.a, i) : word(r.b, i - 4), even, odd);
  }
};

struct Nibbles {  // 16 bytes: low nibbles are columns 0-15, high nibbles 16-31
  static constexpr bool kCoded = true, kLean = true;
  static constexpr int kBlock = 32, kUnit = 32, kSubs = 2, kSubLen = 16;
  static __device__ __forceinline__ int column(int unit, int s) { return unit * 32 + s * 16; }
};

struct Q4_0 : Nibbles {  // planes: codes 16, d 2
  static constexpr float kAdd = -64 - 8;
  struct Raw {
    uint4 q;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load2(w + blocks * 16 + unit * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int, float& scale, float& min) {
    scale = half_to_float(r.d);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    nibbles(word(r.q, i), s, even, odd);
  }
};

struct Q4_1 : Nibbles {  // planes: codes 16, d and m 4
  static constexpr float kAdd = -64;
  struct Raw {
    uint4 q;
    u32 dm;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load4(w + blocks * 16 + unit * 4)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int, float& scale, float& min) {
    scale = half_to_float(r.dm);
    min = -half_to_float(r.dm >> 16);
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    nibbles(word(r.q, i), s, even, odd);
  }
};

// Looks four nibbles of one kind (low or high) of `w` up in a table of 16 int8.
__device__ __forceinline__ u32 lookup(u32 w, int high, u32 t0, u32 t1, u32 t2, u32 t3) {
  u32 n = (high ? w >> 4 : w) & 0x0f0f0f0fu;
  u32 s = __byte_perm(n | n >> 4, 0, 0x4420);  // nibble of byte b at bits 4b
  u32 low = __byte_perm(t0, t1, s & 0x7777u), up = __byte_perm(t2, t3, s & 0x7777u);
  return __byte_perm(low, up, (s & 0x8888u) >> 1 | 0x3210u);
}

struct MXFP4 : Nibbles {  // planes: codes 16, exponent 1; codes are E2M1 doubled, as halves whose lower byte is 0
  static constexpr float kAdd = 0;
  struct Raw {
    uint4 q;
    u32 e;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load1(w + blocks * 16 + unit)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int, float& scale, float& min) {
    scale = __uint_as_float(r.e < 2 ? 0x00200000u << r.e : (r.e - 1) << 23);  // 2^(e - 128)
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    u32 upper = lookup(word(r.q, i), s, 0x42403c00u, 0x4a484644u, 0xc2c0bc80u, 0xcac8c6c4u);
    even = __byte_perm(upper, 0, 0x2404);
    odd = __byte_perm(upper, 0, 0x3414);
  }
};

// ---- blocks of 256 ----

// The 6-bit scale and min of sub-blocks 2j and 2j+1 as packed by Q4_K and Q5_K; `h` is the first 16 bytes of a block.
__device__ __forceinline__ void k_scales(const uint4& h, int j, u32& scale, u32& min) {
  int shift = j * 16 & 16;
  u32 a = h.y >> shift, b = h.z >> shift, c = h.w >> shift;
  bool low = j < 2;
  scale = low ? a & 0x3f3fu : (c & 0x0f0fu) | (a >> 2 & 0x3030u);
  min = low ? b & 0x3f3fu : (c >> 4 & 0x0f0fu) | (b >> 2 & 0x3030u);
}

struct SuperBlock64 {  // a unit is 32 bytes of codes: low nibbles, then high nibbles, 32 columns each
  static constexpr bool kCoded = true;
  static constexpr int kBlock = 256, kUnit = 64, kSubs = 2, kSubLen = 32;
  static __device__ __forceinline__ int column(int unit, int s) { return unit * 64 + s * 32; }
  static __device__ __forceinline__ void scales_of(const uint4& head, int unit, int s, float& scale, float& min) {
    u32 sc, m;
    k_scales(head, unit & 3, sc, m);
    scale = half_to_float(head.x) * (float)(sc >> 8 * s & 0xff);
    min = half_to_float(head.x >> 16) * (float)(m >> 8 * s & 0xff);
  }
};

struct Q4_K : SuperBlock64 {
  static constexpr bool kLean = true;
  static constexpr float kAdd = -64;
  struct Raw {
    uint4 head, a, b;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64, u64 unit) {
    const u8* block = w + unit / 4 * 144;
    const u8* q = block + 16 + unit % 4 * 32;
    return {load16(block), load16(q), load16(q + 16)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, int s, float& scale, float& min) {
    scales_of(r.head, unit, s, scale, min);
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    nibbles(i < 4 ? word(r.a, i) : word(r.b, i - 4), s, even, odd);
  }
};

struct Q5_K : SuperBlock64 {
  static constexpr bool kLean = false;
  static constexpr float kAdd = -64;
  struct Raw {
    uint4 head, h0, h1, a, b;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64, u64 unit) {
    const u8* block = w + unit / 4 * 176;
    const u8* q = block + 48 + unit % 4 * 32;
    return {load16(block), load16(block + 16), load16(block + 32), load16(q), load16(q + 16)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, int s, float& scale, float& min) {
    scales_of(r.head, unit, s, scale, min);
  }
  static __device__ __forceinline__ void codes(const Raw& r, int unit, int s, int i, u32& even, u32& odd) {
    nibbles(i < 4 ? word(r.a, i) : word(r.b, i - 4), s, even, odd);
    u32 h = (i < 4 ? word(r.h0, i) : word(r.h1, i - 4)) >> (unit & 3) * 2 + s;
    even = field(h << 8, 0x01000100u, even);
    odd = field(h, 0x01000100u, odd);
  }
};

struct Q6_K {  // planes: low bits 128, high bits 64, scales 16, d 2; a unit is 16 + 16 low and 16 high bytes
  static constexpr bool kCoded = true, kLean = false;
  static constexpr int kBlock = 256, kUnit = 64, kSubs = 4, kSubLen = 16;
  static constexpr float kAdd = -64 - 32;
  struct Raw {
    uint4 a, b, h;
    uint2 sc;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    const u8* low = w + unit / 2 * 64 + (unit & 1) * 16;
    return {load16(low), load16(low + 32), load16(w + blocks * 128 + unit * 16),
            load8(w + blocks * 192 + unit / 2 * 8), load2(w + blocks * 208 + unit / 4 * 2)};
  }
  static __device__ __forceinline__ int column(int unit, int s) { return unit / 2 * 128 + s * 32 + (unit & 1) * 16; }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, int s, float& scale, float& min) {
    u32 w = (s < 2 ? r.sc.x : r.sc.y) >> (unit & 1) * 8;
    scale = half_to_float(r.d) * (float)(int)(i8)(s % 2 == 0 ? w : w >> 16);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    u32 h = word(r.h, i);
    nibbles(word(s % 2 == 0 ? r.a : r.b, i), s >= 2, even, odd);
    even = field(h << 8 - 2 * s, 0x03000300u, even);
    odd = field(h >> 2 * s, 0x03000300u, odd);
  }
};

struct IQ4_XS : Nibbles {  // planes: codes 128, head (d 2, high scale bits 2, low scale bits 4) 8
  static constexpr int kBlock = 256;
  static constexpr float kAdd = 0;
  struct Raw {
    uint4 q;
    uint2 head;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load8(w + blocks * 128 + unit / 8 * 8)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, int, float& scale, float& min) {
    int i = unit & 7;
    int code = (r.head.y >> 4 * i & 15) | (r.head.x >> 16 >> 2 * i & 3) << 4;
    scale = half_to_float(r.head.x) * (float)(code - 32);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    signed_bytes(lookup(word(r.q, i), s, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u), even, odd);
  }
};

#ifdef IQ3_S_GRID
__device__ const u32 kIq3sGrid[512] = {IQ3_S_GRID};

struct IQ3_S {  // planes: grid indices 64, signs 32, high index bits 8, scales 4, d 2
  static constexpr bool kCoded = true, kLean = false;
  static constexpr int kBlock = 256, kUnit = 32, kSubs = 1, kSubLen = 32;
  static constexpr float kAdd = -64 - 16;
  struct Raw {
    uint2 q;
    u32 signs, high, scale;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load8(w + unit * 8), load4(w + blocks * 64 + unit * 4), load1(w + blocks * 96 + unit),
            load1(w + blocks * 104 + unit / 2), load2(w + blocks * 108 + unit / 8 * 2)};
  }
  static __device__ __forceinline__ int column(int unit, int) { return unit * 32; }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, int, float& scale, float& min) {
    scale = half_to_float(r.d) * (float)(1 + 2 * (r.scale >> 4 * (unit & 1) & 15));
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int, int i, u32& even, u32& odd) {
    u32 g = __ldg(kIq3sGrid + ((word(r.q, i / 4) >> 8 * (i % 4) & 0xff) | (r.high >> i & 1) << 8));
    u32 s = r.signs >> 4 * i;  // a set bit turns a byte m into ~m + 1 = -m; 16 more make it fit five bits
    u32 flip = (s & 1 ? 0xffu : 0) | (s & 2 ? 0xff00u : 0) | (s & 4 ? 0xff0000u : 0) | (s & 8 ? 0xff000000u : 0);
    u32 code = __vadd4(g ^ flip, (flip & 0x01010101u) + 0x10101010u);
    even = (code & 0x00ff00ffu) * 16 + k64;
    odd = (code >> 8 & 0x00ff00ffu) * 16 + k64;
  }
};
#endif
