// The block types, one struct each, behind one interface; rows are read in units of kUnit columns, one unit a lane.
//
//   Raw                      what a lane loads for one unit, in registers
//   load(w, blocks, unit)    `w` start of the matrix, `blocks` in all of it, `unit` counted from its start; below, from
//                            the start of the row
//   column(unit, s)          first column of sub-block s of kSubs; a sub-block is kSubLen consecutive columns
//   scales(raw, unit, s, scale, min) and codes(raw, unit, s, i, even, odd): columns 4i, 4i+2 and 4i+1, 4i+3 of sub-block
//                            s as pairs of halves; the weight is scale * (code + kAdd) - min
//
// The codes feed matrix units, so they are made in twos and without conversions: a field is masked into the mantissa of a
// power of two, which kAdd takes off again. Such halves are exact; a small power keeps more of the sum's bits, so it is 4
// where the codes have two bits and 64 at most. Float types have quad() instead: four columns in float32.
//
// kLean: few enough registers for 1024 threads of a processor.
//
// Matrices whose blocks are not a multiple of 16 bytes are stored field by field ("planes", see layout.cu).
#pragma once

constexpr u32 kNibble = 0x00f000f0u, k64 = 0x54005400u;  // a field of 64 + code: bits 4 to 9 of each half

// The nibbles of four bytes, low or high ones, as 64 + nibble.
__device__ __forceinline__ void nibbles(u32 w, bool high, u32& even, u32& odd) {
  even = field(high ? w : w << 4, kNibble, k64);
  odd = field(high ? w >> 8 : w >> 4, kNibble, k64);
}
// Four int8 as they are: masked into 1024, from where 1152 takes them back. Their sums would lose four bits beside 1152.
__device__ __forceinline__ void signed_bytes(u32 w, u32& even, u32& odd) {
  w ^= 0x80808080u;
  even = add_halves(__byte_perm(w, 0x64646464u, 0x4240), 0xe480e480u);
  odd = add_halves(__byte_perm(w, 0x64646464u, 0x4341), 0xe480e480u);
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

// The fifth bits of columns 4i to 4i + 3, the low bits of `w`, as 16 on top of what nibbles() gave.
__device__ __forceinline__ void fifth_bits(u32 w, u32& even, u32& odd) {
  even = field((w & 5) * 0x00400100u, 0x01000100u, even);  // bits 0 and 2 to 8 and 24
  odd = field((w & 10) * 0x00200080u, 0x01000100u, odd);   // bits 1 and 3
}

struct Q5_0 : Nibbles {  // planes: codes 16, fifth bits 4, d 2
  static constexpr float kAdd = -64 - 16;
  struct Raw {
    uint4 q;
    u32 high;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load4(w + blocks * 16 + unit * 4), load2(w + blocks * 20 + unit * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int, float& scale, float& min) {
    scale = half_to_float(r.d);
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    nibbles(word(r.q, i), s, even, odd);
    fifth_bits(r.high >> 16 * s + 4 * i, even, odd);
  }
};

struct Q5_1 : Nibbles {  // planes: codes 16, fifth bits 4, d and m 4
  static constexpr float kAdd = -64;
  struct Raw {
    uint4 q;
    u32 high, dm;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load4(w + blocks * 16 + unit * 4), load4(w + blocks * 20 + unit * 4)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int, float& scale, float& min) {
    scale = half_to_float(r.dm);
    min = -half_to_float(r.dm >> 16);
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    nibbles(word(r.q, i), s, even, odd);
    fifth_bits(r.high >> 16 * s + 4 * i, even, odd);
  }
};

// Looks four nibbles of one kind (low or high) of `w` up in a table of 16 int8.
__device__ __forceinline__ u32 lookup(u32 w, int high, u32 t0, u32 t1, u32 t2, u32 t3) {
  u32 n = (high ? w >> 4 : w) & 0x0f0f0f0fu;
  u32 s = __byte_perm(n | n >> 4, 0, 0x4420);  // nibble of byte b at bits 4b
  u32 low = __byte_perm(t0, t1, s & 0x7777u), up = __byte_perm(t2, t3, s & 0x7777u);
  return __byte_perm(low, up, (s & 0x8888u) >> 1 | 0x3210u);
}

// IQ4_NL's and IQ4_XS's 16 values.
__device__ __forceinline__ void nonlinear(u32 w, int high, u32& even, u32& odd) {
  signed_bytes(lookup(w, high, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u), even, odd);
}

struct IQ4_NL : Nibbles {  // planes: codes 16, d 2
  static constexpr float kAdd = 0;
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
    nonlinear(word(r.q, i), s, even, odd);
  }
};

// E2M1 values, doubled: their halves have a lower byte of 0.
__device__ __forceinline__ void e2m1(u32 w, int high, u32& even, u32& odd) {
  u32 upper = lookup(w, high, 0x42403c00u, 0x4a484644u, 0xc2c0bc80u, 0xcac8c6c4u);
  even = __byte_perm(upper, 0, 0x2404);
  odd = __byte_perm(upper, 0, 0x3414);
}

struct MXFP4 : Nibbles {  // planes: codes 16, exponent 1
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
    e2m1(word(r.q, i), s, even, odd);
  }
};

struct NVFP4 : Nibbles {  // planes: codes 32, scales 4; of 16 columns, eight low nibbles go before eight high ones
  static constexpr int kBlock = 64;
  static constexpr float kAdd = 0;
  struct Raw {
    uint4 q;
    u16 d;
  };
  static __device__ __forceinline__ Raw load(const u8* w, u64 blocks, u64 unit) {
    return {load16(w + unit * 16), load2(w + blocks * 32 + unit * 2)};
  }
  static __device__ __forceinline__ void scales(const Raw& r, int, int s, float& scale, float& min) {
    u32 x = r.d >> 8 * s & 0xff, e = x >> 3 & 15, m = x & 7;  // E4M3 without its sign, halved
    float power = __uint_as_float((116 + max(e, 1u)) << 23);  // 2^(e - 11)
    scale = x == 0x7f ? 0.0f : (float)(int)(e ? 8 + m : m) * power;
    min = 0;
  }
  static __device__ __forceinline__ void codes(const Raw& r, int, int s, int i, u32& even, u32& odd) {
    e2m1(word(r.q, 2 * s + i % 2), i / 2, even, odd);
  }
};
