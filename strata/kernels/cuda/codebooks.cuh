// Block types whose codes are looked up in a codebook: 256 columns, grids of gguf.quants. A program has the types that its
// kernel names, as an unused grid would lie in the device's memory (see codebooks.py).
//
// A grid has four magnitudes to a word, its first column in the lowest byte. IQ1's has eight of 0, 1 and 2 to 16 bits: in
// the lower byte columns 0, 1, 4 and 5, in the upper one 2, 3, 6 and 7.
#pragma once

// Eight signs of which seven are stored: the number of set ones is even.
__device__ __forceinline__ u32 eight_signs(u32 seven) { return (seven & 127) | (__popc(seven & 127) << 7 & 128); }

// Four magnitudes from 1 to 127, byte b negated where bit b of `signs` is set.
__device__ __forceinline__ void with_signs(u32 magnitudes, u32 signs, u32& even, u32& odd) {
  u32 ones = (signs & 15) * 0x00204081u & 0x01010101u;  // bit b to byte b
  signed_bytes((magnitudes ^ ones * 255) + ones, even, odd);
}

struct Codebook {  // units of 64 columns, in their order
  static constexpr bool kCoded = true, kLean = false;
  static constexpr int kBlock = 256, kUnit = 64;
  static constexpr float kAdd = 0;
};
struct Codebook16 : Codebook {
  static constexpr int kSubs = 4, kSubLen = 16;
  static __device__ __forceinline__ int column(int unit, int s) { return unit * 64 + s * 16; }
};
struct Codebook32 : Codebook {
  static constexpr int kSubs = 2, kSubLen = 32;
  static __device__ __forceinline__ int column(int unit, int s) { return unit * 64 + s * 32; }
};

#ifdef IQ2_XXS_GRID
__device__ const uint2 kIq2xxsGrid[256] = {IQ2_XXS_GRID};

struct IQ2_XXS : Codebook32 {  // planes: codes 64, d 2; 32 columns are four grid indices, then four times seven signs and a scale
  struct Raw {
    uint4 q;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load2(w + blocks * 64 + unit / 4 * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int s, float& scale, float& min) {
    scale = half_to_float(r.d) * (float)(int)(1 + 2 * (word(r.q, 2 * s + 1) >> 28)) * 0.125f;
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    uint2 g = __ldg(kIq2xxsGrid + (word(r.q, 2 * s) >> 8 * (i / 2) & 0xff));
    with_signs(word(g, i % 2), eight_signs(word(r.q, 2 * s + 1) >> 7 * (i / 2)) >> 4 * (i % 2), even, odd);
  }
};
#endif

#ifdef IQ2_XS_GRID
__device__ const uint2 kIq2xsGrid[512] = {IQ2_XS_GRID};

struct IQ2_XS : Codebook16 {  // planes: codes 64, scales 8, d 2; eight columns are a grid index of nine bits and seven signs
  struct Raw {
    uint4 q;
    u16 sc, d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load2(w + blocks * 64 + unit * 2), load2(w + blocks * 72 + unit / 4 * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int s, float& scale, float& min) {
    scale = half_to_float(r.d) * (float)(int)(1 + 2 * (r.sc >> 4 * s & 15)) * 0.125f;
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    u32 w = word(r.q, s) >> 16 * (i / 2);
    uint2 g = __ldg(kIq2xsGrid + (w & 511));
    with_signs(word(g, i % 2), eight_signs(w >> 9) >> 4 * (i % 2), even, odd);
  }
};
#endif

#ifdef IQ2_S_GRID
__device__ const uint2 kIq2sGrid[1024] = {IQ2_S_GRID};

struct IQ2_S : Codebook16 {  // planes: low index bits 32, signs 32, high index bits 8, scales 8, d 2
  struct Raw {
    uint2 q, signs;
    u16 high, sc, d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load8(w + unit * 8), load8(w + blocks * 32 + unit * 8), load2(w + blocks * 64 + unit * 2),
            load2(w + blocks * 72 + unit * 2), load2(w + blocks * 80 + unit / 4 * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int s, float& scale, float& min) {
    scale = half_to_float(r.d) * (float)(int)(1 + 2 * (r.sc >> 4 * s & 15)) * 0.125f;
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    int l = 2 * s + i / 2;  // of the unit's eights
    uint2 g = __ldg(kIq2sGrid + ((word(r.q, l / 4) >> 8 * (l % 4) & 0xff) | (r.high >> 2 * l & 3) << 8));
    with_signs(word(g, i % 2), word(r.signs, s / 2) >> 16 * (s % 2) + 4 * i, even, odd);
  }
};
#endif

#ifdef IQ3_XXS_GRID
__device__ const u32 kIq3xxsGrid[256] = {IQ3_XXS_GRID};

struct IQ3_XXS : Codebook32 {  // planes: grid indices 64, four times seven signs and a scale 32, d 2
  struct Raw {
    uint4 q;
    uint2 signs;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load8(w + blocks * 64 + unit * 8), load2(w + blocks * 96 + unit / 4 * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int s, float& scale, float& min) {
    scale = half_to_float(r.d) * (float)(int)(1 + 2 * (word(r.signs, s) >> 28)) * 0.25f;
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    u32 g = __ldg(kIq3xxsGrid + (word(r.q, 2 * s + i / 4) >> 8 * (i % 4) & 0xff));
    with_signs(g, eight_signs(word(r.signs, s) >> 7 * (i / 2)) >> 4 * (i % 2), even, odd);
  }
};
#endif

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

#ifdef IQ1_GRID
__device__ const u16 kIq1Grid[2048] = {IQ1_GRID};

// Columns 4i to 4i + 3 of a grid entry of IQ1, an eighth up or down: as 4 + code, and a quarter more if up.
__device__ __forceinline__ void ternary(u32 index, int i, bool down, u32& even, u32& odd) {
  u32 base = down ? k4 : k4 | 0x00400040u;
  u32 w = __byte_perm(__ldg(kIq1Grid + index), 0, 0x4140);
  even = field(w << 8 - 4 * i, 0x03000300u, base);
  odd = field(w << 6 - 4 * i, 0x03000300u, base);
}

struct IQ1_S : Codebook32 {  // planes: low index bits 32, high ones with scale and shift 16, d 2
  static constexpr float kAdd = -4 - 1.125f;
  struct Raw {
    uint2 q;
    u32 high;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load8(w + unit * 8), load4(w + blocks * 32 + unit * 4), load2(w + blocks * 48 + unit / 4 * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int s, float& scale, float& min) {
    scale = half_to_float(r.d) * (float)(int)(1 + 2 * (r.high >> 16 * s + 12 & 7));
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    u32 h = r.high >> 16 * s, high = h >> 3 * (i / 2) & 7;
    ternary((word(r.q, s) >> 8 * (i / 2) & 0xff) | high << 8, i % 2, h & 0x8000, even, odd);
  }
};

struct IQ1_M : Codebook16 {  // planes: low index bits 32, high ones and shifts 16, scales with the bits of d 8
  static constexpr float kAdd = -4 - 1.125f;
  struct Raw {
    uint2 q;
    u32 high;
    uint2 sc;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load8(w + unit * 8), load4(w + blocks * 32 + unit * 4), load8(w + blocks * 48 + unit / 4 * 8)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int unit, int s, float& scale, float& min) {
    u32 d = (r.sc.x >> 12 & 0xf) | (r.sc.x >> 24 & 0xf0) | (r.sc.y >> 4 & 0xf00) | (r.sc.y >> 16 & 0xf000);
    u32 sc = (unit & 2 ? r.sc.y : r.sc.x) >> 16 * (unit & 1) + 3 * s & 7;
    scale = half_to_float(d) * (float)(int)(1 + 2 * sc);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    int l = 2 * s + i / 2;  // of the unit's eights
    u32 h = r.high >> 4 * l;
    ternary((word(r.q, l / 4) >> 8 * (l % 4) & 0xff) | (h & 7) << 8, i % 2, h & 8, even, odd);
  }
};
#endif
