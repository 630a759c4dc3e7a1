// Block types of 256 columns, as blocks.cuh has those of fewer.
#pragma once

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
    nonlinear(word(r.q, i), s, even, odd);
  }
};

constexpr u32 k4 = 0x44004400u, k8 = 0x48004800u;  // fields of 4 + code in bits 8 and 9, of 8 + code in bits 7 to 9

struct Quarters {  // a unit is 16 bytes whose bit pairs are columns 32 apart
  static constexpr bool kCoded = true, kLean = false;
  static constexpr int kBlock = 256, kUnit = 64, kSubs = 4, kSubLen = 16;
  static __device__ __forceinline__ int column(int unit, int s) { return unit / 2 * 128 + s * 32 + (unit & 1) * 16; }
  static __device__ __forceinline__ void pairs(u32 w, int s, u32& even, u32& odd) {
    even = field(w << 8 - 2 * s, 0x03000300u, k4);
    odd = field(w >> 2 * s, 0x03000300u, k4);
  }
};

struct Q2_K : Quarters {  // planes: codes 64, scales 16, d and dmin 4
  static constexpr float kAdd = -4;
  struct Raw {
    uint4 q;
    uint2 sc;
    u32 dm;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load8(w + blocks * 64 + unit / 2 * 8), load4(w + blocks * 80 + unit / 4 * 4)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, int s, float& scale, float& min) {
    u32 sc = word(r.sc, s / 2) >> 16 * (s % 2) + 8 * (unit & 1);
    scale = half_to_float(r.dm) * (float)(int)(sc & 15);
    min = half_to_float(r.dm >> 16) * (float)(int)(sc >> 4 & 15);
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    pairs(word(r.q, i), s, even, odd);
  }
};

struct Q3_K : Quarters {  // planes: low bits 64, high bits 32, low scale bits 8, high scale bits 4, d 2
  static constexpr float kAdd = -8 - 4;
  struct Raw {
    uint4 q, high;
    uint2 low_scales;
    u32 high_scales;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load16(w + blocks * 64 + unit / 4 * 32 + unit % 2 * 16),
            load8(w + blocks * 96 + unit / 4 * 8), load4(w + blocks * 104 + unit / 4 * 4),
            load2(w + blocks * 108 + unit / 4 * 2)};
  }
  // The scale of columns 16k has its low bits in nibble k / 8 of byte k % 8 and its high ones in bits 2 (k / 4) of byte k % 4.
  static __device__ __forceinline__ void scales(const Raw& r, int unit, int s, float& scale, float& min) {
    int half = unit >> 1 & 1, at = 16 * (s % 2) + 8 * (unit & 1);
    u32 low = word(r.low_scales, s / 2) >> at + 4 * half & 15, high = r.high_scales >> at + 4 * half + s / 2 * 2 & 3;
    scale = half_to_float(r.d) * (float)((int)(low | high << 4) - 32);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int unit, int s, int i, u32& even, u32& odd) {
    u32 w = word(r.q, i), h = word(r.high, i) >> (unit & 2) * 2;
    even = field(h << 9 - s, 0x02000200u, field(w << 7 - 2 * s, 0x01800180u, k8));
    odd = field(s == 0 ? h << 1 : h >> s - 1, 0x02000200u, field(w >> 1 + 2 * s, 0x01800180u, k8));
  }
};

struct TQ2_0 : Quarters {  // planes: codes 64, d 2
  static constexpr float kAdd = -4 - 1;
  struct Raw {
    uint4 q;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load2(w + blocks * 64 + unit / 4 * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int, float& scale, float& min) {
    scale = half_to_float(r.d);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    pairs(word(r.q, i), s, even, odd);
  }
};

// A byte is a fraction of 256 in base 3: times 3^n, without what is then whole, it starts with digit n, which times 3 makes
// whole. Sub-block k of 16 columns is digit k / 2 of bytes 0-15 (k even) or 16-31 up to k = 9, digit k - 10 of bytes 32-47 up
// to k = 14; the last has digit i of four more bytes as its columns 4i to 4i + 3.
struct TQ1_0 {  // planes: codes 48, the last columns' codes 4, d 2
  static constexpr bool kCoded = true, kLean = false;
  static constexpr int kBlock = 256, kUnit = 64, kSubs = 4, kSubLen = 16;
  static constexpr float kAdd = -4 - 1;
  struct Raw {
    uint4 a, b, c;
    u32 last;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    const u8* q = w + unit / 4 * 48;
    return {load16(q), load16(q + 16), load16(q + 32), load4(w + blocks * 48 + unit / 4 * 4),
            load2(w + blocks * 52 + unit / 4 * 2)};
  }
  static __device__ __forceinline__ int column(int unit, int s) { return unit * 64 + s * 16; }
  static __device__ __forceinline__ void scales(const Raw& r, int, int, float& scale, float& min) {
    scale = half_to_float(r.d);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int unit, int s, int i, u32& even, u32& odd) {
    int k = (unit & 3) * 4 + s, digit = k < 10 ? k / 2 : k < 15 ? k - 10 : i;
    u32 w = k < 10 ? word(s % 2 == 0 ? r.a : r.b, i) : k < 15 ? word(r.c, i) : r.last;
    u32 power = (u32)(0x511b090301ull >> 8 * digit) & 0xff;  // 1, 3, 9, 27, 81
    even = field(((w & 0x00ff00ffu) * power & 0x00ff00ffu) * 3, 0x03000300u, k4);
    odd = field(((w >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu) * 3, 0x03000300u, k4);
  }
};
