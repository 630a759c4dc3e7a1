// From a file's blocks to the planes that kernels read: the same bytes, one field of all blocks after the other.

struct Planes {  // up to five fields: where one lies in a block, how long it is, where its plane starts in a block's worth
  int offset[5], size[5], start[5], count, block;
};

// out = planes of `blocks` blocks, of which `in` holds `count` from block `first` on. Reads words in file order, coalesced, so
// that `in` may be host memory.
__global__ void __launch_bounds__(256) to_planes(const u8* in, u8* out, u64 blocks, u64 first, u64 count, const Planes p) {
  let_next_start();
  wait_for_previous();
  u64 bytes = count * p.block, at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (at >= bytes) return;
  int n = (int)min((u64)4, bytes - at);
  u32 w = 0;
  if (n == 4) w = load4(in + at);
  else
    for (int i = 0; i < n; i++) w |= load1(in + at + i) << 8 * i;
  for (int i = 0; i < n; i++) {
    u64 b = (at + i) / p.block;
    int o = (int)(at + i - b * p.block), f = 0;
    b += first;
    while (f + 1 < p.count && (o < p.offset[f] || o >= p.offset[f] + p.size[f])) f++;
    out[blocks * p.start[f] + b * p.size[f] + o - p.offset[f]] = (u8)(w >> 8 * i);
  }
}
