// RMS norms of whole rows by themselves, where no projection follows that could take them along.

struct NormedRows {
  float* x;           // [tokens, width]
  const float* norm;  // [width]
  int width, unused;
};
struct NormedPair {
  NormedRows at[2];
};

// x = rms(x, norm) of one or two arrays. Grid: (arrays, tokens).
__global__ void __launch_bounds__(256) norm_rows(const NormedPair pair, float eps) {
  __shared__ float squares[kWarp];
  let_next_start();
  wait_for_previous();
  NormedRows rows = pair.at[blockIdx.x];
  float *x = rows.x + (size_t)blockIdx.y * rows.width, square = 0;
  for (int c = threadIdx.x; c < rows.width; c += blockDim.x) square += x[c] * x[c];
  square = lane_sum(square);
  if (threadIdx.x % kWarp == 0) squares[threadIdx.x / kWarp] = square;
  __syncthreads();
  float inverse = inverse_rms(squares, rows.width, eps);
  for (int c = threadIdx.x; c < rows.width; c += blockDim.x) x[c] *= inverse * rows.norm[c];
}
